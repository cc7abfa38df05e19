"""Memory of each rank that the others address."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.comm.one_shot import all_reduce_max


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of each rank that the others address, for one stream."""

    own: Tensor  # [num_bytes] uint8
    addresses: tuple[int, ...]  # of each rank's
    # [2, programs, ranks] int32, zero at first: the last round of which a rank's program has done
    # the first shot, and the second. The ranks write.
    flags: Tensor
    flag_addresses: tuple[int, ...]  # of each rank's
    rounds: Tensor  # [programs] int32, zero at first: of each program, those so far
    barrier_mailbox: Mailbox  # of one row with two words

    @property
    def num_bytes(self) -> int:
        return len(self.own)


def barrier(shared: SharedMemory) -> None:
    """Behind it, what all ranks queued before it is done and can be seen.

    Launched without overlap, so that the device has finished what came before in every respect.
    """
    anything = shared.own[:8].view(torch.int64).view(1, 1)
    all_reduce_max(anything, shared.barrier_mailbox, pdl=False)
