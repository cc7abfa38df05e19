"""Collectives through GPU memory that the ranks of one host share, over NVLink where available.
NVLink multicast is not used.

The algorithm depends on the size. Thresholds were measured by scripts/bench/bench_kernels.py on
two and four H200 (the table is in the bench's README):

- An all-reduce of few rows is one-shot, and the preceding GEMM can send its summands: rows of 5,120
  elements in half precision, up to 160 between two GPUs and 17 between four.
- Larger ones are two-shot.
- NCCL reduces many rows whose size is not divisible by the number of ranks, and whatever does not
  fit into the shared memory.
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

# Shared memory of each rank, for gathered logits and for two-shot all-reduces, which use one half
# for summands and the other for results. Larger ones are split into rounds.
SHARED_BYTES = 80 << 20
# More than the number of rows that a step samples.
MAX_MAXIMA = 1024


def over_peer_memory(
    group: GroupCommunicator, hidden_size: int, dtype: torch.dtype
) -> Communicator:
    """A communicator of the ranks of `group`; `group` itself if the GPUs have no peer access."""
    try:
        if not group.host_min(int(runs_triton(group.device))):
            raise PeerMemoryError("its kernels need Triton")
        return PeerCommunicator(group, hidden_size, dtype)
    except PeerMemoryError as error:  # on all ranks
        logger.warning("GPU peer access is unavailable; falling back to NCCL: %s", error)
        return group


class PeerCommunicator:
    """Collectives over peer memory, for use on a single stream, which may be capturing."""

    def __init__(self, group: GroupCommunicator, hidden_size: int, dtype: torch.dtype) -> None:
        """Map the memory of all ranks. Raises PeerMemoryError on all ranks or on none."""
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
        # This also synchronizes: after it, all ranks have zeroed their inboxes.
        if not group.host_min(int(self._memory.error is None)):
            raise self._memory.error or PeerMemoryError("another rank cannot map it")

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
        """Split `rows` into parts that fit into the shared memory."""
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
        return self._memory.addresses(tensor, self.rank, self.size, self._group.group)
