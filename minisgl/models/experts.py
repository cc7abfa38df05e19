"""What follows the attention of a layer, as its config says: an MLP, or a mixture of experts."""

from __future__ import annotations

from torch import nn

from minisgl.distributed.communicator import Communicator
from minisgl.layers.experts import SharedExpertMoeBlock, SparseMoeBlock
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
    kind: type[SparseMoeBlock | GroupedMoeBlock] = SparseMoeBlock
    if experts.routing is not None:
        kind = GroupedMoeBlock
    elif experts.shared_size:
        kind = SharedExpertMoeBlock
    return kind(hidden_size, experts, format, comm, by_rank=config.experts_by_rank)
