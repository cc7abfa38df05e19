"""Paths of requests: the prefix of a proxy, a slash at the end, and those of the Messages API."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import foreseen

MESSAGES = "/v1/messages"
OVERLOADED = 529  # Anthropic's status where others have 503


class RootPath:
    """Middleware that puts every path below `prefix`, as ASGI specifies for root_path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix, path = self._prefix, scope["path"]
        if path != prefix and not path.startswith(prefix + "/"):
            path = prefix + path
        await self._app({**scope, "root_path": prefix, "path": path}, receive, send)


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix, as the routes declare it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def is_open(scope: Scope) -> bool:
    """Whether a request is to a path that needs no key, and whose failures are not logged."""
    return route_path(scope) in scope["app"].state.open_paths


class TrailingSlash:
    """Middleware that removes the slash, except from paths of pages: their links are relative.

    Browsers are redirected there. Elsewhere a redirect would not do: probes do not follow it, and a
    proxy may have another address.
    """

    def __init__(self, app: ASGIApp, pages: Iterable[str]) -> None:
        self._app = app
        self._pages = frozenset(f"{path.removesuffix('/')}/" for path in pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_slash = scope["type"] == "http" and scope["path"].endswith("/")
        if has_slash and route_path(scope) not in self._pages:
            scope = {**scope, "path": scope["path"].removesuffix("/")}
        await self._app(scope, receive, send)


def is_of_messages(scope: Scope) -> bool:
    """Whether a request is to the Messages API, or to a path below it that does not exist."""
    path = route_path(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def status_of(scope: Scope, error: Exception) -> int:
    """The HTTP status that the client gets for `error`."""
    status = foreseen(error).http_status
    return OVERLOADED if status == 503 and is_of_messages(scope) else status
