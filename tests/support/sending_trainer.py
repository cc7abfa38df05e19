"""A trainer in a process of its own, which sends tensors in a group as those of SGLang do."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from minisgl.distributed.weight_group import GroupAddress


def start_trainer(
    address: GroupAddress, folder: Path, stop_after: int = 1 << 30
) -> subprocess.Popen[bytes]:
    """Send the tensors of a checkpoint, in the order of their names; end after so many."""
    place = (address.master_port, address.world_size, address.group_name)
    arguments = map(str, (*place, folder, stop_after))
    return subprocess.Popen([sys.executable, __file__, *arguments])


def main(port: str, world_size: str, name: str, folder: str, stop_after: str) -> None:
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
    for number, sent in enumerate(sorted(tensors)):
        if number == int(stop_after):
            os._exit(1)
        torch.distributed.broadcast(tensors[sent], 0, group)


if __name__ == "__main__":
    main(*sys.argv[1:])
