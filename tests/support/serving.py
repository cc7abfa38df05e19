"""A server on a thread of its own, for tests whose clients block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import openai
from support.quick_server import QuickServer

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.process import Server, bind, http_settings

AnyEngine = TypeVar("AnyEngine", bound=Any)


@dataclass(frozen=True)
class Served(Generic[AnyEngine]):
    url: str
    engine: AnyEngine
    state: EngineState
    server: Server
    loop: asyncio.AbstractEventLoop

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call` on the server's loop, where the engine may be inspected."""

        async def called() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result()

    def openai(self, **options: Any) -> openai.OpenAI:
        settings: dict[str, Any] = {"api_key": "x", "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url)


@contextlib.contextmanager
def served(
    start: Callable[[], Awaitable[AnyEngine]],
    engine_options: EngineConfig | None = None,
    **options: Any,
) -> Iterator[Served[AnyEngine]]:
    """Serve the engine that `start` makes on the server's own loop, and close it at the end.
    options: of the server."""
    ready: Future[Served[AnyEngine]] = Future()

    async def serve() -> None:
        engine = await start()
        state = EngineState(ServerConfig(port=0, **options), engine, engine_options)
        with bind(state.config) as listener:
            server = QuickServer(http_settings(create_app(state)), state)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            ready.set_result(Served(url, engine, state, server, asyncio.get_running_loop()))
            await server.serve(sockets=[listener])
        if engine is not None:
            await engine.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        found = ready.result()
        try:
            yield found
        finally:
            found.server.should_exit = True
            running.result()


async def demo_engine(**options: Any) -> AsyncEngine:
    return await AsyncEngine.start(EngineConfig(device="cpu", **options))
