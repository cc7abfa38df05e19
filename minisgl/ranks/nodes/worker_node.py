"""The process of a node other than 0: starts the ranks of its machine, and passes on their plans.

It computes nothing itself, so that it always answers in time, whatever its ranks do.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType

from minisgl.config import ResolvedConfig
from minisgl.distributed.cluster_token import cluster_token
from minisgl.distributed.handshake import HandshakeError, prove_to_main
from minisgl.distributed.interfaces import interface_of
from minisgl.distributed.layout import RankLayout
from minisgl.errors import ConfigError, EngineStoppedError, MinisglError
from minisgl.ranks.nodes.addresses import main_address
from minisgl.ranks.nodes.agreement import facts_of
from minisgl.ranks.nodes.gathering import JOIN_LIMIT_S
from minisgl.ranks.nodes.link import (
    SILENCE_LIMIT_S,
    Beat,
    Close,
    Frame,
    Join,
    LinkError,
    NodeLink,
    Refused,
    Start,
)
from minisgl.ranks.processes.channel import (
    HEARTBEAT_S,
    Answered,
    Channel,
    Encoded,
    Failed,
    Landed,
    Ready,
)
from minisgl.ranks.processes.launcher import Launcher, spawn_obstacle
from minisgl.ranks.processes.mask_ring import MaskRing, StepMasks
from minisgl.ranks.processes.remote_ranks import VERDICT_S, RemoteRanks
from minisgl.ranks.processes.rendezvous import TcpRendezvous
from minisgl.ranks.processes.worker import RankSpec
from minisgl.runner.setup import Setup

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
RETRY_S = 0.5


def work(setup: Setup) -> None:
    """Run the ranks of the node of `setup` until node 0 ends them in order.

    Blocks. Raises ConfigError if ranks cannot be started here or node 0 refuses this node,
    EngineStoppedError (or the error of loading) if node 0 is lost, a rank is, or any node fails.
    """
    if reason := spawn_obstacle():
        raise ConfigError("--node-rank", setup.config.node_rank, reason)
    node = _WorkerNode(setup)
    try:
        node.run()
    finally:
        node.end()


class _WorkerNode:
    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self._setup = setup
        self._own = RankLayout.of(config).ranks_of_node(config.node_rank)
        self._ranks: RemoteRanks | None = None  # of this node
        self._facts = facts_of(setup)
        self._link = NodeLink(connect(config), "Node 0", self._beat)

    def run(self) -> None:
        start = self._join()
        logger.info("Node 0 has all nodes; loading ranks %s", ", ".join(map(str, self._own)))
        self._ranks = ranks = self._start_ranks(start)
        ranks.lost.add_done_callback(self._report)
        ranks.answered = self._send
        threading.Thread(target=self._report_ready, args=(ranks,), daemon=True).start()
        with _second_signal_ends():
            try:
                while not self._pass_on(ranks):
                    pass
            except _ToldToEndError as error:
                self._report_error(error)
                raise
        ranks.begin_to_end()
        ranks.end()
        logger.info("Node 0 has ended, and so does this node")

    def end(self) -> None:
        """Kill the ranks that still run, and close the connection."""
        if self._ranks is not None:
            self._ranks.kill()
        self._link.close()

    # -- before the ranks run ----------------------------------------------------------------------

    def _join(self) -> Start:
        """Ask node 0 to take part, and wait until all other nodes have."""
        node = self._setup.config.node_rank
        try:
            self._link.send(Join(node, self._facts))
        except OSError as error:
            raise EngineStoppedError(f"Node 0 cannot be reached: {error.strerror}.") from error
        while True:
            for frame in self._receive():
                if isinstance(frame, Refused):
                    reason = f"node 0 refuses this node: {frame.reason}"
                    raise ConfigError("--node-rank", node, reason)
                if isinstance(frame, Start):
                    return frame
                self._check_failed(frame)

    def _start_ranks(self, start: Start) -> RemoteRanks:
        context, setup = multiprocessing.get_context("spawn"), self._setup
        masks = MaskRing.allocate(
            context, setup.config.max_running_requests, setup.model.vocab_size, setup.config.pp
        )
        channel = Channel(self._own, context, masks)
        spec = RankSpec(
            rank=self._own[0],
            setup=setup,
            rendezvous=TcpRendezvous(start.host, start.port),
            interface=interface_of(self._link.own_address),
        )
        ranks = RemoteRanks(spec, Launcher(context), channel, self._own, may_hang=False)
        ranks.landed = lambda load: self._send(Landed(load))
        ranks.encoded = lambda number, why: self._send(Encoded(number, why))
        return ranks

    # -- while they run ----------------------------------------------------------------------------

    def _pass_on(self, ranks: RemoteRanks) -> bool:
        """Wait for what node 0 sends and pass it on; True once it has sent the end."""
        for frame in self._receive():
            if isinstance(frame, bytes):
                with contextlib.suppress(OSError):  # a rank has ended, which is about to be seen
                    ranks.channel.send(frame)
            elif isinstance(frame, StepMasks):
                ranks.channel.masks.put(frame)
            elif isinstance(frame, Close):
                return True
            else:
                self._check_failed(frame)
        if ranks.lost.done():
            self._raise_loss(ranks.lost)
        return False

    def _raise_loss(self, lost: Future[None]) -> None:
        """Raise why the ranks cannot go on: what node 0 makes of it, or its own loss, of which the
        ranks may have noticed first."""
        deadline = time.monotonic() + VERDICT_S
        while (rest := deadline - time.monotonic()) > 0:
            for frame in self._receive(rest):
                self._check_failed(frame)
        lost.result()

    def _receive(self, timeout_s: float = HEARTBEAT_S) -> list[Frame]:
        try:
            return self._link.receive(timeout_s)
        except LinkError as error:
            raise EngineStoppedError(f"{error}.") from error

    def _check_failed(self, frame: Frame) -> None:
        if isinstance(frame, Failed):
            raise EngineStoppedError(frame.reason)

    # -- called by other threads -------------------------------------------------------------------

    def _beat(self) -> Beat:
        ranks = self._ranks
        beats = ranks.channel.heartbeats() if ranks is not None else {}
        return Beat(SILENCE_LIMIT_S, tuple(beats[rank] for rank in sorted(beats)))

    def _report_ready(self, ranks: RemoteRanks) -> None:
        with contextlib.suppress(MinisglError, OSError):
            ranks.wait_ready(lambda fraction: None)
            self._link.send(Ready())

    def _send(self, message: Answered | Landed | Encoded) -> None:
        with contextlib.suppress(OSError):  # which is about to be seen
            self._link.send(message)

    def _report(self, lost: Future[None]) -> None:
        if (error := lost.exception()) is not None:
            self._report_error(error)

    def _report_error(self, error: BaseException) -> None:
        self._link.send_last(Failed(type(error).__name__, str(error)))


def connect(config: ResolvedConfig) -> socket.socket:
    """Connect to node 0 and prove each other's secret; tries again until node 0 is there.

    Raises ConfigError for the secret and the address, EngineStoppedError if node 0 does not come.
    """
    address = main_address(config)
    deadline = time.monotonic() + JOIN_LIMIT_S
    said = False
    while True:
        try:
            return _connect_once(config)
        except HandshakeError as error:
            reason = f"node 0 cannot be joined: {error}"
            raise ConfigError("--master-addr", str(address), reason) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise EngineStoppedError(
                    f"Node 0 was not found at {address} within {JOIN_LIMIT_S:.0f} s "
                    f"({getattr(error, 'strerror', None) or 'no answer'})."
                ) from error
        if not said:
            logger.info("Node %d waits for node 0 at %s", config.node_rank, address)
            said = True
        time.sleep(RETRY_S)


def _connect_once(config: ResolvedConfig) -> socket.socket:
    family, address = main_address(config).resolve()
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect(address)
        prove_to_main(connection, cluster_token(config, str(address[0])))
    except BaseException:
        connection.close()
        raise
    return connection


class _ToldToEndError(EngineStoppedError):
    """A signal ends this node, although node 0 goes on."""


@contextmanager
def _second_signal_ends() -> Iterator[None]:
    """Raise _ToldToEndError at the second SIGINT, SIGTERM or SIGHUP. The first one most often
    reaches all nodes, and node 0 then ends them in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal told
        name = signal.Signals(number).name
        if told:
            raise _ToldToEndError(f"This node was told to end by {name}.")
        told = True
        logger.warning("%s: node 0 decides when the engine ends; a second one ends this node", name)

    handlers: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # as SIGHUP is by nohup
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
