"""Gives every request an id, which is in the header x-request-id of its answer and in the log.

Clients of Anthropic's API look for it in the header request-id.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.http.paths import is_of_messages

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
# Ids of clients that are safe to repeat in a header and in a log line.
SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
KEY = "minisgl.reply_id"  # in the scope


def with_id(app: ASGIApp) -> ASGIApp:
    """Outermost middleware, so that every answer has an id."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        made = uuid.uuid4().hex
        given = Headers(scope=scope).get(HEADER, "")
        shown = given if SANE.fullmatch(given) else made
        # A client may use one id for several requests; the engine needs distinct ones.
        scope[KEY] = made if shown is made else f"{shown}-{made[:8]}"
        scope.setdefault("state", {})["request_id"] = shown  # for the log
        ids = [(HEADER.encode(), shown.encode())]
        if is_of_messages(scope):
            ids.append((ANTHROPIC_HEADER.encode(), shown.encode()))

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *ids]
            return send(message)

        await app(scope, receive, send_with_id)

    return answer


def reply_id(scope: Scope) -> str:
    """A unique id, which contains the one in the header."""
    return str(scope[KEY])


def request_id(scope: Scope) -> str:
    """The id of the request in the log, set by `with_id`."""
    return str(scope["state"]["request_id"])
