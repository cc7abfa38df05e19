"""What tensor-parallel ranks tell each other in a step, behind one interface.

All ranks call the same methods in the same order, with tensors of the same shapes. On a GPU a call
is queued on the current stream and may be captured.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

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
        """add_rms_norm of the sum of all ranks' `part`, [num_rows, size], and `rows`."""
        ...

    def mailbox(self, num_rows: int) -> Mailbox | None:
        """Where a kernel may leave this rank's part of a sum by itself, if there is such a place
        for so many rows: see fused.linear_send."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' `part` [num_rows, width] side by side: [num_rows, size · width]."""
        ...

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The largest of each row of all ranks' `values` [num_rows, any] int64: [num_rows]."""
        ...

    def host_min(self, number: int) -> int:
        """The smallest of all ranks' numbers. Blocks; not within a step."""
        ...

    def close(self) -> None:
        """Leave the others. To be called once nothing is queued any more."""
        ...


class SingleRank:
    """One rank has nobody to ask, and callers do not."""

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
    """torch.distributed's own collectives: gloo between CPUs, NCCL between GPUs.

    The group is the default one of the process, of which there is one at a time.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        """Blocks until all ranks are here. store: a torch.distributed.Store that they share."""
        self.rank = rank
        self.size = size
        self.device = device
        on_gpu = device.type == "cuda"
        # Ranks meet under the number of their group, and this process may have counted one that
        # never came about. The hook would mark every traceback of the user's script with a rank.
        _world.group_count, hook = 0, sys.excepthook
        with _listening_on_loopback():
            dist.init_process_group(
                # What the host has to say goes over gloo in any case.
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                device_id=device if on_gpu else None,
            )
        sys.excepthook = hook

    def all_reduce(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def all_reduce_norm(
        self, part: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(part), rows, weight, eps)

    def mailbox(self, num_rows: int) -> Mailbox | None:
        return None

    def all_gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        largest = values.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def host_min(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        dist.destroy_process_group()


@contextlib.contextmanager
def _listening_on_loopback() -> Iterator[None]:
    """Keep the sockets of gloo and NCCL from other machines, unless the environment names an
    interface. Both read it when a group is made."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - os.environ.keys()
    os.environ.update(dict.fromkeys(names, loopback))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
