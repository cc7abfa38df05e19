"""One engine behind the ingress, with the application of a single server around it."""

from __future__ import annotations

from contextlib import aclosing

from minisgl.ray.exchange import Answer, HTTPRequest, answer
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import Around, EngineState
from minisgl.server.served_engine import ServedEngine


class EngineUnhealthyError(RuntimeError):
    """The engine cannot answer, and must be replaced."""


class EngineReplica:
    """Answers requests, and says whether it is well."""

    def __init__(
        self,
        engine: ServedEngine,
        config: ServerConfig,
        around: Around | None = None,
        name: str = "",
    ) -> None:
        """around: what is done for a request before it is answered, see server/handover.py. name:
        in the ids of the responses that it keeps."""
        self._engine = engine
        state = EngineState(config)
        state.replica = name
        state.around = around
        state.start(engine)
        self._app = create_app(state)

    async def answer(self, key: bytes | None, request: HTTPRequest) -> Answer:
        """Yield the answer to `request`: a Head, then pieces of the body.

        key: by which the request was routed here, see router/keys.py.
        """
        parts = answer(self._app, request)
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()

    async def prefill(self, key: bytes, request: HTTPRequest) -> Answer:
        """As `answer`, but before all else yield an empty part, which says that this engine has
        the request."""
        yield b""
        async with aclosing(self.answer(key, request)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Raises EngineUnhealthyError if a step has stalled or failed."""
        if self._engine.failure is not None:
            raise EngineUnhealthyError(f"The engine has failed: {self._engine.failure}")
        if self._engine.stalled is not None:
            raise EngineUnhealthyError(self._engine.stalled)

    async def metrics(self) -> bytes:
        """The engine's page of metrics."""
        scrape = HTTPRequest("GET", "/metrics", b"", [], b"")
        return b"".join([part async for part in answer(self._app, scrape) if type(part) is bytes])

    async def close(self) -> None:
        await self._engine.close()
