"""The process of a replica: a server on a private Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from minisgl.config import EngineConfig
from minisgl.distributed.addresses import Address
from minisgl.router.config import DECODE
from minisgl.router.lifeline import INPUT, end_with_parent, hear, remove_sockets
from minisgl.router.replicas import ReplicaSpec
from minisgl.server.answers.handover import Handover
from minisgl.server.http.connection import MAX_UNSENT_BYTES, ServerConnection
from minisgl.server.process import ServerProcess, start_engine
from minisgl.server.welcome import Welcome

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

logger = logging.getLogger(__name__)


class RouterConnection(ServerConnection):
    """A connection of the router, which itself watches how its clients read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What a slow client does not read costs as much here as on its own connection.
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSENT_BYTES)


class ReplicaProcess(ServerProcess):
    """A server whose address nobody needs to know."""

    connection = RouterConnection

    def __init__(
        self, spec: ReplicaSpec, start: Callable[[EngineConfig], Awaitable[AsyncEngine]]
    ) -> None:
        super().__init__(spec.engine, spec.server, start)
        self._state.replica = str(spec.index)
        self._spec = spec

    async def _begin(self, engine: AsyncEngine, welcome: Welcome) -> None:
        spec = self._spec
        if spec.pages_path:
            path = spec.pages_path
            await engine.pages.share(path, always_load=spec.role == DECODE)
            self._state.around = Handover(engine, path).around
        await super()._begin(engine, welcome)

    def _announce(self, welcome: Welcome, names: Sequence[str], task: str) -> None:
        pass


async def start_sharing(config: EngineConfig) -> AsyncEngine:
    """Start an engine that is to share pages. What cannot share them is refused before its weights
    are loaded."""

    def check() -> None:  # imports torch
        from minisgl.engine.page_moves import check_sharing

        check_sharing(config)

    await asyncio.to_thread(check)
    return await start_engine(config)


def run_replica(
    start: Callable[[EngineConfig], Awaitable[AsyncEngine]] | None = None,
) -> int:
    """Serve as the parent process says, and end with it; returns the exit code. start: other than
    the engines of the options.

    Raises the errors of starting the engine.
    """
    spec = hear(ReplicaSpec)
    if spec is None:
        return 1
    # Before torch counts them.
    if spec.share.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.share.cores)
    # The parent says nothing more: reading ends when it does.
    sockets = [spec.server.uds]
    if spec.pages_path:
        pages = Address(path=spec.pages_path)
        ranks = range(spec.engine.tp * spec.engine.pp)
        sockets += [pages.path, *(pages.of_rank(rank).path for rank in ranks)]
    patience_s = spec.server.drain_timeout + spec.close_s
    end_with_parent(lambda: os.read(INPUT, 1) or None, patience_s, sockets)
    try:
        begin = start or (start_sharing if spec.pages_path else start_engine)
        return ReplicaProcess(spec, begin).run()
    finally:
        remove_sockets(*sockets)
