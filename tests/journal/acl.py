"""A real server whose users are those of docs/security.md, read from the page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from belayer.journal.embedded import EmbeddedServer

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PASSWORD = "geheim/?#@% word"
ROLLOUT, ACTORS = "belayer-rollout", "belayer-actors"


def documented_users(namespace: str) -> list[str]:
    """The page's ACL lines for all namespaces that begin with `namespace`; its password is PASSWORD's digest."""
    (block,) = re.findall(r"```acl\n(.*?)```", PAGE.read_text(), re.S)
    lines = [line for line in block.splitlines() if line.startswith("user belayer-")]
    return [re.sub(r">\S+", _password(), line).replace("NAMESPACE:", namespace) for line in lines]


def allowed(user: str) -> set[str]:
    """The commands that the page allows the user, as Redis counts them."""
    (line,) = [line for line in documented_users("x") if line.startswith(f"user {user} ")]
    return {word[1:] for word in line.split() if word.startswith("+")}


def url_of(server: EmbeddedServer, user: str, password: str = PASSWORD) -> str:
    """How the user names the journal."""
    return f"unix://{user}:{quote(password, safe='')}@{server.socket}"


@asynccontextmanager
async def server_with_users(folder: Path, namespace: str = "") -> AsyncIterator[EmbeddedServer]:
    """The server; its default user is the administrator, as tests and the embedded server need one."""
    folder.mkdir(parents=True, exist_ok=True)
    acl = folder / "users.acl"
    acl.write_text("\n".join([*documented_users(namespace), "user default on nopass ~* &* +@all"]) + "\n")
    async with EmbeddedServer(folder, settings={"aclfile": str(acl)}) as server:
        yield server


def _password() -> str:
    import hashlib

    return "#" + hashlib.sha256(PASSWORD.encode()).hexdigest()
