"""Node 0's launcher and channel: processes and pipes on its own machine, links to the others.

A link stands for all ranks of its node, whose process starts and watches them (see worker_node.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.context import SpawnContext

from minisgl.distributed.layout import RankLayout
from minisgl.errors import EngineStoppedError, MinisglError
from minisgl.ranks.nodes.gathering import Nodes
from minisgl.ranks.nodes.link import Beat, Close, Frame, LinkError, Start
from minisgl.ranks.processes.channel import (
    Answered,
    Channel,
    Encoded,
    Failed,
    Landed,
    Message,
    RankEnd,
    Ready,
    Waitable,
)
from minisgl.ranks.processes.launcher import Launcher
from minisgl.ranks.processes.mask_ring import MaskRing, StepMasks
from minisgl.ranks.processes.rank_watch import error_of
from minisgl.ranks.processes.worker import RankSpec


class NodesLauncher(Launcher):
    """Starts ranks on this machine, and lets the other nodes start theirs."""

    def __init__(self, context: SpawnContext, nodes: Nodes) -> None:
        super().__init__(context)
        self._nodes = nodes

    def start(self, specs: Sequence[RankSpec], ends: Sequence[RankEnd]) -> None:
        where = self._nodes.rendezvous
        for link in self._nodes.links.values():
            link.send(Start(where.host, where.port))
        super().start(specs, ends)

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super().join(timeout_s)
        for link in self._nodes.links.values():
            with contextlib.suppress(LinkError):  # the other end closes it once its ranks are gone
                while (rest := deadline - time.monotonic()) > 0:
                    link.receive(rest)

    def kill(self, timeout_s: float) -> None:
        self._nodes.close()
        super().kill(timeout_s)


class NodesChannel(Channel):
    """Pipes to the ranks of this machine, and links to other nodes, which pass plans on."""

    def __init__(
        self,
        ranks: Iterable[int],
        context: SpawnContext,
        masks: MaskRing,
        nodes: Nodes,
        layout: RankLayout,
    ) -> None:
        """ranks: of this machine."""
        super().__init__(ranks, context, masks)
        self._links = nodes.links
        self._layout = layout
        self._node_beats = {
            rank: 0.0 for node in self._links for rank in layout.ranks_of_node(node)
        }
        self._broken: MinisglError | None = None

    def send(self, data: bytes, masks: StepMasks | None = None) -> None:
        for link in self._links.values():
            link.send_plan(data, masks)
        super().send(data)

    def send_close(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(Close())
        super().send_close()

    def receive(
        self, timeout_s: float, wakers: Sequence[Waitable] = ()
    ) -> list[tuple[int, Message | None]]:
        links = {node: link for node, link in self._links.items() if not link.closed}
        sockets = [number for link in links.values() if (number := link.fileno()) >= 0]
        received = super().receive(timeout_s, (*wakers, *sockets))
        for node, link in links.items():
            try:
                for frame in link.receive(0):
                    received += self._heard(node, frame)
            except LinkError as error:
                link.close()
                self._broken = self._broken or EngineStoppedError(f"{error}.")
        return received

    def _heard(self, node: int, frame: Frame) -> list[tuple[int, Message | None]]:
        ranks = self._layout.ranks_of_node(node)
        if isinstance(frame, Ready):
            return [(rank, frame) for rank in ranks]
        if isinstance(frame, Answered):
            return [(frame.rank, frame)]
        if isinstance(frame, Landed | Encoded):
            return [(ranks[0], frame)]
        if isinstance(frame, Beat):
            self._node_beats.update(zip(ranks, frame.ranks, strict=False))
        elif isinstance(frame, Failed):
            reason = f"{self._links[node].name}: {frame.reason}"
            self._broken = self._broken or error_of(frame.kind)(reason)
        return []

    def heartbeats(self) -> Mapping[int, float]:
        return {**super().heartbeats(), **self._node_beats}

    def broken(self) -> MinisglError | None:
        return self._broken

    def send_failure(self, reason: MinisglError) -> None:
        for link in self._links.values():
            if not link.closed:
                link.send_last(Failed(type(reason).__name__, str(reason)))
