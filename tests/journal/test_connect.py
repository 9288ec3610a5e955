"""Opening the journal: the forms of a URL, a wrong one, a login, and a server of our own when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer.errors import InputError, JournalUnavailableError, ServerRefusedError
from belayer.journal.address import parse_address
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from tests.journal.faults import command, free_port, stored, written


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "http://h",
        "unix://",
        "redis://h:port",
        "redis://u:secret@h:99999999/0",
        "rediss://h?ssl_ca_certs=/no",
    ],
)
async def test_a_url_that_cannot_be_read_names_the_forms(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected redis://host:port/db") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


def test_an_address_is_shown_without_user_and_password() -> None:
    address = parse_address("redis://user:secret@example.org:6380/3?x=secret")
    assert address.shown == "redis://example.org:6380/3"
    assert (address.host, address.port, address.db) == ("example.org", 6380, 3)
    assert (address.username, address.password) == ("user", "secret")
    assert "secret" not in repr(address)


async def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(JournalUnavailableError, match="is the server up"):
        await open_store(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(JournalUnavailableError, match="No such file"):
        await open_store("unix:///nowhere/redis.sock")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"durability": "paper"}, "memory, everysec, fsync, replicated"),
        ({"namespace": "a b"}, "not a usable name"),
        ({"shards": 0}, "expected 1 to 1024"),
    ],
)
async def test_wrong_options_are_named(redis_url: str, options: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        await open_store(redis_url, **options)


async def test_a_namespace_keeps_its_number_of_shards(redis_url: str, namespace: str) -> None:
    store = await open_store(redis_url, namespace=namespace, shards=2)
    await store.close()
    with pytest.raises(InputError, match="open it with shards=2"):
        await open_store(redis_url, namespace=namespace)


async def test_namespaces_do_not_see_each_other(redis_url: str, namespace: str) -> None:
    first = await open_store(redis_url, namespace=namespace)
    second = await open_store(redis_url, namespace=namespace + "-2")
    await written(first)
    assert await second.streams() == []
    assert await stored(second) == []
    await first.close()
    await second.close()


async def test_a_port_a_password_and_a_database(tmp_path: Path) -> None:
    port = free_port()
    async with EmbeddedServer(tmp_path / "r", port=port, settings={"requirepass": "secret"}):
        store = await open_store(f"redis://:secret@127.0.0.1:{port}/2")
        await written(store)
        assert len(await stored(store)) == 4
        await store.close()
        for url in (f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}"):
            with pytest.raises(ServerRefusedError, match="check user and password") as caught:
                await open_store(url)
            assert "secret" not in str(caught.value) and "wrong" not in str(caught.value).split("found")[0]


async def test_a_user_without_permission_is_told(redis_url: str, namespace: str) -> None:
    await command(redis_url, "ACL", "SETUSER", namespace, "on", ">pw", "~*", "+@all", "-xadd", "-eval")
    store = await open_store(redis_url.replace("unix://", f"unix://{namespace}:pw@"), namespace=namespace)
    with pytest.raises(ServerRefusedError, match="NOPERM"):
        await written(store)
    await store.close()
    await command(redis_url, "ACL", "DELUSER", namespace)


async def test_without_a_url_a_server_of_our_own_serves_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BELAYER_JOURNAL_URL", raising=False)
    store = await open_store()
    await written(store)
    socket = Path(store.address.removeprefix("unix://"))
    assert socket.exists()
    await store.close()
    assert not socket.parent.exists()

    store = await open_store(folder=tmp_path / "r")
    await written(store)
    await store.close()
    store = await open_store(folder=tmp_path / "r")
    assert len(await stored(store)) == 4
    await store.close()


async def test_the_url_comes_from_the_environment(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELAYER_JOURNAL_URL", redis_url)
    store = await open_store(namespace=namespace)
    assert store.address == redis_url
    await store.close()
