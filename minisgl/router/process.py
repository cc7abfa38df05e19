"""The life of the parent process: bind, start replicas, route, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, memory_bytes, usable_cores
from minisgl.errors import ConfigError
from minisgl.keys import named_key
from minisgl.printable import counted
from minisgl.router.config import RouterConfig
from minisgl.router.exchange import EngineLostError
from minisgl.router.fleet import Peer, ReplicaState
from minisgl.router.front import FleetUpdate, FrontProcesses, FrontSpec, OwnFront
from minisgl.router.placement import shares, visible_gpus
from minisgl.router.replicas import ReplicaSpec, ReplicaStartError, Supervisor
from minisgl.server import with_all_keys
from minisgl.server.apis.openai.answer_types import ModelList
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import base_names
from minisgl.server.http.listening import OwnPath, check_certificate
from minisgl.server.process import (
    bind,
    check_file_limit,
    first_signal,
    log_demo_note,
    new_event_loop,
)
from minisgl.server.welcome import Welcome, open_browser

logger = logging.getLogger(__name__)

# For the pages on their way between replicas, unless the user says how much.
HOST_CACHE_GB = 16.0
HOST_SHARE = 0.5  # of the machine's memory, for all replicas at most
TASK_S = 10.0  # for a replica to say what its model is for
MAX_PATH_BYTES = 80  # of the folder: paths of sockets have up to 107


class RouterProcess:
    """Serves by several engines; from the main thread."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        router: RouterConfig,
        *,
        replica: Sequence[str],
        front: Sequence[str],
    ) -> None:
        """replica, front: the commands that start a process; each is followed by an index.

        Raises ConfigError if this machine has too few GPUs or a key is unavailable, and for what
        replicas cannot do.
        """
        if engine.nnodes > 1:
            raise ConfigError("--nnodes", engine.nnodes, "replicas are on one node; allowed: 1")
        if server.lora_root and router.router_processes > 1:
            reason = "one of several routing processes does not know what the others have loaded"
            raise ConfigError("--lora-root", server.lora_root, f"{reason}; allowed: one")
        if server.trainer and router.router_processes > 1:
            reason = "one of several routing processes does not know what the others were told"
            raise ConfigError("--trainer", True, f"{reason}; allowed: one")
        if server.trainer and router.role_of_each:
            reason = "a replica that starts later could not wait for weights"
            raise ConfigError("--trainer", True, f"{reason}; allowed: without --roles")
        self._roles = router.role_of_each
        self._engine = with_pages_shared(engine, router.replicas) if self._roles else engine
        self._server = with_all_keys(server)
        self._names = base_names(server, engine)
        self._router = router
        self._replica_command, self._front_command = replica, front
        gpus = [] if engine.device == "cpu" else visible_gpus(os.environ)
        self._num_ranks = engine.tp * engine.pp  # of each replica
        cores = usable_cores()
        self._shares = shares(router.replicas, self._num_ranks, engine.device, gpus, cores)
        self._states: tuple[ReplicaState, ...] = (ReplicaState(),) * router.replicas
        self._is_draining = False
        self._announcing: asyncio.Future[None] | None = None

    def run(self) -> int:
        """Serve until a signal arrives; returns the exit code.

        Raises ConfigError for the address and the certificate.
        """
        server = self._server
        if server.ssl_certfile:
            check_certificate(server.ssl_certfile, server.ssl_keyfile)
        most = self._engine.max_running_requests + self._engine.max_queued_requests
        check_file_limit(2 * most * self._router.replicas)  # a client's connection and a replica's
        with contextlib.ExitStack() as leaving:
            listeners = [leaving.enter_context(each) for each in self._listen()]
            if server.uds:
                leaving.callback(OwnPath(server.uds).remove)
            folder = _private_folder()
            leaving.callback(shutil.rmtree, folder, ignore_errors=True)
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(self._serve(listeners, folder))

    def _listen(self) -> list[socket.socket]:
        """A listening socket for each routing process, on the same address."""
        count = self._router.router_processes
        if count == 1:
            return [bind(self._server)]
        if self._server.uds:
            first = bind(self._server)
            return [first, *(first.dup() for _ in range(count - 1))]
        # Another server could share the port as well: see first that nobody has it.
        with bind(self._server) as probe:
            port: int = probe.getsockname()[1]
        config = replace(self._server, port=port)
        return [bind(config, shares_port=True) for _ in range(count)]

    async def _serve(self, listeners: Sequence[socket.socket], folder: Path) -> int:
        specs = self._replica_specs(folder)
        self._replica_paths = [spec.server.uds for spec in specs]
        self._front = self._make_front(listeners, self._replica_paths, folder)
        prepare = self._front.bring if isinstance(self._front, OwnFront) else None
        supervisor = Supervisor(specs, self._replica_command, self._report, prepare)
        self._listener = listeners[0]
        stopping = asyncio.ensure_future(first_signal())
        serving = asyncio.ensure_future(self._front.serve())
        supervising = asyncio.ensure_future(supervisor.run())
        tasks = (stopping, serving, supervising)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for failed in (supervising, serving):
                if failed.done():
                    failed.result()
            logger.info("Stopping; running requests have %g s", self._server.drain_timeout)
            return 0
        except ReplicaStartError as error:
            logger.error("%s", error)
            return error.exit_code
        finally:
            self._is_draining = True
            self._report(self._states)
            await supervisor.stop(self._server.drain_timeout)
            await self._front.close()
            for task in (stopping, supervising):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make_front(
        self, listeners: Sequence[socket.socket], replica_paths: Sequence[str], folder: Path
    ) -> OwnFront | FrontProcesses:
        several = len(listeners) > 1
        paths = tuple(str(folder / f"router-{index}.sock") for index in range(len(listeners)))
        specs = [
            FrontSpec(
                index=index,
                server=self._server,
                policy=self._router.router_policy,
                replica_paths=tuple(replica_paths),
                adapters=tuple(self._engine.adapters),
                roles=self._roles,
                router_paths=paths if several else (),
                num_ranks=self._num_ranks,
                listener_fd=listener.fileno(),
            )
            for index, listener in enumerate(listeners)
        ]
        if several:
            return FrontProcesses(specs, self._front_command)
        return OwnFront(specs[0], listeners[0])

    def _replica_specs(self, folder: Path) -> list[ReplicaSpec]:
        """The options of each replica: the user's, but for what concerns the address."""
        return [
            ReplicaSpec(
                index=index,
                engine=self._engine,
                server=replace(
                    self._server,
                    host="127.0.0.1",
                    port=1919,
                    uds=str(folder / f"replica-{index}.sock"),
                    ssl_certfile="",
                    ssl_keyfile="",
                    allowed_host=(),
                    cors_origin=(),
                ),
                share=share,
                role=self._roles[index] if self._roles else "",
                pages_path=str(folder / f"pages-{index}.sock") if self._roles else "",
            )
            for index, share in enumerate(self._shares)
        ]

    def _report(self, states: Sequence[ReplicaState]) -> None:
        """Tell the front, and the log, that something has changed."""
        before, self._states = self._states, tuple(states)
        self._front.update(FleetUpdate(states=self._states, is_draining=self._is_draining))
        num_ready = sum(state.is_ready for state in states)
        for index, (old, new) in enumerate(zip(before, states, strict=True)):
            if new.is_ready and not old.is_ready:
                role = f" for {self._roles[index]}" if self._roles else ""
                logger.info("Replica %d%s is ready (%d of %d)", index, role, num_ready, len(states))
        was_announced = any(state.is_ready for state in before)
        if num_ready and not was_announced:
            ready = [index for index, state in enumerate(states) if state.is_ready]
            self._announcing = asyncio.ensure_future(self._announce(ready[0]))

    async def _announce(self, index: int) -> None:
        """Tell where the replicas are, of which that with this index is ready."""
        welcome = Welcome(self._server, self._listener)
        peer = Peer(index, self._replica_paths[index])
        task = await _task_of(peer, self._server.api_key)
        served = ", ".join((*self._names, *self._engine.adapters))
        welcome.log(f"{served} with {counted(len(self._states), 'replica')}", self._names[0], task)
        if not self._engine.model:
            log_demo_note()
        if self._server.open and welcome.page is not None:
            await open_browser(welcome.page)


async def _task_of(peer: Peer, api_key: Sequence[str]) -> str:
    """What the model of a replica was loaded for; to generate, if it does not say."""
    key = f"authorization: Bearer {named_key(api_key[0])[1]}\r\n" if api_key else ""
    asked = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{key}\r\n"
    with contextlib.suppress(EngineLostError, TimeoutError, msgspec.DecodeError):
        async with asyncio.timeout(TASK_S):
            _, body = await peer.whole(asked.encode())
            return msgspec.json.decode(body, type=ModelList).data[0].task
    return "generate"


def with_pages_shared(engine: EngineConfig, num_replicas: int) -> EngineConfig:
    """The options of engines that exchange pages, which they do through their host caches."""
    if engine.host_cache:
        return engine
    share = HOST_SHARE * memory_bytes() / 1e9 / num_replicas
    return replace(engine, host_cache=min(HOST_CACHE_GB, share))


def _private_folder() -> Path:
    """A folder for sockets, which only this user may enter."""
    folder = tempfile.mkdtemp(prefix="minisgl-")
    if len(os.fsencode(folder)) > MAX_PATH_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="minisgl-", dir="/tmp")
    return Path(folder)
