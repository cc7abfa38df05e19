"""The group in which a trainer sends its weights: itself, as rank 0, and the ranks of engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from minisgl.distributed.addresses import GroupAddress

JOIN_S = 120.0  # for all to join
PACKED_BYTES = 1 << 30  # a bucket of vLLM's senders ends with the tensor that exceeds this


class WeightGroup:
    """Receives what rank 0 broadcasts."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device) -> None:
        """rank: in the group. Blocks until all have joined. Raises RuntimeError or OSError.

        The group is one beside the default one, if there is one; both sides must form it by the
        same functions of torch, or their keys in the store differ.
        """
        limit = timedelta(seconds=JOIN_S)
        store = TCPStore(
            address.master_address,
            address.master_port,
            address.world_size,
            is_master=False,
            timeout=limit,
        )
        self.packed = address.packed
        self._device = device
        self._group: Any
        self._group, _ = distributed_c10d._new_process_group_helper(
            address.world_size,
            rank,
            [],
            address.backend,
            PrefixStore(address.group_name, store),
            group_name=distributed_c10d.GroupName(address.group_name),
            timeout=limit,
        )
        members = {number: number for number in range(address.world_size)}
        distributed_c10d._world.pg_group_ranks[self._group] = members

    def receive(self, tensors: Iterable[tuple[list[int], torch.dtype]]) -> Iterator[Tensor]:
        """The tensors that rank 0 broadcasts next, given their shapes and dtypes, on the device.
        Blocks. Raises RuntimeError if that ends."""
        for shape, dtype in tensors:
            yield self._received(shape, dtype)

    def receive_packed(self, tensors: Iterable[tuple[list[int], torch.dtype]]) -> Iterator[Tensor]:
        """The same of tensors that come as the bytes of several."""
        bucket: list[tuple[list[int], torch.dtype, int]] = []
        num_bytes = 0
        for shape, dtype in tensors:
            size = math.prod(shape) * dtype.itemsize
            bucket.append((shape, dtype, size))
            num_bytes += size
            if num_bytes > PACKED_BYTES:
                yield from self._unpacked(bucket)
                bucket, num_bytes = [], 0
        if bucket:
            yield from self._unpacked(bucket)

    def _unpacked(self, bucket: list[tuple[list[int], torch.dtype, int]]) -> Iterator[Tensor]:
        sizes = [num_bytes for *_, num_bytes in bucket]
        packed = self._received([sum(sizes)], torch.uint8)
        for (shape, dtype, _), part in zip(bucket, packed.split(sizes), strict=True):
            yield part.clone().view(dtype).view(shape)  # where the alignment suits its dtype

    def _received(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor, 0, self._group)
        return tensor

    def close(self) -> None:
        dist.destroy_process_group(self._group)
