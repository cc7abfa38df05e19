"""Serves the routes below the path prefix of a proxy, whether the proxy strips it or not."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


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
