"""TLS against a real server: who is trusted, who is refused, and that nothing is written to the untrusted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import InputError, JournalUnavailableError
from belayer.journal.address import parse_address
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.link import Link, LinkLostError
from belayer.journal.writer import take_over
from tests.journal.acl import PASSWORD, ROLLOUT, documented_users
from tests.journal.certificates import Authority
from tests.journal.faults import command, stored, written
from tests.ports import free_port
from tests.waiting import DEADLINE_S


class Served:
    """A TLS server that wants a client certificate when `mutual`."""

    def __init__(self, folder: Path, mutual: bool, host: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True)
        self.authority = Authority(folder)
        certificate, key = self.authority.issue("server", host)
        self.certificate, self.key = self.authority.issue("client")
        self.port = free_port()
        settings = {
            "tls-port": str(self.port),
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(self.authority.path),
            "tls-auth-clients": "yes" if mutual else "no",
        }
        self.server = EmbeddedServer(folder, settings=settings)

    def url(self, login: str = "", **options: str) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://{login}127.0.0.1:{self.port}?{query}"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path / "s", mutual=True)
    async with made.server:
        yield made


async def test_a_trusted_server_and_a_client_with_a_certificate(served: Served) -> None:
    client = {"ssl_certfile": str(served.certificate), "ssl_keyfile": str(served.key)}
    store = await open_store(served.url(ssl_ca_certs=str(served.authority.path), **client), timeout_s=DEADLINE_S)
    await written(store)
    assert len(await stored(store)) == 4
    assert await store.wait(ids.trajectory("t"), 0, 1.0)
    async with store.subscribe("g", "c") as notices:
        assert await notices.next(0.1) is None
    await store.close()


async def test_a_login_over_tls(served: Served) -> None:
    (line, _) = documented_users("")
    await command(served.server.url, "ACL", "SETUSER", *line.split()[1:])
    from urllib.parse import quote

    options = {
        "ssl_ca_certs": str(served.authority.path),
        "ssl_certfile": str(served.certificate),
        "ssl_keyfile": str(served.key),
    }
    store = await open_store(served.url(f"{ROLLOUT}:{quote(PASSWORD, safe='')}@", **options), timeout_s=DEADLINE_S)
    await take_over(store, ids.trajectory("t"), "a")
    await store.close()


async def test_who_is_not_trusted_gets_nothing(served: Served, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    certificate, key = stranger.issue("other")
    ours = {"ssl_certfile": str(served.certificate), "ssl_keyfile": str(served.key)}
    trusted = str(served.authority.path)
    for options in (
        {"ssl_ca_certs": str(stranger.path), **ours},
        {"ssl_ca_certs": trusted},
        {"ssl_ca_certs": trusted, "ssl_certfile": str(certificate), "ssl_keyfile": str(key)},
    ):
        with pytest.raises(JournalUnavailableError) as caught:
            await open_store(served.url("u:geheim@", **options))
        assert "geheim" not in str(caught.value)
    assert await command(served.server.url, "DBSIZE") == 0


async def test_a_server_of_another_name_is_refused_unless_the_check_is_turned_off(tmp_path: Path) -> None:
    made = Served(tmp_path / "s", mutual=False, host="journal.example.org")
    async with made.server:
        trusted = {"ssl_ca_certs": str(made.authority.path)}
        with pytest.raises(JournalUnavailableError, match="certificate"):
            await open_store(made.url(**trusted))
        for unchecked in ({"ssl_check_hostname": "false", **trusted}, {"ssl_cert_reqs": "none"}):
            store = await open_store(made.url(**unchecked), timeout_s=DEADLINE_S)
            await store.close()


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        parse_address(f"rediss://u:geheim@h?ssl_ca_certs={tmp_path}/none.pem")


async def test_plain_text_to_a_tls_port_ends_with_an_error(served: Served) -> None:
    with pytest.raises(JournalUnavailableError):
        await open_store(f"redis://u:geheim@127.0.0.1:{served.port}")


async def test_a_certificate_that_was_renewed_is_used_from_the_next_connection_on(served: Served) -> None:
    """A process that runs for weeks outlives its certificate; whoever renews the file does not start it anew."""
    certificate, key = served.authority.issue("renewed", valid_days=-0.5)
    options = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    address = parse_address(served.url(ssl_ca_certs=str(served.authority.path), **options))
    with pytest.raises(LinkLostError):
        await Link.open(address, "belayer", DEADLINE_S)
    whole = certificate.read_bytes()
    certificate.write_bytes(whole[:50])  # its renewal is under way
    with pytest.raises(LinkLostError):
        await Link.open(address, "belayer", DEADLINE_S)
    served.authority.issue("renewed")
    (await Link.open(address, "belayer", DEADLINE_S)).close()


async def test_a_server_whose_certificate_has_expired_is_refused_and_says_so(tmp_path: Path) -> None:
    made = Served(tmp_path / "s", mutual=False)
    made.authority.issue("server", valid_days=-0.5)
    async with made.server:
        with pytest.raises(JournalUnavailableError, match="expired"):
            await open_store(made.url(ssl_ca_certs=str(made.authority.path)))
