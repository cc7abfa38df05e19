"""What clients talk to: the routing of one process, and several processes that route."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from minisgl.router import lifeline
from minisgl.router.adapters import FleetAdapters
from minisgl.router.app import create_router_app
from minisgl.router.fleet import Fleet, Peer, ReplicaState
from minisgl.router.relay import RelayConnection
from minisgl.router.training import FleetTraining
from minisgl.server.config import ServerConfig
from minisgl.server.http.connection import room_for_connections
from minisgl.server.http.hosts import hosts_of
from minisgl.server.http.tracing import end_tracing
from minisgl.server.process import Server, bind, http_settings, new_event_loop

logger = logging.getLogger(__name__)

RESTART_S = 1.0  # between the end of a routing process and its next start
TOLD = ".told"  # after the path of a process's socket: of that for gossip
CLOSE_S = 10.0  # for its connections, when all requests have ended
HEAD = Struct("!II")  # index and start of the replica, before the key
MAX_TOLD_BYTES = 64 << 10  # of a key
MAX_HEARD = 64  # messages at a time


class Gossip:
    """Tells the other processes what `fleet` has sent where, and tells `fleet` what they have."""

    def __init__(self, fleet: Fleet, paths: Sequence[str], index: int) -> None:
        """paths: of the sockets of all processes; index: which of them is this one's."""
        self._fleet = fleet
        self._others = [path for other, path in enumerate(paths) if other != index]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            os.unlink(paths[index])
        self._socket.bind(paths[index])
        fleet.tell = self.tell
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    def tell(self, key: bytes, replica: int, start: int) -> None:
        message = HEAD.pack(replica, start) + key[:MAX_TOLD_BYTES]
        for path in self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(message, path)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _hear(self) -> None:
        for _ in range(MAX_HEARD):
            try:
                message = self._socket.recv(HEAD.size + MAX_TOLD_BYTES)
            except OSError:
                return
            replica, start = HEAD.unpack_from(message)
            self._fleet.hear(message[HEAD.size :], replica, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSpec:
    """What a routing process is told first."""

    index: int
    server: ServerConfig
    policy: str
    replica_paths: tuple[str, ...]
    adapters: tuple[str, ...] = ()  # that replicas have from their start
    roles: tuple[str, ...] = ()  # of the replicas, if they have any
    router_paths: tuple[str, ...] = ()  # of the private sockets of all, if there are several
    num_ranks: int = 1  # of each replica
    listener_fd: int = -1  # of a process of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """What it is told later, when something changes."""

    states: tuple[ReplicaState, ...]
    is_draining: bool = False


class OwnFront:
    """Routes in this process."""

    def __init__(self, spec: FrontSpec, listener: socket.socket) -> None:
        self._fleet = Fleet(spec.replica_paths, spec.policy, spec.roles)
        routers = [Peer(index, path) for index, path in enumerate(spec.router_paths)]
        config = spec.server
        adapters = FleetAdapters(self._fleet, config.admin_key, spec.adapters)
        self.adapters = adapters if config.lora_root else None
        training = FleetTraining(self._fleet, config.admin_key, spec.num_ranks)
        self.training = training if config.trainer else None
        self._app = app = create_router_app(
            self._fleet,
            config,
            hosts_of(config, listener),
            index=spec.index,
            routers=routers,
            adapters=self.adapters,
            training=self.training,
        )
        room = room_for_connections(0) // 2  # each may have one to a replica
        public = http_settings(app, config.ssl_certfile, config.ssl_keyfile, RelayConnection)
        self._servers = [Server(public, max_connections=room)]
        self._listeners = [listener]
        if spec.router_paths:
            private = http_settings(app, connection=RelayConnection)
            self._servers.append(Server(private, max_connections=room))
            self._listeners.append(bind(ServerConfig(uds=spec.router_paths[spec.index])))
        self._told_paths = [path + TOLD for path in spec.router_paths]
        self._index = spec.index

    async def bring(self, index: int) -> bool:
        """Ask a replica that has started for what all were asked for before. Returns whether it may
        take requests."""
        if self.adapters is not None:
            await self.adapters.bring(index)
        return self.training is None or await self.training.bring(index)

    async def serve(self) -> None:
        gossip = None
        if self._told_paths:
            gossip = Gossip(self._fleet, self._told_paths, self._index)
        try:
            await asyncio.gather(
                *(
                    server.serve(sockets=[listener])
                    for server, listener in zip(self._servers, self._listeners, strict=True)
                )
            )
        finally:
            if gossip is not None:
                gossip.close()
            await end_tracing(self._app)

    def update(self, update: FleetUpdate) -> None:
        self._fleet.is_draining = update.is_draining
        self._fleet.update(update.states)

    async def close(self) -> None:
        """End, after the answers that are being written."""
        for server in self._servers:
            server.should_exit = True


class FrontProcesses:
    """Routes in several processes, which take turns on one address."""

    def __init__(
        self,
        specs: Sequence[FrontSpec],
        command: Sequence[str],
    ) -> None:
        """command: starts a process, which reads its spec from the lifeline; its index follows."""
        self._specs = specs
        self._command = command
        self._children: dict[int, asyncio.subprocess.Process] = {}
        unknown = (ReplicaState(),) * len(specs[0].replica_paths)
        self._update = FleetUpdate(states=unknown)
        self._closing = asyncio.Event()

    async def serve(self) -> None:
        await asyncio.gather(*map(self._keep, self._specs))

    def update(self, update: FleetUpdate) -> None:
        self._update = update
        for child in self._children.values():
            lifeline.tell(child, update)

    async def close(self) -> None:
        self._closing.set()
        await lifeline.end_children([*self._children.values()], CLOSE_S)

    async def _keep(self, spec: FrontSpec) -> None:
        """Run a process, and start it again if it ends. Connections wait for it meanwhile."""
        while not self._closing.is_set():
            command = (*self._command, str(spec.index))
            child = await lifeline.start_child(command, dict(os.environ), [spec.listener_fd])
            if self._closing.is_set():  # while it was started
                child.kill()
            lifeline.tell(child, spec)
            lifeline.tell(child, self._update)
            self._children[spec.index] = child
            exit_code = await child.wait()
            if self._closing.is_set():
                return
            logger.error(
                "Routing process %d has ended (exit code %d); starting it again in %g s",
                spec.index,
                exit_code,
                RESTART_S,
            )
            await asyncio.sleep(RESTART_S)


def run_front() -> int:
    """The main function of a routing process, which its parent has started."""
    spec = lifeline.hear(FrontSpec)
    if spec is None:
        return 1
    with (
        socket.socket(fileno=spec.listener_fd) as listener,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(_serve(spec, listener))
    lifeline.remove_sockets(*own_sockets(spec))
    sys.stderr.flush()
    os._exit(0)  # the lifeline is still being read


def own_sockets(spec: FrontSpec) -> tuple[str, str]:
    own = spec.router_paths[spec.index]
    return own, own + TOLD


async def _serve(spec: FrontSpec, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    front = OwnFront(spec, listener)
    # Before clients are answered, some of which may have waited for it.
    first = lifeline.hear(FleetUpdate)
    if first is None:
        return
    front.update(first)

    def listen() -> object:
        update = lifeline.hear(FleetUpdate)
        if update is not None:
            loop.call_soon_threadsafe(front.update, update)
        return update

    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    lifeline.end_with_parent(listen, CLOSE_S, own_sockets(spec))
    serving = asyncio.ensure_future(front.serve())
    await stopping.wait()
    await front.close()
    await serving
