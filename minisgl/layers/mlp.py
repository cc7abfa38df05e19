"""The gated MLP of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.residual import Residual
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.shards import even_shard, whole


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) for x the norm of the residual stream; added to the stream."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        format: WeightFormat,
        comm: Communicator,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        inner = even_shard(intermediate_size, comm.rank, comm.size)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(whole(hidden_size), parts, format, bias=bias)
        self.down_proj = RowParallelLinear("down_proj", inner, hidden_size, format, comm, bias=bias)

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        gate_up, down = self.gate_up_proj.product, self.down_proj.product
        hidden, rows = gate_up.silu_mul_of_norm(residual, norm, down)
        return self.down_proj.add_to(hidden, rows)

    def summand(self, x: Tensor) -> Tensor:
        """This rank's summand of the result for x [num_rows, hidden_size]: a new tensor like x."""
        down = self.down_proj.product
        return down(down.silu_mul(self.gate_up_proj.product(x)))
