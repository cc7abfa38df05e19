"""Forms the groups of an engine's ranks: tensor-parallel ones, and pipelines of these."""

from __future__ import annotations

import logging
from typing import Any

import torch

from minisgl.distributed.communicator import SINGLE_RANK, Communicator, GroupCommunicator
from minisgl.distributed.interfaces import LOOPBACK
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.peers import over_peer_memory
from minisgl.distributed.pipeline import GroupPipeline, OneStage, Pipeline
from minisgl.kernels.hardware import kernels_have_run

logger = logging.getLogger(__name__)


def join_group(
    store: Any,
    rank: int,
    layout: RankLayout,
    device: torch.device,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    plain: bool,
    interface: str | None = LOOPBACK,
) -> tuple[Communicator, Pipeline]:
    """Form the groups of all ranks; returns the communicator of the rank's stage, the fastest for a
    model of this width, and its place in the pipeline. Closing that closes both.

    Blocks until all ranks have joined. store: a torch.distributed.Store that all ranks can reach.
    dtype: of the activations. plain: use only collectives of torch.distributed. interface: the
    network interface on which to listen for the others, as of GroupCommunicator.
    """
    plain = plain or layout.spans_nodes(layout.stage(rank))  # peer memory is of one machine
    world = GroupCommunicator(store, rank, layout.world_size, device, interface)
    if layout.pp == 1:
        ranks = _fastest(world, hidden_size, dtype, plain=plain)
        return ranks, OneStage(ranks)
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
    have_run = kernels_have_run(torch.cuda.get_device_capability(group.device))
    if not group.host_min(int(have_run)):  # the ranks may have GPUs of several generations
        logger.info("NCCL does all collectives: ours have not run on GPUs of this generation")
        return group
    return over_peer_memory(group, hidden_size, dtype)
