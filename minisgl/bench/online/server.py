"""Starts a server in its own process for a benchmark."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from minisgl.bench.energy import engine_gpus
from minisgl.bench.online.target import Endpoint
from minisgl.bench.peak import Peak, engine_peak
from minisgl.bench.run_info import RunInfo, describe
from minisgl.client.errors import ServerError
from minisgl.config import EngineConfig, ModelFacts, ResolvedConfig
from minisgl.errors import MinisglError
from minisgl.keys import VARIABLE
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess, bind, start_engine

HOST = "127.0.0.1"
STOP_SECONDS = 60
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServer:
    """Message of the server's process when its engine has started."""

    description: list[str]
    run_info: RunInfo
    model: ModelFacts
    config: ResolvedConfig
    gpus: list[str]  # their UUIDs
    peak: Peak | None  # of the hardware; None on a CPU


class ServerStartError(MinisglError):
    """The engine does not start. The server's process sends the arguments."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@asynccontextmanager
async def own_server(config: EngineConfig) -> AsyncIterator[tuple[str, StartedServer]]:
    """Start a server; yields its URL including /v1. It stops when the context ends.

    Raises MinisglError if it does not start.
    """
    with bind(ServerConfig(host=HOST, port=0)) as probe:
        port: int = probe.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(config, port, theirs)
    )
    server.start()
    theirs.close()
    try:
        try:
            said = await asyncio.to_thread(ours.recv)
        except EOFError:
            raise MinisglError("The server ended before it took requests.") from None
        if isinstance(said, tuple):
            raise ServerStartError(*said)
        url = f"http://{HOST}:{port}"
        await _until_ready(Endpoint(url=url), server)
        yield f"{url}/v1", said
    finally:
        ours.close()
        server.terminate()
        try:
            await asyncio.to_thread(server.join, STOP_SECONDS)
        finally:  # also where Ctrl-C is pressed again
            server.kill()


async def _until_ready(target: Endpoint, server: Any) -> None:
    while True:
        try:
            await target.get(f"{target.url}/health")
            return
        except ServerError:  # for the moment between the engine's start and the server's
            if not server.is_alive():
                raise MinisglError("The server ended before it took requests.") from None
            await asyncio.sleep(POLL_SECONDS)


def _serve(config: EngineConfig, port: int, connection: Connection) -> None:
    """The main function of the process. Ends at SIGTERM, or when the parent process is gone."""
    os.environ.pop(VARIABLE, None)  # whose key is for servers of others; this one asks for none
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "WARNING").upper())

    async def start(config: EngineConfig) -> Any:
        engine: Any = await start_engine(config)
        connection.send(
            StartedServer(
                description=[*describe(engine)],
                run_info=RunInfo.of(engine, {}),
                model=engine.model,
                config=engine.config,
                gpus=engine_gpus(engine.config),
                peak=engine_peak(engine.config, engine.model),
            )
        )
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        return engine

    # Requests that are still running belong to a benchmark that was given up.
    server = ServerConfig(host=HOST, port=port, drain_timeout=0.0)
    try:
        sys.exit(ServerProcess(config, server, start).run())
    except MinisglError as error:
        connection.send((str(error), error.exit_code))


def _end_with(connection: Connection) -> None:
    """Wait until the other end is closed, and stop the server then."""
    try:
        connection.recv()
    except EOFError:
        os.kill(os.getpid(), signal.SIGTERM)
