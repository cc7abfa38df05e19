"""The life of a serving process: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps
from minisgl.progress import LoadProgress
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig, check_utf8
from minisgl.server.engine_state import EngineState
from minisgl.server.http.connection import (
    KEEP_ALIVE_SECONDS,
    OWN_FILES,
    WANTED_FILES,
    Connections,
    ServerConnection,
    limit_unsent,
    raise_file_limit,
    room_for_connections,
)
from minisgl.server.http.hosts import hosts_of
from minisgl.server.http.listening import OwnPath, bind_unix, check_certificate
from minisgl.server.http.tls_server import Handshake, TLSServer
from minisgl.server.stats_log import log_stats
from minisgl.server.welcome import Welcome, open_browser

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

logger = logging.getLogger(__name__)

# Time for connections to take their last events, after all requests have ended.
FLUSH_SECONDS = 2
BACKLOG = 2048
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that let requests finish

Progress = Callable[[str, float], None]


async def start_engine(config: EngineConfig, report: Progress | None = None) -> AsyncEngine:
    """Start an AsyncEngine. It is imported in a thread, because importing torch takes seconds.

    report: called with the progress of loading as well, from any thread.
    """

    def engine_class() -> Callable[[EngineConfig, Progress], Awaitable[AsyncEngine]]:
        from minisgl.engine import AsyncEngine

        return AsyncEngine.start

    start = await asyncio.to_thread(engine_class)
    with LoadProgress() as progress:

        def loaded(phase: str, fraction: float) -> None:
            progress(phase, fraction)
            if report is not None:
                report(phase, fraction)

        engine = await start(config, loaded)
    if engine.vectors.task == "generate":
        engine.warm()
    return engine


class ServerProcess:
    connection = ServerConnection  # the class of its clients' connections

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        start: Callable[[EngineConfig], Awaitable[AsyncEngine]] | None = None,
    ) -> None:
        """start: makes the engine; without it an AsyncEngine is started, which reports progress."""
        if not config.served_model_name:
            check_utf8("--model", engine_config.model, "; give it one with --served-model-name")
        self._engine_config = engine_config
        self._config = config
        self._state = EngineState(config, options=engine_config)
        self._start = start or partial(start_engine, report=self._state.load)

    def run(self) -> int:
        """Serve until a signal arrives or the engine dies; returns the exit code.

        Raises ConfigError for the address and the certificate, and the errors of starting the
        engine.
        """
        if self._config.ssl_certfile:
            check_certificate(self._config.ssl_certfile, self._config.ssl_keyfile)
        check_file_limit(
            self._engine_config.max_running_requests + self._engine_config.max_queued_requests
        )
        with contextlib.ExitStack() as leaving:
            listener = leaving.enter_context(bind(self._config))
            if self._config.uds:
                leaving.callback(OwnPath(self._config.uds).remove)
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(self._serve(listener, leaving))

    async def _serve(self, listener: socket.socket, leaving: contextlib.ExitStack) -> int:
        config = self._config
        app = create_app(self._state, hosts_of(config, listener))
        settings = http_settings(app, config.ssl_certfile, config.ssl_keyfile, self.connection)
        server = Server(settings, self._state, room_for_connections(0))
        stopping = asyncio.ensure_future(first_signal())
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        loading = asyncio.ensure_future(self._start(self._engine_config))
        welcome = Welcome(config, listener)
        engine: AsyncEngine | None = None
        # What ends with the server.
        beside: list[asyncio.Future[None]] = []
        if config.open and welcome.page is not None:
            beside.append(asyncio.ensure_future(open_browser(welcome.page)))
        try:
            await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                # A thread that loads weights cannot be stopped, and joining it takes minutes.
                leaving.close()
                os._exit(0)
            engine = loading.result()
            server.server_state.max_open = room_for_connections(
                len(server.server_state.connections)
            )
            await self._begin(engine, welcome)
            with_graphs = engine.capacity.max_graph_batch > 0
            beside.append(asyncio.ensure_future(log_stats(engine.stats, with_graphs=with_graphs)))
            if not config.no_ui:
                beside.append(asyncio.ensure_future(self._state.history.keep()))
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if engine.failure is None:
                logger.info("Stopping; running requests have %g s", self._config.drain_timeout)
                self._state.drain()
                await engine.drain(self._config.drain_timeout)
        finally:
            for task in (stopping, *beside):
                task.cancel()
            server.should_exit = True
            await serving
            if engine is not None:
                await engine.close()
        if engine.failure is not None:
            logger.error("The engine has failed: %s", engine.failure)
        return 0 if engine.failure is None else 1

    async def _begin(self, engine: AsyncEngine, welcome: Welcome) -> None:
        self._state.start(engine)
        favour_steps()
        names = self._state.model_names()
        self._announce(welcome, names, engine.vectors.task)

    def _announce(self, welcome: Welcome, names: Sequence[str], task: str) -> None:
        served = ", ".join((*names, *self._engine_config.adapters))
        welcome.log(served, names[0], task)
        if not self._engine_config.model:
            log_demo_note()


def http_settings(
    app: ASGIApp,
    certfile: str = "",
    keyfile: str = "",
    connection: type[ServerConnection] = ServerConnection,
) -> uvicorn.Config:
    """The settings of uvicorn; HTTPS if there is a certificate."""
    return uvicorn.Config(
        app,
        http=connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_certfile=certfile or None,
        ssl_keyfile=keyfile or None,
    )


class Server(uvicorn.Server):
    """uvicorn that stops when its engine is dead, and leaves signals to its process.

    uvicorn's own handlers would close connections before they are drained.
    """

    server_state: Connections

    def __init__(
        self,
        config: uvicorn.Config,
        state: EngineState | None = None,
        max_connections: int = WANTED_FILES,
    ) -> None:
        """state: of the engine behind it; None for a router, which no engine ends."""
        super().__init__(config)
        self.server_state = Connections(max_connections)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        kind: Any = self.config.http_protocol_class
        connect = partial(kind, self.config, self.server_state, self.lifespan.state)
        shake_hands = partial(Handshake, self.config.ssl, self.server_state, connect)
        servers: list[Any] = [TLSServer(listener, shake_hands) for listener in sockets or ()]
        self.servers = servers
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times per second; True stops the server."""
        if counter % 10 == 0:
            self.server_state.sweep()
        is_dead = self._state is not None and self._state.dead
        return await super().on_tick(counter) or is_dead

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_file_limit(num_files: int) -> None:
    """Warn if so many requests may be open that this process can run out of files."""
    if (limit := raise_file_limit()) < num_files + OWN_FILES:
        logger.warning(
            "This process may open %d files, and %d requests need one each: raise the hard "
            "limit (ulimit -Hn), or lower --max-queued-requests.",
            limit,
            num_files,
        )


