"""Forms the group of tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.interfaces import LOOPBACK
from minisgl.distributed.peers import over_peer_memory


def join_group(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    plain: bool,
    one_host: bool = True,
    interface: str | None = LOOPBACK,
) -> Communicator:
    """Form a group of `size` ranks; returns the fastest communicator for a model of this width.

    Blocks until all ranks have joined. store: a torch.distributed.Store that all ranks can reach.
    rank: in the group. dtype: of the activations. plain: use only collectives of torch.distributed.
    one_host: whether all ranks run on this machine, which peer memory needs. interface: the network
    interface on which to listen for the others, as of GroupCommunicator.
    """
    group = GroupCommunicator(store, rank, size, device, interface)
    if plain or not one_host or device.type != "cuda":
        return group
    return over_peer_memory(group, hidden_size, dtype)
