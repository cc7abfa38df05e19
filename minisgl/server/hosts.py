"""The host names that a server answers to.

The owner of a web page can let its name resolve to 127.0.0.1 (DNS rebinding), and the page can then
call a server there as its own origin. The header Host has the name of the page.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.access_log import log_failure, request_id
from minisgl.server.config import ServerConfig
from minisgl.server.faults import HTTPError


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


def hosts_of(config: ServerConfig, listener: socket.socket) -> Hosts | None:
    """The names that a server on `listener` answers to; None for all.

    A server with a key, or not on loopback only, is restricted only by --allowed-host.
    """
    on_loopback = listener.family != socket.AF_UNIX and is_loopback(listener.getsockname()[0])
    if not config.allowed_host and (config.api_key or not on_loopback):
        return None
    return Hosts((*config.allowed_host, config.host, socket.gethostname()))


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class CheckHost:
    """Middleware that rejects requests neither to `hosts` nor to the server's own address."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        error_response: Callable[[Scope, Exception], ASGIApp],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        for name, value in scope["headers"]:
            if name == b"host" and not self._allows(value.decode("latin-1"), scope):
                message = (
                    "The server does not answer to the host in this request. If it should, start "
                    "it with --allowed-host and the name, or with --api-key."
                )
                error = HTTPError(403, message, "host_not_allowed")
                log_failure(request_id(scope), 403, error)
                app = self._error_response(scope, error)
                break
        await app(scope, receive, send)

    def _allows(self, value: str, scope: Scope) -> bool:
        """Whether this value of the header Host is allowed; an empty one is, as in HTTP/1.0."""
        name = without_port(value)
        own = scope["server"]
        return not name or name in self._hosts or (own is not None and name == own[0])


def without_port(host: str) -> str:
    """The name or the address in a header Host."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):
        return host.strip("[]")
    return name.strip("[]")


def _normal(name: str) -> str:
    return name.strip("[]").removesuffix(".").lower()
