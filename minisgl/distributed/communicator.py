"""The collectives of tensor-parallel ranks, behind one interface.

All ranks call the same methods in the same order, with tensors of the same shapes. On a GPU a call
is queued on the current stream and may be captured.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from minisgl.distributed.interfaces import LOOPBACK
from minisgl.kernels.dispatch import add_rms_norm

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class Communicator(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part` [num_rows, size], which may be overwritten."""
        ...

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm of the sum of all ranks' `part` and `rows`, both [num_rows, size].

        May overwrite both. Returns the norm and the new residual stream, both [num_rows, size].
        """
        ...

    def mailbox(self, num_rows: int) -> Mailbox | None:
        """The buffer through which a GEMM can send its result as this rank's summand (see
        Product.send); None if there is none for `num_rows` rows."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate all ranks' `part` [num_rows, width] in the order of the ranks: [num_rows,
        size · width]."""
        ...

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The maximum over each row of all ranks' `values` [num_rows, any] int64: [num_rows]."""
        ...

    def host_min(self, number: int) -> int:
        """The minimum of all ranks' numbers. Blocks the host; not for use within a step."""
        ...

    def close(self) -> None:
        """Leave the group. No work may be queued."""
        ...


class SingleRank:
    """The communicator of a single rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(part, rows, weight, eps)

    def mailbox(self, num_rows: int) -> Mailbox | None:
        return None

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values.amax(dim=1)

    def host_min(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


SINGLE_RANK = SingleRank()


class GroupCommunicator:
    """The collectives of torch.distributed: gloo between CPUs, NCCL between GPUs.

    It uses the default process group, so a process can have one at a time, and parts of it.
    """

    group: dist.ProcessGroup | None = None  # None: the default group

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        interface: str | None = LOOPBACK,
    ) -> None:
        """Form the group; blocks until all ranks have joined.

        store: a torch.distributed.Store that they share. interface: the network interface on which
        gloo and NCCL listen, unless the environment names one; None: they choose.
        """
        self._interface = interface
        self.rank = rank
        self.size = size
        self.device = device
        on_gpu = device.type == "cuda"
        # torch numbers process groups per process; reset the counter in case an earlier start
        # failed. Keep torch from replacing sys.excepthook.
        _world.group_count, hook = 0, sys.excepthook
        with _listening_on(interface):
            dist.init_process_group(
                # Collectives of host values use gloo in both cases.
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                device_id=device if on_gpu else None,
            )
        sys.excepthook = hook

    def part(self, members: Sequence[Sequence[int]]) -> GroupCommunicator | None:
        """Form groups of some ranks of this one, which is the default group; returns that of this
        rank, None if it is in none of them. All ranks call it together, with the same `members`."""
        own: dist.ProcessGroup | None = None
        with _listening_on(self._interface):
            for ranks in members:
                # A message may lie unread for as long as no request comes.
                formed = dist.new_group(list(ranks), timeout=timedelta(days=365))
                if isinstance(formed, dist.ProcessGroup):  # it is a number on other ranks
                    own = formed
        if own is None:
            return None
        part = copy.copy(self)
        part.group, part.rank, part.size = own, dist.get_rank(own), dist.get_world_size(own)
        return part

    def all_reduce(self, part: Tensor) -> Tensor:
        dist.all_reduce(part, group=self.group)
        return part

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(part), rows, weight, eps)

    def mailbox(self, num_rows: int) -> Mailbox | None:
        return None

    def all_gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        largest = values.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def host_min(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


@contextlib.contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    """Bind the sockets of gloo and NCCL to a network interface, unless the environment names one.
    Both read these variables when a group is formed."""
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - os.environ.keys()
    if interface is not None:
        os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
