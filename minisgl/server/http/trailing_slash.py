"""Takes paths with a slash at the end, as some probes and base URLs make them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.http.root_path import route_path

PAGES = frozenset(("/", "/docs/"))  # whose links are relative: browsers are redirected


class TrailingSlash:
    """Middleware that removes the slash, except from paths of pages.

    A redirect would not do: probes do not follow it, and a proxy may have another address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_slash = scope["type"] == "http" and scope["path"].endswith("/")
        if has_slash and route_path(scope) not in PAGES:
            scope = {**scope, "path": scope["path"].removesuffix("/")}
        await self._app(scope, receive, send)
