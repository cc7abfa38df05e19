"""Node 0 before the model is loaded: waits for the other nodes, and refuses those that do not fit.

Anybody may connect, so each connection has a thread and a time limit, and they are few at a time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from minisgl.config import ResolvedConfig
from minisgl.distributed.cluster_token import cluster_token
from minisgl.distributed.handshake import LIMIT_S, HandshakeError, prove_to_node
from minisgl.distributed.interfaces import interface_of
from minisgl.errors import EngineStoppedError
from minisgl.ranks.nodes.addresses import listen, main_address, own_address
from minisgl.ranks.nodes.agreement import difference
from minisgl.ranks.nodes.link import (
    SILENCE_LIMIT_S,
    Beat,
    Join,
    LinkError,
    NodeLink,
    Refused,
)
from minisgl.ranks.processes.rendezvous import TcpRendezvous, serve_store

logger = logging.getLogger(__name__)

# All nodes must have come within this time.
JOIN_LIMIT_S = 600.0
# Node 0 beats in the process that loads the model, which may hold up its threads.
LOADING_SILENCE_S = 120.0
MAX_PENDING = 16  # connections that have not joined yet
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Nodes:
    """The other nodes, which wait for `Start`."""

    links: Mapping[int, NodeLink]  # by node
    rendezvous: TcpRendezvous
    interface: str | None  # of node 0 towards the others; None: not known
    store: Store  # serves the rendezvous while it is referenced

    def loaded(self) -> None:
        """Promise the other nodes that node 0 answers in time from now on."""
        for link in self.links.values():
            link.beat = partial(Beat, SILENCE_LIMIT_S)

    def close(self) -> None:
        for link in self.links.values():
            link.close()


def gather_nodes(
    config: ResolvedConfig, facts: Mapping[str, str], report: Callable[[float], None]
) -> Nodes:
    """Wait until every other node has joined. facts: of node 0, with which theirs must agree.
    report: called often with the fraction that has come; what it raises ends the wait.

    Raises ConfigError for the address or the secret, EngineStoppedError if a node does not come.
    """
    address = own_address(config)
    gathering = _Gathering(config, facts, cluster_token(config, address.host))
    with listen(config, address) as listener:
        logger.info("Node 0 waits at %s for %d more", main_address(config), config.nnodes - 1)
        try:
            gathering.run(listener, report)
            store, rendezvous = serve_store(address.host)
        except BaseException:
            for link in gathering.links.values():
                link.close()
            raise
        finally:
            gathering.refuse_late()
    return Nodes(gathering.links, rendezvous, interface_of(address.host), store)


class _Gathering:
    def __init__(self, config: ResolvedConfig, facts: Mapping[str, str], token: bytes) -> None:
        self.links: dict[int, NodeLink] = {}
        self._config = config
        self._facts = facts
        self._token = token
        self._joining: queue.SimpleQueue[tuple[NodeLink, Join]] = queue.SimpleQueue()
        self._pending = threading.Semaphore(MAX_PENDING)
        self._over = False

    def run(self, listener: socket.socket, report: Callable[[float], None]) -> None:
        num_others = self._config.nnodes - 1
        deadline = time.monotonic() + JOIN_LIMIT_S
        listener.settimeout(LOOK_S)
        while len(self.links) < num_others:
            report(len(self.links) / num_others)
            if time.monotonic() > deadline:
                missing = sorted({*range(1, num_others + 1)} - {*self.links})
                raise EngineStoppedError(
                    f"Node {missing[0]} has not joined within {JOIN_LIMIT_S:.0f} s; start it with "
                    f"the options of this one and --node-rank {missing[0]}."
                )
            with contextlib.suppress(TimeoutError):
                connection, address = listener.accept()
                args = (connection, str(address[0]))
                if self._pending.acquire(blocking=False):
                    threading.Thread(
                        target=self._admit, args=args, name="minisgl-admit", daemon=True
                    ).start()
                else:
                    connection.close()
            self._drop_lost()
            with contextlib.suppress(queue.Empty):
                self._take(*self._joining.get_nowait())

    def refuse_late(self) -> None:
        """Refuse nodes that come too late, or too often."""
        self._over = True
        with contextlib.suppress(queue.Empty):
            while True:
                link, _ = self._joining.get_nowait()
                _refuse(link, "node 0 waits for no more nodes")

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Let a connection prove what it is, and queue it with its first message."""
        try:
            prove_to_node(connection, self._token)
            link = NodeLink(connection, address, partial(Beat, LOADING_SILENCE_S))
        except (HandshakeError, OSError, EOFError) as error:
            connection.close()
            reason = error if isinstance(error, HandshakeError) else "it has not introduced itself"
            logger.warning("Refused a connection from %s: %s", address, reason)
            return
        finally:
            self._pending.release()
        deadline = time.monotonic() + LIMIT_S
        with contextlib.suppress(LinkError):
            while time.monotonic() < deadline:
                for frame in link.receive(LOOK_S):
                    if isinstance(frame, Join):
                        self._joining.put((link, frame))
                        if self._over:
                            self.refuse_late()
                        return
        link.close()

    def _take(self, link: NodeLink, join: Join) -> None:
        reason = self._why_not(join)
        if reason is not None:
            logger.warning("Refused node %d (%s): %s", join.node, link.name, reason)
            _refuse(link, reason)
            return
        link.name = f"Node {join.node} ({link.name})"
        logger.info("%s has joined", link.name)
        self.links[join.node] = link

    def _why_not(self, join: Join) -> str | None:
        if not 0 < join.node < self._config.nnodes:
            return f"there are nodes 0 to {self._config.nnodes - 1} (--nnodes, --node-rank)"
        if join.node in self.links:
            return f"there is a node {join.node} already (--node-rank)"
        found = difference(join.facts, self._facts)
        return None if found is None else f"it differs from node 0 in {found}"

    def _drop_lost(self) -> None:
        """Forget nodes that have gone before all had come."""
        for node, link in list(self.links.items()):
            try:
                link.receive(0)
            except LinkError as error:
                logger.warning("%s; it may join again", error)
                link.close()
                del self.links[node]


def _refuse(link: NodeLink, reason: str) -> None:
    link.send_last(Refused(reason))
    link.close()
