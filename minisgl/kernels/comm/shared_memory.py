"""Memory of each rank that the others can address, and a barrier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.comm.one_shot import all_reduce_max


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of each rank that the others can address, for one stream."""

    own: Tensor  # [num_bytes] uint8
    addresses: tuple[int, ...]  # of each rank's
    # [2, programs, ranks] int32, initially zero, written by all ranks: the last round of which a
    # rank's program has sent the first shot, and the second.
    flags: Tensor
    flag_addresses: tuple[int, ...]  # of each rank's
    rounds: Tensor  # [programs] int32, initially zero: the rounds of each program so far
    barrier_mailbox: Mailbox  # of one row with two words

    @property
    def num_bytes(self) -> int:
        return len(self.own)


def barrier(shared: SharedMemory) -> None:
    """Queues a barrier: work after it sees everything that all ranks queued before it.

    Launched without overlap, so that all earlier work of the device is complete.
    """
    anything = shared.own[:8].view(torch.int64).view(1, 1)
    all_reduce_max(anything, shared.barrier_mailbox, pdl=False)
