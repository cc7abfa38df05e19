"""A trainer in a process of its own, which sends tensors in a group as those of SGLang do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from minisgl.distributed.addresses import GroupAddress


def start_trainer(
    address: GroupAddress, folder: Path, stop_after: int = 1 << 30, packed_bytes: int = 0
) -> subprocess.Popen[bytes]:
    """Send the tensors of a checkpoint, in the order of their names; end after so many.
    packed_bytes: not one by one, but in buckets that end when they have more bytes."""
    place = (address.master_port, address.world_size, address.group_name)
    arguments = map(str, (*place, folder, stop_after, packed_bytes))
    return subprocess.Popen([sys.executable, __file__, *arguments])


def main(
    port: str, world_size: str, name: str, folder: str, stop_after: str, packed_bytes: str
) -> None:
    tensors = {
        name: tensor
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    size = int(world_size)
    store = TCPStore("127.0.0.1", int(port), size, is_master=True)
    group, _ = distributed_c10d._new_process_group_helper(
        *(size, 0, [], "gloo", PrefixStore(name, store)),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=60),
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    sent = [tensors[name] for name in sorted(tensors)]
    if int(packed_bytes):
        sent = [*buckets(sent, int(packed_bytes))]
    for number, tensor in enumerate(sent):
        if number == int(stop_after):
            os._exit(1)
        torch.distributed.broadcast(tensor, 0, group)


def buckets(tensors: list[Tensor], most_bytes: int) -> Iterator[Tensor]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor.contiguous().view(torch.uint8).view(-1))
        if sum(map(len, bucket)) > most_bytes:
            yield torch.cat(bucket)
            bucket = []
    if bucket:
        yield torch.cat(bucket)


if __name__ == "__main__":
    main(*sys.argv[1:])
