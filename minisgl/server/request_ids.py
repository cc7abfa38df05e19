"""Every request has an id: it is in the header x-request-id of the answer, and in the logs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
# What may be repeated in a header and in a line of a log.
SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
KEY = "minisgl.reply_id"  # in the scope


class RequestIds:
    """Middleware, outside of all others, so that no answer goes without."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        made = uuid.uuid4().hex
        given = Headers(scope=scope).get(HEADER, "")
        shown = given if SANE.fullmatch(given) else made
        # A client may give one id to several requests, and the engine tells them apart.
        scope[KEY] = made if shown is made else f"{shown}-{made[:8]}"
        scope.setdefault("state", {})["request_id"] = shown  # for the log
        header = (HEADER.encode(), shown.encode())

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        await self._app(scope, receive, send_with_id)


def reply_id(scope: Scope) -> str:
    """An id that no other request has, and that contains the one of the header."""
    found: str = scope[KEY]
    return found
