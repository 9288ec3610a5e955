"""The primary that Sentinel names: `redis+sentinel://host:port,host:port/master-name`.

All sentinels that the URL names are asked, at every opening of a link, and the newest configuration among the first
majority of answers is believed (with all sentinels in the URL, a failover was agreed on by at least one of these). The
server that they name must say itself that it is the primary, else it is not used: just after a failover an old answer
or a server that has not been told yet are usual and pass.

User and password of the URL are those of the servers; the sentinels' own are the options `sentinel_username` and
`sentinel_password`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

import hiredis

from belayer.errors import InputError, ServerRefusedError
from belayer.journal.address import FORMS, Address, parse_places
from belayer.journal.link import Link, LinkLostError, NotReadyError, Reply, pack
from belayer.journal.replies import is_transient
from belayer.journal.route import Route
from belayer.journal.server_checks import parse_info

_PORT = 26379
_ANSWER_S = 1.0
"""How long a sentinel may take; the others are heard meanwhile."""


class _Primary(NamedTuple):
    """What one sentinel says."""

    config_epoch: int
    host: str
    port: int


class SentinelRoute:
    """The way to the primary. The links to the sentinels are kept, and opened again when they break."""

    is_cluster = False

    def __init__(self, url: str) -> None:
        places = parse_places(url, _PORT)
        if not places.path or "/" in places.path:
            raise InputError(f"{places.shown!r} names no master; expected {FORMS}")
        self._shown = places.shown
        self._master = places.path
        self._login = places.addresses[0]
        user, password = places.options.get("sentinel_username"), places.options.get("sentinel_password")
        self._sentinels = [replace(address, username=user, password=password, db=0) for address in places.addresses]

    @property
    def shown(self) -> str:
        return self._shown

    def of(self, key: bytes) -> Route:
        return self

    async def open(self, name: str, timeout_s: float) -> Link:
        address = await self.primary(timeout_s)
        link = await Link.open(address, name, timeout_s)
        try:
            (info,) = await link.exchange([pack(("INFO", "replication"))], 1, timeout_s)
            if isinstance(info, hiredis.ReplyError):
                raise LinkLostError(f"{address.shown}: {info}")
            if (role := parse_info(info).get("role")) != "master":
                raise NotReadyError(f"Sentinel names {address.shown}, which says that it is a {role}")
        except BaseException:
            link.close()
            raise
        return link

    async def open_asked(self, reply: str, name: str, timeout_s: float) -> Link:
        return await self.open(name, timeout_s)

    async def is_current(self, link: Link, timeout_s: float) -> bool:
        return link.address == (await self.primary(timeout_s)).shown

    def redirected(self, reply: str) -> None:
        pass

    async def primary(self, timeout_s: float) -> Address:
        """The primary's address as the sentinels have it now."""
        asked = [asyncio.create_task(self._ask(sentinel)) for sentinel in self._sentinels]
        answers: list[_Primary] = []
        problems: list[str] = []
        try:
            for answer in asyncio.as_completed(asked, timeout=timeout_s):
                try:
                    answers.append(await answer)
                except LinkLostError as error:
                    problems.append(error.cause)
                if len(answers) > len(asked) // 2:
                    break
        except TimeoutError:
            problems.append(f"no answer within {timeout_s:.1f} s")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not answers:
            raise LinkLostError("no sentinel answers: " + "; ".join(sorted(set(problems))))
        newest = max(answers)
        if not newest.host:
            known = f"no master named {self._master!r}"
            raise ServerRefusedError(self._shown, "the sentinels do not know it", known, "check the name in the URL")
        return self._login.at(newest.host, newest.port)

    async def _ask(self, sentinel: Address) -> _Primary:
        """One sentinel's answer; config epoch -1 and no host when it knows no such master."""
        commands = [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master), ("SENTINEL", "MASTER", self._master)]
        try:
            link = await Link.open(sentinel, "belayer", _ANSWER_S)
            try:
                place, facts = await link.exchange([pack(command) for command in commands], 2, _ANSWER_S)
            finally:
                link.close()
        except LinkLostError as error:
            raise LinkLostError(f"{sentinel.shown}: {error.cause}") from None
        if isinstance(place, hiredis.ReplyError) and not is_transient(place):
            raise ServerRefusedError(
                sentinel.shown, "it is not a sentinel, or refuses the question", str(place), "name the sentinels' ports"
            )
        if not isinstance(place, list) or not isinstance(facts, list):
            return _Primary(-1, "", 0)
        host, port = _texts(place)
        named = _texts(facts)
        return _Primary(int(dict(zip(named[::2], named[1::2], strict=True))["config-epoch"]), host, int(port))


def _texts(reply: Reply) -> list[str]:
    return [bytes(part).decode() for part in reply]
