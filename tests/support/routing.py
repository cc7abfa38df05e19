"""A router on the test's own loop, in front of servers with fake engines on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from support.fake_engine import FakeEngine
from support.quick_server import QuickServer

from minisgl.router.app import create_router_app
from minisgl.router.config import CACHE
from minisgl.router.fleet import Fleet, ReplicaState
from minisgl.router.relay import RelayConnection
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.process import Server, bind, http_settings


class Replicas:
    """Servers with fake engines, each of which can be cut off as by the end of its process."""

    def __init__(self, engines: Sequence[FakeEngine], folder: Path, **options: object) -> None:
        self.engines = engines
        self.paths = [str(folder / f"replica-{index}.sock") for index in range(len(engines))]
        self._options = options
        self._servers: list[Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for index, (engine, path) in enumerate(zip(self.engines, self.paths, strict=True)):
            config = ServerConfig(uds=path, **self._options)  # type: ignore[arg-type]
            state = EngineState(config, engine)  # type: ignore[arg-type]
            state.replica = str(index)
            server = QuickServer(http_settings(create_app(state)), state)
            self._tasks.append(asyncio.ensure_future(server.serve(sockets=[bind(config)])))
            self._servers.append(server)

    def kill(self, index: int) -> None:
        """Break all connections of a replica, and refuse new ones."""
        server = self._servers[index]
        for listening in server.servers:
            listening.close()
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    def num_unsent(self, index: int) -> int:
        """Bytes that a replica has written and the router has not read."""
        connections = self._servers[index].server_state.connections
        return sum(each.transport.get_write_buffer_size() for each in connections)  # type: ignore[union-attr]

    async def stop(self) -> None:
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def front(
    paths: Sequence[str], policy: str = CACHE, **options: object
) -> AsyncIterator[tuple[str, Fleet]]:
    """The URL of a router in front of the servers at `paths`, and what it knows."""
    fleet = Fleet(paths, policy)
    fleet.update([ReplicaState(is_ready=True, start=1)] * len(paths))
    config = ServerConfig(port=0, **options)  # type: ignore[arg-type]
    with bind(config) as listener:
        app = create_router_app(fleet, config)
        server = QuickServer(http_settings(app, connection=RelayConnection))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", fleet
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def routing(
    folder: Path,
    *engines: FakeEngine,
    policy: str = CACHE,
    replica: Mapping[str, object] | None = None,
    **options: object,
) -> AsyncIterator[tuple[str, Fleet, Replicas]]:
    """The URL of a router, what it knows, and its replicas, which are ready. replica: their
    options."""
    replicas = Replicas(engines, folder, **(replica or {}))
    await replicas.start()
    async with front(replicas.paths, policy, **options) as (url, fleet):
        yield url, fleet, replicas
    await replicas.stop()