async def first_signal() -> None:
    """Wait for SIGINT, SIGTERM or SIGHUP. The next one then kills, even if the loop is blocked.

    Not a second SIGHUP: a terminal that closes may send several. SIGHUP stays ignored where it was,
    as by nohup.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    signals = [number for number in ENDING if number != signal.SIGHUP or hears_hangup]
    for number in signals:
        loop.add_signal_handler(number, came.set)
    try:
        await came.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop if it is installed: its socket writes are cheaper."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind(config: ServerConfig, *, shares_port: bool = False) -> socket.socket:
    """Open a listening socket; raises ConfigError if the address is unavailable.

    shares_port: others that say so, too, may listen on the same port, and take turns.
    """
    if config.uds:
        listener = bind_unix(config.uds)
        listener.listen(BACKLOG)
        return listener
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError("--host", config.host, f"not an address ({error.strerror})") from error
    # localhost has two addresses; prefer IPv4, which users type and the log prints.
    found.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        limit_unsent(listener)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("--host", config.host, "not an address of this machine") from error
        raise ConfigError(
            "--port", config.port, f"{error.strerror} on {config.host}; allowed: a free port"
        ) from error
    return listener


def log_demo_note() -> None:
    """Say that no model was named."""
    from minisgl.models.hub import DEMO_NOTE  # which imports a client of the Hub

    logger.info("%s", DEMO_NOTE)
