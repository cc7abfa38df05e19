"""Paths of requests: the prefix of a proxy, a slash at the end, and those of the Messages API."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import foreseen

MESSAGES = "/v1/messages"
OVERLOADED = 529  # Anthropic's status where others have 503


def below_root(app: ASGIApp, prefix: str) -> ASGIApp:
    """Middleware that puts every path below `prefix`, as ASGI specifies for root_path."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path != prefix and not path.startswith(prefix + "/"):
            path = prefix + path
        await app({**scope, "root_path": prefix, "path": path}, receive, send)

    return answer


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix, as the routes declare it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def is_open(scope: Scope) -> bool:
    """Whether a request is to a path that needs no key, and whose failures are not logged."""
    return route_path(scope) in scope["app"].state.open_paths


def without_slash(app: ASGIApp, pages: Iterable[str]) -> ASGIApp:
    """Middleware that removes a slash at the end, except from paths of pages: their links are
    relative.

    Browsers are redirected there. Elsewhere a redirect would not do: probes do not follow it, and a
    proxy may have another address.
    """
    kept = frozenset(f"{path.removesuffix('/')}/" for path in pages)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_slash = scope["type"] == "http" and scope["path"].endswith("/")
        if has_slash and route_path(scope) not in kept:
            scope = {**scope, "path": scope["path"].removesuffix("/")}
        await app(scope, receive, send)

    return answer


def is_of_messages(scope: Scope) -> bool:
    """Whether a request is to the Messages API, or to a path below it that does not exist."""
    path = route_path(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def status_of(scope: Scope, error: Exception) -> int:
    """The HTTP status that the client gets for `error`."""
    status = foreseen(error).http_status
    return OVERLOADED if status == 503 and is_of_messages(scope) else status
