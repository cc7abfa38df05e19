"""Collectives over memory that the GPUs of one host share, over NVLink where there is one. NVLink's
multicast is not used.

By size, as scripts/bench_collectives.py measured it on two H200 (the README has the table):

- Up to some hundred rows, which is decoding: one kernel that sums and norms.
- Up to some thousand: two shots.
- Above that, which is prefill: NCCL.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError
from minisgl.kernels.fused import add_rms_norm, runs_triton

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.triton_peers import Mailbox

logger = logging.getLogger(__name__)

# What a rank writes to all the others together in one sum, where it writes twice the bytes of its
# rows to each; with more, the two shots' shorter way wins.
MAX_SENT_BYTES = 6 << 20
MAX_SENT_ROWS = 256
MAX_TWO_SHOT_BYTES = 16 << 20
# Logits that are gathered at once.
MAX_GATHERED_BYTES = 80 << 20
# More than rows of a step are sampled.
MAX_MAXIMA = 1024


def over_peer_memory(
    group: GroupCommunicator, hidden_size: int, dtype: torch.dtype
) -> Communicator:
    """Of the same ranks; `group` itself where the GPUs cannot reach each other's memory."""
    try:
        if not group.smallest(int(runs_triton(group.device))):
            raise PeerMemoryError("its kernels need Triton")
        return PeerCommunicator(group, hidden_size, dtype)
    except PeerMemoryError as error:  # on all ranks
        logger.warning("The GPUs share no memory, and NCCL does everything: %s", error)
        return group


class PeerCommunicator:
    """For one stream, which may be capturing."""

    def __init__(self, group: GroupCommunicator, hidden_size: int, dtype: torch.dtype) -> None:
        """Raises PeerMemoryError, on all ranks if on one."""
        from minisgl.kernels import triton_peers

        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._kernels = triton_peers
        self._memory = PeerMemory()
        num_words = hidden_size * dtype.itemsize // 4
        max_rows = MAX_SENT_BYTES // (8 * num_words * (self.size - 1))
        self._rows = self._mailbox(min(max_rows, MAX_SENT_ROWS), num_words)
        self._maxima = self._mailbox(MAX_MAXIMA, 2)
        own = torch.zeros(MAX_GATHERED_BYTES, dtype=torch.uint8, device=group.device)
        self._shared = triton_peers.SharedMemory(
            own, self._memory.addresses(own, self.rank, self.size), self._mailbox(1, 2)
        )
        torch.cuda.synchronize(group.device)
        # Behind it, too, no inbox is still to be zeroed.
        if not group.smallest(int(self._memory.error is None)):
            raise self._memory.error or PeerMemoryError("another rank cannot reach it")

    def sum(self, part: Tensor) -> Tensor:
        if self._are_few(part):
            return self._kernels.sum_rows(part, self._rows)
        total = self._sum_many(part)
        return part if total is part else part.copy_(total)

    def sum_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._are_few(part):
            return self._kernels.sum_norm(part, rows, weight, eps, self._rows)
        return add_rms_norm(self._sum_many(part), rows, weight, eps)

    def _are_few(self, part: Tensor) -> bool:
        num_words = part.shape[1] * part.itemsize // 4
        return len(part) <= self._rows.max_rows and num_words == self._rows.num_words

    def _sum_many(self, part: Tensor) -> Tensor:
        """Perhaps in the shared memory, where it stays until the next call."""
        if part.nbytes > MAX_TWO_SHOT_BYTES or part.nbytes % (16 * self.size):
            return self._group.sum(part)
        return self._kernels.sum_many(part, self._shared)

    def gather(self, part: Tensor) -> Tensor:
        if part.nbytes > MAX_GATHERED_BYTES:
            return self._group.gather(part)
        return self._kernels.gather(part, self._shared)

    def maximum(self, values: Tensor) -> Tensor:
        if len(values) > MAX_MAXIMA:
            return self._group.maximum(values)
        return self._kernels.maximum(values, self._maxima)

    def smallest(self, number: int) -> int:
        return self._group.smallest(number)

    def close(self) -> None:
        self._memory.close()
        self._group.close()

    def _mailbox(self, max_rows: int, num_words: int) -> Mailbox:
        shape = (2, self.size, max_rows, num_words)
        inbox = torch.zeros(shape, dtype=torch.int64, device=self._group.device)
        return self._kernels.Mailbox(
            inbox=inbox,
            addresses=self._memory.addresses(inbox, self.rank, self.size),
            exchanges=torch.zeros(max_rows, dtype=torch.int32, device=inbox.device),
            rank=self.rank,
        )
