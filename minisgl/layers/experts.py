"""A mixture of experts in the place of a layer's MLP (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from functools import partial

from torch import nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import Residual
from minisgl.kernels.moe import dispatch as fused_experts
from minisgl.kernels.moe.reference import ExpertWeights, Routing
from minisgl.layers.linear import Linear, empty_weight
from minisgl.layers.norm import RMSNorm
from minisgl.shards import even_shard, whole


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked. A rank has a part of each one's inner dimension."""

    def __init__(
        self, num_experts: int, hidden_size: int, expert_size: int, ranks: Communicator
    ) -> None:
        super().__init__()
        self.inner = even_shard(expert_size, ranks.rank, ranks.size)
        # An expert's gates first, then the other half.
        self.gate_up_proj = empty_weight(num_experts, 2 * self.inner.size, hidden_size)
        self.down_proj = empty_weight(num_experts, hidden_size, self.inner.size)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_proj, self.down_proj)


class SparseMLP(nn.Module):
    """Each row goes to the experts that a router chooses for it; their sum is added to the residual
    stream."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        num_chosen: int,
        expert_size: int,
        normalize: bool,
        ranks: Communicator,
    ) -> None:
        super().__init__()
        self.gate = Linear(whole(hidden_size), whole(num_experts))
        self.experts = Experts(num_experts, hidden_size, expert_size, ranks)
        self._routing = Routing(num_chosen, normalize)
        self._ranks = ranks

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        hidden, logits, rows = dispatch.norm_and_linear(
            residual, norm.weight, norm.eps, self.gate.weight, self.gate.kernels
        )
        weights, routing = self.experts.weights, self._routing
        if self._ranks.size == 1:
            return fused_experts.mix_add(hidden, logits, weights, routing, rows)
        delta = fused_experts.mix(hidden, logits, weights, routing)
        return Residual(rows, pending=partial(self._ranks.sum_norm, delta))
