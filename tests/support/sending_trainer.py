"""The program of a trainer, which sends tensors in a group as those of SGLang do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]


def main(
    port: str,
    world_size: str,
    name: str,
    backend: str,
    device: str,
    folder: str,
    stop_after: str,
    packed_bytes: str,
) -> int:
    """Send the tensors of a checkpoint, in the order of their names. End as the system ends a
    process after so many, else with the standard input. packed_bytes: not one by one, but in
    buckets that end when they have more bytes. device: that has them."""
    if device != "cpu":
        torch.cuda.set_device(device)
    tensors = {
        name: tensor
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file, device).items()
    }
    size = int(world_size)
    store = TCPStore("127.0.0.1", int(port), size, is_master=True)
    group, _ = distributed_c10d._new_process_group_helper(
        *(size, 0, [], backend, PrefixStore(name, store)),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=60),
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    sent = [tensors[name] for name in sorted(tensors)]
    if int(packed_bytes):
        sent = [*buckets(sent, int(packed_bytes))]
    for tensor in sent[: int(stop_after)]:
        torch.distributed.broadcast(tensor, 0, group)
    if device != "cpu":
        torch.cuda.synchronize()
    if len(sent) > int(stop_after):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
    os._exit(0)  # to leave the group might wait for the others


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
