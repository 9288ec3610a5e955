"""A password in the journal's URL is in no error, log line, repr, key, event or process title, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import structlog

from belayer import ids
from belayer.client import Trajectory
from belayer.errors import BelayerError
from belayer.journal.address import parse_address, parse_places
from belayer.journal.connect import open_store
from belayer.journal.link import Link
from belayer.journal.route import parse_routes
from belayer.journal.writer import take_over
from tests.cli.command import belayer
from tests.command_lines import command_lines
from tests.journal.acl import ROLLOUT, server_with_users, url_of
from tests.journal.faults import command, hurried, raw
from tests.ports import free_port
from tests.waiting import DEADLINE_S

SECRET = "geheim"
PASSWORD = f"{SECRET}/?#@% word"
UNREADABLE = [
    f"redis://user:{SECRET}/{SECRET}@host:6379/0",
    f"redis://user:{SECRET}?{SECRET}@host:6379/0",
    f"redis://user:{SECRET}#{SECRET}@host:6379/0",
    f"redis://user:{SECRET}@{SECRET}@host:port/0",
    f"redis://:{SECRET}[@host/0",
    f"redis://user:{SECRET}@host:99999999/0",
    f"rediss://user:{SECRET}@host:6379/0?ssl_ca_certs=/none",
    f"http://user:{SECRET}@host",
    f"unix://user:{SECRET}@",
    f"redis+sentinel://user:{SECRET}@host:26379",
    f"redis+sentinel://user:{SECRET}/x@host:26379/name?sentinel_password={SECRET}",
    f"redis+cluster://user:{SECRET}@host:1,host:x",
    f"redis+magic://user:{SECRET}@host",
    f"{SECRET}",
]


def told(error: BaseException) -> str:
    """Everything that an error shows of itself, with the whole chain of its causes."""
    return f"{error} {error!r} {error.args} {vars(error)} {''.join(traceback.format_exception(error))}"


@pytest.mark.parametrize("url", UNREADABLE)
def test_a_url_that_cannot_be_read(url: str) -> None:
    for parse in (parse_address, parse_routes):
        with pytest.raises(BelayerError) as caught:
            parse(url)
        assert SECRET not in told(caught.value)


def test_what_was_read_is_shown_without_it() -> None:
    url = f"redis+sentinel://user:{quote(PASSWORD, safe='')}@host:1/name?sentinel_password={SECRET}"
    places = parse_places(url, 26379)
    assert places.addresses[0].password == PASSWORD
    assert SECRET not in f"{places!r} {places} {places.addresses} {parse_routes(url)!r}"


async def everything_that_fails(folder: Path) -> list[BaseException]:
    """One error of each kind that the journal raises, from a server with a password."""
    found: list[BaseException] = []

    async def fails(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except BelayerError as error:
            found.append(error)
        else:
            raise AssertionError("it did not fail")

    async with server_with_users(folder, "night:") as server:
        url = url_of(server, ROLLOUT, PASSWORD)
        await fails(lambda: open_store(url_of(server, ROLLOUT, f"wrong-{SECRET}"), namespace="night"))
        await fails(lambda: open_store(url_of(server, SECRET, PASSWORD), namespace="night"))
        await fails(lambda: open_store(url, namespace="day"))
        await fails(lambda: open_store(url, namespace="night", durability="fsync"))
        await fails(lambda: open_store(url, namespace="night", durability="replicated"))
        store = await open_store(url, namespace="night", timeout_s=DEADLINE_S)
        await fails(lambda: open_store(url, namespace="night", shards=3))
        stale, _ = await take_over(store, ids.trajectory("t"), "a")
        trajectory = await Trajectory.open(store, "t")
        await fails(lambda: trajectory.finish("too early"))
        await fails(lambda: take_over(store, ids.trajectory("t"), "b", only_at=1))
        await fails(stale.check_epoch)
        await fails(lambda: store.remove(ids.trajectory("t")))
        key = "{belayer:night:0}:s:trajectory/damaged"
        await command(server.url, "XADD", key, "1-1", "e", "nothing")
        await fails(lambda: take_over(store, ids.trajectory("damaged"), "a"))
        await command(server.url, "XADD", "{belayer:night:0}:s:trajectory/foreign", "1-1", "x", "nothing")
        await fails(lambda: store.read(ids.trajectory("foreign")))
        ours = [words for pid, words in command_lines() if pid == os.getpid() or str(os.getpid()) in words]
        assert ours and SECRET not in str(ours)
        keys = await command(server.url, "KEYS", "*")
        stored = [await raw(server.url, b"*2\r\n$4\r\nDUMP\r\n$%d\r\n%b\r\n" % (len(name), name)) for name in keys]
        assert SECRET.encode() not in b"".join([*keys, *stored])
        clients = await command(server.url, "CLIENT", "LIST")
        assert SECRET.encode() not in bytes(clients)
        assert SECRET not in f"{store!r} {vars(store)} {trajectory!r} {stale!r}"
        await server.stop()
        with hurried(store, 1.0):
            await fails(lambda: trajectory.abort("nobody listens"))
            await fails(lambda: store.streams())
        await fails(lambda: open_store(url, namespace="night", timeout_s=0.5))
        await fails(lambda: open_store(f"redis://u:{SECRET}@127.0.0.1:{free_port()}", timeout_s=0.5))
        await store.close()
        await fails(lambda: take_over(store, ids.trajectory("t"), "late"))
        assert SECRET not in server.log.read_text()
        await server.start()
    return found


async def test_every_error_of_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    with structlog.testing.capture_logs() as logs:
        found = await everything_that_fails(tmp_path / "s")
    assert {type(error).__name__ for error in found} == {
        "CodecError",
        "FencedError",
        "InputError",
        "JournalUnavailableError",
        "ProtocolError",
        "ServerRefusedError",
        "WrongSequenceError",
    }
    for error in found:
        assert SECRET not in told(error), error
    assert SECRET not in f"{logs} {caplog.text}"


@pytest.mark.parametrize(
    "answered", ["ERR unknown command 'AUTH', with args beginning with: 'u' '{}'", "ERR no such user: u {}"]
)
@pytest.mark.parametrize("length", [0, 200])
async def test_a_server_that_repeats_the_login_in_its_error(answered: str, length: int) -> None:
    """What stands between us and Redis may say anything; Redis itself cuts the words of an unknown command short."""
    password = PASSWORD + "x" * length
    shown = password[:100] if "args" in answered else password

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(f"-{answered.format(shown)}\r\n".encode() * 3)
        await writer.drain()

    proxy = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    address = parse_address(f"redis://u:{quote(password, safe='')}@127.0.0.1:{port}")
    with pytest.raises(BelayerError) as caught:
        await Link.open(address, "belayer", 5.0)
    assert SECRET not in told(caught.value)
    proxy.close()


@pytest.mark.parametrize("verb", ["status", "archive run --archive a"])
def test_the_verbs_say_nothing_of_it(verb: str, tmp_path: Path) -> None:
    url = f"redis://user:{SECRET}@127.0.0.1:{free_port()}/x"
    done = belayer(*verb.split(), cwd=tmp_path, BELAYER_JOURNAL_URL=url)
    assert done.returncode == 2
    assert SECRET not in done.stdout + done.stderr
