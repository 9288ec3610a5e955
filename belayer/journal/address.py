"""Where the server is, or those that know it: URLs, read once, shown without their password."""

from __future__ import annotations

import contextlib
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import parse_url

from belayer.errors import InputError

FORMS = (
    "redis://host:port/db, rediss://host:port/db (TLS), unix:///path/to/socket, "
    "redis+sentinel://host:port,host:port/master-name or redis+cluster://host:port,host:port"
)
_PORT = re.compile(r":\d+\Z")


class Tls:
    """What TLS links are opened with; read again when its files have changed, because certificates are renewed."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._files = [options[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if options.get(name)]
        self._read = self._stamps()
        self._context = _tls_context(options)

    def context(self) -> ssl.SSLContext:
        """For the next link. While a renewal is half done, what was there before."""
        if (stamps := self._stamps()) != self._read:
            with contextlib.suppress(OSError):  # ssl's errors are OSErrors too
                self._context, self._read = _tls_context(self._options), stamps
        return self._context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = Path(file).stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append(None)
        return found


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
    tls: Tls | None

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def at(self, host: str, port: int) -> Address:
        """The same login at another place."""
        scheme = "rediss" if self.tls else "redis"
        shown_host = f"[{host}]" if ":" in host else host
        return replace(self, host=host, port=port, socket_path=None, shown=f"{scheme}://{shown_host}:{port}")


def parse_address(url: str) -> Address:
    """Read the URL; one that cannot be read is an InputError that does not repeat the password."""
    _check_login(url)
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
            tls=Tls(options) if parts.scheme == "rediss" else None,
        )
    except (ValueError, OSError) as error:
        raise InputError(f"{_shown(url)!r} is not a usable journal URL ({error}); expected {FORMS}") from None


@dataclass(frozen=True)
class Places:
    """A URL that names several servers. `options`: what follows the question mark."""

    shown: str
    addresses: tuple[Address, ...]
    path: str
    options: dict[str, str] = field(repr=False)


def parse_places(url: str, default_port: int) -> Places:
    """Read `redis+WHAT://[user:password@]host:port,host:port/path?options` and the same with `rediss` for TLS."""
    _check_login(url)
    try:
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        start = f"{parts.scheme.partition('+')[0]}://" + (f"{login}@" if login else "")
        named = [host if _PORT.search(host) else f"{host}:{default_port}" for host in hosts.split(",") if host]
        if not named:
            raise ValueError("it names no host")
        addresses = tuple(parse_address(f"{start}{host}?{parts.query}") for host in named)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return Places(_shown(url), addresses, parts.path.strip("/"), options)
    except (ValueError, InputError) as error:
        why = f"; expected {FORMS}" if isinstance(error, ValueError) else ""
        raise InputError(f"{_shown(url)!r} is not a usable journal URL ({error}){why}") from None


def _shown(url: str) -> str:
    """The URL without user, password and options, also where it is not written as it should be."""
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}" if slashes else "the URL"


def _check_login(url: str) -> None:
    """InputError when the login would be taken for something else: parsers quote what they cannot read."""
    login = url.partition("://")[2].rpartition("@")[0]
    if any(sign in login for sign in "/?#[]@"):
        raise InputError(
            f"{_shown(url)!r} is not a usable journal URL (its login or an option has a sign that ends it; "
            f"write / ? # @ and % there as %2F %3F %23 %40 and %25); expected {FORMS}"
        )


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
