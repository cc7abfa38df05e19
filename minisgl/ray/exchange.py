"""A request and its answer, as they go between the ingress and an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HTTPRequest:
    """A request whose body has arrived."""

    method: str
    path: str  # without the prefix of a proxy
    query: bytes
    headers: Headers
    body: bytes
    holder: str = ""  # the name of the engine that has a stored response which it needs

    def with_header(self, name: bytes, value: bytes) -> HTTPRequest:
        return replace(self, headers=[*self.headers, (name, value)])

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "server": None,
            "client": None,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the body of an answer."""

    status: int
    headers: Headers


Answer = AsyncGenerator[Head | bytes, None]


async def answer(app: ASGIApp, request: HTTPRequest) -> Answer:
    """Yield the answer of `app`: the head, then pieces of the body.

    What has come meanwhile is one piece. Closing the generator tells the application that the
    client has left, and waits until it has ended.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(request.scope(), receive, messages.put))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        head = await messages.get()
        if head is not None:
            yield Head(head["status"], [*head["headers"]])
        is_complete = head is None
        while not is_complete:
            piece = bytearray()
            message = await messages.get()
            while message is not None:
                piece += message.get("body", b"")
                if messages.empty():
                    break
                message = messages.get_nowait()
            is_complete = message is None
            if piece:
                yield bytes(piece)
    finally:
        has_left.set()
        await running
