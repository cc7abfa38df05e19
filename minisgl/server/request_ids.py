"""Every request has an id: it is in the header x-request-id of the answer, and in the logs."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
# What may be repeated in a header and in a line of a log.
SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
KEY = "minisgl.reply_id"  # in the scope


class RequestIds:
    """ASGI middleware, outside of everything else, so that no answer goes without.

    A fault that nobody foresaw has been answered when it comes here; it is logged under the id.
    """

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
        header = (HEADER.encode(), shown.encode())

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", shown)


def reply_id(scope: Scope) -> str:
    """An id that no other request has, and that contains the one of the header."""
    found: str = scope[KEY]
    return found
