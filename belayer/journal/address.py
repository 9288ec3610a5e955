"""Where the server is: `redis://`, `rediss://` and `unix://` URLs, read once, shown without their password."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import parse_url

from belayer.errors import InputError

FORMS = "redis://host:port/db, rediss://host:port/db (TLS) or unix:///path/to/socket"


@dataclass(frozen=True)
class Address:
    """A server's address with what is needed to log in. `shown` is for messages."""

    url: str
    shown: str
    socket_path: str | None
    host: str
    port: int
    db: int
    username: str | None
    password: str | None
    tls: ssl.SSLContext | None

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"


def parse_address(url: str) -> Address:
    """Read the URL; one that cannot be read is an InputError that does not repeat the password."""
    try:
        parts = urlsplit(url)
        options: dict[str, Any] = dict(parse_url(url))
        unix = parts.scheme == "unix"
        if unix and not options.get("path"):
            raise ValueError("it names no socket")
        return Address(
            url=url,
            shown=_shown(url),
            socket_path=options["path"] if unix else None,
            host=options.get("host", "localhost"),
            port=options.get("port", 6379),
            db=int(options.get("db", 0)),
            username=options.get("username"),
            password=options.get("password"),
            tls=_tls_context(options) if parts.scheme == "rediss" else None,
        )
    except (ValueError, OSError) as error:
        raise InputError(f"{_shown(url)!r} is not a usable journal URL ({error}); expected {FORMS}") from None


def _shown(url: str) -> str:
    """The URL without user, password and options."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        return "the URL"


def _tls_context(options: dict[str, Any]) -> ssl.SSLContext:
    """redis-py's URL options: ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname, ssl_cert_reqs."""
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"), options.get("ssl_password"))
    required = options.get("ssl_cert_reqs", "required")
    if required == "none" or str(options.get("ssl_check_hostname", True)).lower() in ("false", "0", "no"):
        context.check_hostname = False
    if required == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
