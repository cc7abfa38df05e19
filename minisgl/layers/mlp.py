"""The gated MLP of a layer."""

from __future__ import annotations

from torch import nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import Residual
from minisgl.layers.linear import MergedLinear, SummedLinear
from minisgl.layers.norm import RMSNorm
from minisgl.shards import even_shard, whole


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), for x the norm of the residual stream; added to the stream."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, ranks: Communicator
    ) -> None:
        super().__init__()
        inner = even_shard(intermediate_size, ranks.rank, ranks.size)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(whole(hidden_size), parts, bias=bias)
        self.down_proj = SummedLinear(inner, hidden_size, ranks, bias=bias)

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        first = self.gate_up_proj
        if first.bias is None:
            hidden, rows = dispatch.norm_linear_silu_mul(
                residual, norm.weight, norm.eps, first.weight, first.kernels
            )
        else:
            gate_up, rows = dispatch.norm_linear(
                residual, norm.weight, norm.eps, first.weight, first.bias, first.kernels
            )
            hidden = dispatch.silu_mul(gate_up)
        return self.down_proj.add(hidden, rows)
