"""Forms the groups of an engine's ranks: tensor-parallel ones, and pipelines of these."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.distributed.communicator import SINGLE_RANK, Communicator, GroupCommunicator
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.peers import over_peer_memory
from minisgl.distributed.pipeline import GroupPipeline, OneStage, Pipeline


def join_group(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    plain: bool,
) -> Communicator:
    """Form a group of `size` ranks; returns the fastest communicator for a model of this width.

    Blocks until all ranks have joined. store: a torch.distributed.Store that all ranks can reach.
    rank: in the group. dtype: of the activations. plain: use only collectives of torch.distributed.
    """
    group = GroupCommunicator(store, rank, size, device)
    return _fastest(group, hidden_size, dtype, plain=plain)


def join_pipeline(
    store: Any,
    rank: int,
    layout: RankLayout,
    device: torch.device,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    plain: bool,
) -> tuple[Communicator, Pipeline]:
    """As `join_group`, of the ranks of all stages; returns the communicator of the rank's stage,
    and its place in the pipeline. Closing that closes both."""
    if layout.pp == 1:
        ranks = join_group(
            store, rank, layout.tp, device, hidden_size=hidden_size, dtype=dtype, plain=plain
        )
        return ranks, OneStage(ranks)
    world = GroupCommunicator(store, rank, layout.world_size, device)
    ranks = SINGLE_RANK
    if layout.tp > 1:
        stage = world.part([layout.ranks_of_stage(stage) for stage in range(layout.pp)])
        assert stage is not None, "every rank is in a stage"
        ranks = _fastest(stage, hidden_size, dtype, plain=plain)
    return ranks, GroupPipeline(world, layout, ranks)


def _fastest(
    group: GroupCommunicator, hidden_size: int, dtype: torch.dtype, *, plain: bool
) -> Communicator:
    if plain or group.device.type != "cuda":
        return group
    return over_peer_memory(group, hidden_size, dtype)
