"""One engine behind the ingress, with the application of a single server around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.types import Message

from minisgl.config import EngineConfig
from minisgl.router.exchange import Head, HTTPRequest
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import Around, EngineState

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

Answer = AsyncGenerator[Head | bytes, None]


class EngineUnhealthyError(RuntimeError):
    """The engine cannot answer, and must be replaced."""


class EngineReplica:
    """Answers requests, and says whether it is well."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        around: Around | None = None,
        name: str = "",
        options: EngineConfig | None = None,
    ) -> None:
        """around: what is done for a request before it is answered (server/answers/handover.py).
        name: in the ids of the responses that it keeps. options: of `engine`."""
        self._engine = engine
        state = EngineState(config, options=options)
        state.replica = name
        state.around = around
        state.start(engine)
        self._app = create_app(state)

    async def answer(self, request: HTTPRequest) -> Answer:
        """Yield the answer to `request`: a Head, then pieces of the body.

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

        running = asyncio.ensure_future(self._app(request.scope(), receive, messages.put))
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

    async def prefill(self, request: HTTPRequest) -> Answer:
        """As `answer`, but before all else yield an empty part, which says that this engine has
        the request."""
        yield b""
        async with aclosing(self.answer(request)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Raises EngineUnhealthyError if a step has stalled or failed."""
        if self._engine.failure is not None:
            raise EngineUnhealthyError(f"The engine has failed: {self._engine.failure}")
        if self._engine.stalled is not None:
            raise EngineUnhealthyError(self._engine.stalled)

    async def metrics(self, accept: str) -> bytes:
        """The engine's page of metrics. accept: the format, as HTTP's header names it."""
        scrape = HTTPRequest("GET", "/metrics", b"", [(b"accept", accept.encode())], b"")
        return b"".join([part async for part in self.answer(scrape) if type(part) is bytes])

    async def close(self) -> None:
        await self._engine.close()
