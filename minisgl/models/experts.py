"""What follows the attention of a layer, as its config says: an MLP, or a mixture of experts."""

from __future__ import annotations

from torch import nn

from minisgl.distributed.communicator import Communicator
from minisgl.layers.experts import SparseMoeBlock
from minisgl.layers.formats import WeightFormat
from minisgl.layers.grouped_experts import GroupedMoeBlock
from minisgl.layers.mlp import GatedMLP
from minisgl.models.config import NativeConfig


def mlp_or_experts(
    config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
) -> nn.Module:
    """That of layer `index`."""
    hidden_size, experts = config.hidden_size, config.experts
    if experts is None or index not in experts.layers:
        size, bias = config.intermediate_size, config.mlp_bias
        return GatedMLP(hidden_size, size, format, comm, bias=bias)
    if experts.routing is None:
        return SparseMoeBlock(
            hidden_size,
            format,
            comm,
            num_experts=experts.num_experts,
            top_k=experts.num_chosen,
            expert_size=experts.size,
            normalize=experts.normalize,
            by_rank=config.experts_by_rank,
        )
    return GroupedMoeBlock(
        hidden_size,
        format,
        comm,
        routing=experts.routing,
        num_experts=experts.num_experts,
        expert_size=experts.size,
        shared_size=experts.shared_size,
        has_bias=experts.router_bias,
        by_rank=config.experts_by_rank,
    )
