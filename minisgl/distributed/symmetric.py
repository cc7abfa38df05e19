"""Collectives over torch's symmetric memory: memory of each GPU that all others of the host can
address, over NVLink where there is one. NVLink's multicast is not used.

Measured on two H200, bfloat16, rows of 5,120 (NCCL: 30 to 36 µs up to 256 rows, 302 µs for 8,192):
see the README. By size:

- Up to some hundred rows, which is decoding: one kernel that sums and norms (triton_peers.py).
- Up to some thousand: torch's two-shot, where each rank sums its share of the rows.
- Above that, which is prefill: NCCL.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.kernels import triton_peers
from minisgl.kernels.fused import add_rms_norm, runs_triton
from minisgl.kernels.triton_peers import Mailbox

logger = logging.getLogger(__name__)

# What a rank writes to all the others together in one sum, where it writes twice the bytes of its
# rows to each; with more, the two-shot's shorter way wins.
MAX_SENT_BYTES = 6 << 20
MAX_SENT_ROWS = 256
MAX_TWO_SHOT_BYTES = 16 << 20
# Logits that are gathered at once.
MAX_GATHERED_BYTES = 80 << 20
# More than rows of a step are sampled.
MAX_MAXIMA = 1024


def over_symmetric_memory(
    group: GroupCommunicator, hidden_size: int, dtype: torch.dtype
) -> Communicator:
    """Of the same ranks; `group` itself where the GPUs cannot reach each other's memory."""
    communicator: Communicator = group
    reason: Exception | None = None
    if runs_triton(group.device) and hidden_size % 2 == 0:
        try:
            communicator = SymmetricCommunicator(group, hidden_size, dtype)
        except Exception as error:  # alpha in torch, and drivers may refuse
            reason = error
    if not group.smallest(int(communicator is not group)):
        logger.warning("No symmetric memory between the GPUs, NCCL is used alone: %s", reason)
        return group
    return communicator


class SymmetricCommunicator:
    """For one stream, which may be capturing."""

    def __init__(self, group: GroupCommunicator, hidden_size: int, dtype: torch.dtype) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        everyone = dist.group.WORLD
        assert everyone is not None
        self._group_name = everyone.group_name
        words = hidden_size * dtype.itemsize // 4
        max_rows = MAX_SENT_BYTES // (8 * words * (self.size - 1))
        self._rows = self._mailbox(min(max_rows, MAX_SENT_ROWS), words)
        self._maxima = self._mailbox(MAX_MAXIMA, 2)
        self._shared = symmetric_memory.empty(
            max(MAX_GATHERED_BYTES, MAX_TWO_SHOT_BYTES), dtype=torch.uint8, device=group.device
        )
        self._handle = symmetric_memory.rendezvous(self._shared, self._group_name)
        torch.cuda.synchronize(group.device)
        dist.barrier()  # nobody writes to an inbox that is still to be zeroed

    def sum(self, part: Tensor) -> Tensor:
        if part.dim() == 2 and len(part) <= self._rows.max_rows:
            return triton_peers.sum_rows(part, self._rows)
        total = self._sum_many(part)
        return part if total is part else part.copy_(total)

    def sum_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if len(part) <= self._rows.max_rows:
            return triton_peers.sum_norm(part, rows, weight, eps, self._rows)
        return add_rms_norm(self._sum_many(part), rows, weight, eps)

    def _sum_many(self, part: Tensor) -> Tensor:
        """Perhaps in the shared memory, where it stays until the next call."""
        # Each rank sums a share that must begin at 16 bytes.
        if part.nbytes > MAX_TWO_SHOT_BYTES or part.nbytes % (16 * self.size):
            return self._group.sum(part)
        shared = self._shared[: part.nbytes].view(part.dtype).view(part.shape)
        shared.copy_(part)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group_name)
        return shared

    def gather(self, part: Tensor) -> Tensor:
        if part.nbytes > MAX_GATHERED_BYTES:
            return self._group.gather(part)
        num_rows, width = part.shape
        self._shared[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        self._handle.barrier()
        whole = part.new_empty((num_rows, self.size, width))
        for rank in range(self.size):
            theirs = self._handle.get_buffer(rank, part.shape, part.dtype)
            whole[:, rank].copy_(theirs)
        self._handle.barrier()  # nobody writes there before all have read
        return whole.view(num_rows, self.size * width)

    def maximum(self, values: Tensor) -> Tensor:
        if len(values) > MAX_MAXIMA:
            return self._group.maximum(values)
        return triton_peers.maximum(values, self._maxima)

    def smallest(self, number: int) -> int:
        return self._group.smallest(number)

    def close(self) -> None:
        self._group.close()

    def _mailbox(self, max_rows: int, num_words: int) -> Mailbox:
        shape = (2, self.size, max_rows, num_words)
        inbox = symmetric_memory.empty(shape, dtype=torch.int64, device=self._group.device)
        inbox.zero_()
        handle = symmetric_memory.rendezvous(inbox, self._group_name)
        inboxes = [handle.get_buffer(rank, shape, torch.int64) for rank in range(self.size)]
        return Mailbox(
            inbox=inbox,
            addresses=torch.tensor([box.data_ptr() for box in inboxes], device=inbox.device),
            exchanges=torch.zeros(max_rows, dtype=torch.int32, device=inbox.device),
            rank=self.rank,
        )
