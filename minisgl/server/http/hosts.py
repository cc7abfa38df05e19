"""The host names that a server answers to.

The owner of a web page can let its name resolve to 127.0.0.1 (DNS rebinding), and the page can then
call a server there as its own origin. The header Host has the name of the page.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.types import Scope

from minisgl.server.config import ServerConfig
from minisgl.server.http.faults import HTTPError


class Hosts:
    """A set of the loopback names and addresses and `names`; `*.NAME` is all names below NAME."""

    def __init__(self, names: Iterable[str]) -> None:
        lowered = {_normal(name) for name in names}
        self._names = lowered | {"localhost"}
        self._endings = (".localhost", *(name[1:] for name in lowered if name.startswith("*.")))
        self._all = "*" in lowered

    def __contains__(self, name: str) -> bool:
        name = _normal(name)
        return self._all or name in self._names or name.endswith(self._endings) or is_loopback(name)

    def check(self, scope: Scope) -> None:
        """Raise HTTPError for a request neither to these names nor to the server's own address."""
        for header, value in scope["headers"]:
            if header == b"host" and not self._allows(value.decode("latin-1"), scope):
                message = (
                    "The server does not answer to the host in this request. If it should, start "
                    "it with --allowed-host and the name, or with --api-key."
                )
                raise HTTPError(403, message, "host_not_allowed")

    def _allows(self, value: str, scope: Scope) -> bool:
        """Whether this value of the header Host is allowed; an empty one is, as in HTTP/1.0."""
        name = without_port(value)
        own = scope["server"]
        return not name or name in self or (own is not None and name == own[0])


def hosts_of(config: ServerConfig, listener: socket.socket) -> Hosts | None:
    """The names that a server on `listener` answers to; None for all."""
    on_loopback = listener.family != socket.AF_UNIX and is_loopback(listener.getsockname()[0])
    names = allowed_names(config, on_loopback=on_loopback)
    return Hosts(names) if names else None


def allowed_names(config: ServerConfig, *, on_loopback: bool) -> tuple[str, ...]:
    """The names that requests may be addressed to; empty: any.

    A server with a key, or not on loopback only, is restricted only by --allowed-host.
    """
    if not config.allowed_host and (config.api_key or not on_loopback):
        return ()
    return (*config.allowed_host, config.host, socket.gethostname())


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def without_port(host: str) -> str:
    """The name or the address in a header Host."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):
        return host.strip("[]")
    return name.strip("[]")


def _normal(name: str) -> str:
    return name.strip("[]").removesuffix(".").lower()
