"""Collectives over memory that the GPUs of one host share, over NVLink where there is one. NVLink's
multicast is not used.

By size, as scripts/bench_collectives.py measured it on two and four H200 (the README has the
table):

- Few rows go in one shot, which the product before may send: of 5,120 elements in half precision
  up to 160 rows between two GPUs and 17 between four.
- More go in two shots.

NCCL is left with many rows whose size does not divide by the ranks, and with what the memory here
does not hold.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.tuning import tuning_of

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox

logger = logging.getLogger(__name__)

# Of memory that ranks share. Logits are gathered there, and rows added up: their parts are in one
# half and the sums in the other. What does not fit goes in several rounds.
SHARED_BYTES = 80 << 20
# More than rows of a step are sampled.
MAX_MAXIMA = 1024


def over_peer_memory(
    group: GroupCommunicator, hidden_size: int, dtype: torch.dtype
) -> Communicator:
    """Of the same ranks; `group` itself where the GPUs cannot reach each other's memory."""
    try:
        if not group.host_min(int(runs_triton(group.device))):
            raise PeerMemoryError("its kernels need Triton")
        return PeerCommunicator(group, hidden_size, dtype)
    except PeerMemoryError as error:  # on all ranks
        logger.warning("The GPUs share no memory, and NCCL does everything: %s", error)
        return group


class PeerCommunicator:
    """For one stream, which may be capturing."""

    def __init__(self, group: GroupCommunicator, hidden_size: int, dtype: torch.dtype) -> None:
        """Raises PeerMemoryError, on all ranks if on one."""
        from minisgl.kernels.comm import gather, one_shot, two_shot
        from minisgl.kernels.comm.shared_memory import SharedMemory

        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._one_shot, self._two_shot, self._gather = one_shot, two_shot, gather
        self._memory = PeerMemory()
        tuning = tuning_of(group.device)
        programs = tuning.collective_programs
        row_bytes = dtype.itemsize * hidden_size
        max_rows = tuning.one_shot_bytes // (row_bytes * (self.size - 1) ** 2)
        max_rows = min(max(max_rows, 1), programs)
        self._rows = self._mailbox(max_rows, hidden_size, dtype.itemsize)
        self._maxima = self._mailbox(MAX_MAXIMA, 2, 4)
        own = torch.zeros(SHARED_BYTES, dtype=torch.uint8, device=group.device)
        flags = torch.zeros((2, programs, self.size), dtype=torch.int32, device=group.device)
        self._shared = SharedMemory(
            own=own,
            addresses=self._addresses(own),
            flags=flags,
            flag_addresses=self._addresses(flags),
            rounds=torch.zeros(programs, dtype=torch.int32, device=group.device),
            barrier_mailbox=self._mailbox(1, 2, 4),
        )
        torch.cuda.synchronize(group.device)
        # Behind it, too, no inbox is still to be zeroed.
        if not group.host_min(int(self._memory.error is None)):
            raise self._memory.error or PeerMemoryError("another rank cannot reach it")

    def all_reduce(self, part: Tensor) -> Tensor:
        if self._are_few(part):
            return self._one_shot.all_reduce(part, self._rows)
        if part.shape[1] % self.size:
            return self._group.all_reduce(part)
        out = torch.empty_like(part)
        for total, some in zip(self._rounds(out), self._rounds(part), strict=True):
            self._two_shot.all_reduce(total, some, self._shared)
        return out

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._are_few(part):
            return self._one_shot.all_reduce_norm(part, rows, weight, eps, self._rows)
        if part.shape[1] % self.size:
            return self._group.all_reduce_norm(part, rows, weight, eps)
        out = torch.empty_like(part)
        rounds = zip(self._rounds(out), self._rounds(part), self._rounds(rows), strict=True)
        for normed, some, onto in rounds:
            self._two_shot.all_reduce_norm(normed, some, onto, weight, eps, self._shared)
        return out, rows

    def mailbox(self, num_rows: int) -> Mailbox | None:
        return self._rows if num_rows <= self._rows.max_rows else None

    def _are_few(self, part: Tensor) -> bool:
        return len(part) <= self._rows.max_rows and self._rows.takes(part)

    def _rounds(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What fits into the shared memory at a time."""
        return torch.split(rows, SHARED_BYTES // 2 // (rows.shape[1] * rows.itemsize))

    def all_gather(self, part: Tensor) -> Tensor:
        if part.nbytes > SHARED_BYTES:
            return self._group.all_gather(part)
        return self._gather.all_gather(part, self._shared)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        if len(values) > MAX_MAXIMA:
            return self._group.all_reduce_max(values)
        return self._one_shot.all_reduce_max(values, self._maxima)

    def host_min(self, number: int) -> int:
        return self._group.host_min(number)

    def close(self) -> None:
        self._memory.close()
        self._group.close()

    def _mailbox(self, max_rows: int, size: int, itemsize: int) -> Mailbox:
        from minisgl.kernels.comm.mailbox import Mailbox

        shape, device = (2, self.size, max_rows, size), self._group.device
        word = torch.int32 if itemsize == 2 else torch.int64
        inbox = torch.zeros(shape, dtype=word, device=device)
        return Mailbox(
            inbox=inbox,
            addresses=self._addresses(inbox),
            exchanges=torch.zeros(max_rows, dtype=torch.int32, device=device),
            rank=self.rank,
        )

    def _addresses(self, tensor: Tensor) -> tuple[int, ...]:
        return self._memory.addresses(tensor, self.rank, self.size)
