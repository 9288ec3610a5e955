"""Opening the journal: the forms of a URL, a wrong one, a login, and a server of our own when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import InputError, JournalUnavailableError, ServerRefusedError
from belayer.journal.address import parse_address
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.route import parse_routes
from belayer.journal.writer import take_over
from tests.journal.faults import command, stored, written
from tests.journal.topologies import Cluster, Sentineled
from tests.ports import free_port


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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://u:secret@h:1,h:2", "names no master"),
        ("redis+sentinel://h:1/name/more", "names no master"),
        ("redis+sentinel://h:1/name?db=x", "expected redis://host:port/db"),
        ("redis+sentinel:///name", "names no host"),
        ("redis+cluster://u:secret@h:1,h:2/3", "only database 0"),
        ("redis+cluster://u:secret@h:1,h:x", "expected redis://host:port/db"),
        ("redis+magic://u:secret@h:1", "expected redis://host:port/db"),
    ],
)
def test_a_url_of_many_servers_that_cannot_be_read_says_why(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_routes(url)
    assert "secret" not in str(caught.value)


async def test_many_servers_that_are_not_there_are_all_named() -> None:
    ports = free_port(), free_port()
    for form, path in (("cluster", ""), ("sentinel", "/journal")):
        with pytest.raises(JournalUnavailableError) as caught:
            await open_store(f"redis+{form}://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}{path}")
        for port in ports:
            assert f"redis://127.0.0.1:{port}: Connect" in caught.value.cause


async def test_a_form_that_does_not_fit_the_server_names_the_one_that_does(
    shared_cluster: Cluster, shared_sentinels: Sentineled
) -> None:
    node, sentinel = shared_cluster.primaries[0], shared_sentinels.sentinels[0]
    single = shared_sentinels.servers[0]
    for url, remedy in (
        (f"redis://127.0.0.1:{node.port}", r"redis\+cluster://"),
        (f"redis://127.0.0.1:{sentinel.port}", r"redis\+sentinel://"),
        (f"redis+cluster://127.0.0.1:{single.port}", "name it with redis://"),
        (f"redis+sentinel://127.0.0.1:{single.port}/journal", "name the sentinels"),
        (f"redis+sentinel://127.0.0.1:{sentinel.port}/other", "check the name"),
        (f"redis://127.0.0.1:{shared_sentinels.servers[1].port}", "name the primary"),
    ):
        with pytest.raises(ServerRefusedError, match=remedy):
            await open_store(url)


async def test_shards_of_a_cluster_are_spread_over_its_nodes(shared_cluster: Cluster, namespace: str) -> None:
    store = await open_store(shared_cluster.url, namespace=namespace, shards=32)
    for number in range(200):
        await take_over(store, ids.trajectory(f"t{number}"), "a")
    assert len(await store.streams()) == 200
    for node in shared_cluster.primaries:
        keys = await command(node.url, "KEYS", f"{{belayer:{namespace}:*s:*")
        assert 10 < len(keys) < 150
    await store.close()


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
        await open_store(redis_url, namespace=namespace, shards=1)
    store = await open_store(redis_url, namespace=namespace)
    for number in range(8):
        await written(store, ids.trajectory(f"t{number}"))
    assert len(await store.streams()) == 8
    for shard in range(2):
        assert await command(redis_url, "SCARD", f"{{belayer:{namespace}:{shard}}}:names") > 0
    await store.close()


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
