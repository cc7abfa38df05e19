"""The stages of a pipeline, and what passes between them.

    stage 0  ── rows ──▶  stage 1  ── rows ──▶  last stage
             ◀──────────── tokens ────────────

A rank of a stage exchanges with those of the same tensor-parallel number: all ranks of a stage have
the same rows and the same tokens.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.layout import RankLayout


class Pipeline(Protocol):
    """The place of a rank among the stages. On a GPU a call is queued on the current stream, which
    goes on once the tensor is received, and does not wait for what is sent."""

    @property
    def stage(self) -> int: ...

    @property
    def size(self) -> int:
        """The number of stages."""
        ...

    @property
    def num_in_flight(self) -> int:
        """The largest number of steps in flight."""
        ...

    def receive(self, rows: Tensor) -> None:
        """Fill `rows`, contiguous, with what the stage before sends."""
        ...

    def send(self, rows: Tensor) -> None:
        """Send `rows`, contiguous, to the next stage. They must not change any more."""
        ...

    def receive_tokens(self, tokens: Tensor) -> None:
        """Fill `tokens`, on the first stage, with what the last one sends."""
        ...

    def send_tokens(self, tokens: Tensor) -> None:
        """Send `tokens` from the last stage to the first. They must not change any more."""
        ...

    def host_min(self, number: int) -> int:
        """The minimum of the numbers of all ranks of all stages. Blocks the host."""
        ...

    def close(self) -> None:
        """Leave all groups. No work may be queued, and what was sent is received meanwhile."""
        ...

    def abandon(self) -> None:
        """Leave all groups after a failure, without waiting for anybody."""
        ...


class OneStage:
    """A model that is not split into stages, on one rank or more."""

    stage = 0
    size = 1
    num_in_flight = 2

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def receive(self, rows: Tensor) -> None:
        raise AssertionError("the only stage receives nothing")

    send = receive_tokens = send_tokens = receive

    def host_min(self, number: int) -> int:
        return self._ranks.host_min(number)

    def close(self) -> None:
        self._ranks.close()

    abandon = close


class _Link:
    """One direction between two ranks: a group of its own, so that on a GPU no transfer waits for
    one in another direction."""

    def __init__(self, group: GroupCommunicator, other: int, num_in_flight: int) -> None:
        """other: number of the other rank in the group. num_in_flight: when a tensor is sent, all
        but the last so many before it have been received."""
        self._group, self._other = group, other
        self._num_in_flight = num_in_flight
        # With what is being sent, whose memory must not be reused.
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def receive(self, tensor: Tensor) -> None:
        dist.recv(tensor, group=self._group.group, group_src=self._other)

    def send(self, tensor: Tensor) -> None:
        if len(self._sending) == self._num_in_flight:
            self._finish_one()
        work = dist.isend(tensor, group=self._group.group, group_dst=self._other)
        self._sending.append((work, tensor))

    def finish(self) -> None:
        """Wait until everything is sent; on a GPU, let the current stream wait."""
        while self._sending:
            self._finish_one()

    def _finish_one(self) -> None:
        work, _ = self._sending.popleft()
        if work is not None:
            work.wait()


class GroupPipeline:
    """Stages whose ranks are processes: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, world: GroupCommunicator, layout: RankLayout, ranks: Communicator) -> None:
        """Form the links; all ranks of `world` do so together. ranks: of this stage."""
        self.stage = layout.stage(world.rank)
        self.size = layout.pp
        self._world, self._ranks = world, ranks
        # NCCL warns of transfers in one group, which wait for each other; here each has its own.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        self._before: _Link | None = None
        self._after: _Link | None = None
        self._tokens: _Link | None = None
        self.num_in_flight = layout.pp + 1  # one for each stage, and one for look-ahead
        last = layout.pp - 1
        for stage in range(layout.pp):  # every rank forms every group, in the same order
            following = (stage + 1) % layout.pp
            pairs = [
                [layout.rank(stage, tp_rank), layout.rank(following, tp_rank)]
                for tp_rank in range(layout.tp)
            ]
            group = world.part(pairs)
            if group is None:
                continue
            link = _Link(group, 1 - group.rank, self.num_in_flight)
            if stage == last:
                self._tokens = link
            elif self.stage == stage:
                self._after = link
            else:
                self._before = link

    def receive(self, rows: Tensor) -> None:
        assert self._before is not None, "the first stage receives no rows"
        self._before.receive(rows)

    def send(self, rows: Tensor) -> None:
        assert self._after is not None, "the last stage sends no rows"
        self._after.send(rows)

    def receive_tokens(self, tokens: Tensor) -> None:
        assert self._tokens is not None, "only the first stage receives tokens"
        self._tokens.receive(tokens)

    def send_tokens(self, tokens: Tensor) -> None:
        assert self._tokens is not None, "only the last stage sends tokens"
        self._tokens.send(tokens)

    def host_min(self, number: int) -> int:
        return self._world.host_min(number)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a rank has died, to which something was sent
            for link in (self._after, self._tokens):
                if link is not None:
                    link.finish()
        self.abandon()

    def abandon(self) -> None:
        self._ranks.close()
        self._world.close()
