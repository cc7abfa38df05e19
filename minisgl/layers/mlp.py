"""The gated MLP of a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.shards import even_shard, whole


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), or with gelu, for x the norm of the residual stream; added to
    the stream."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        format: WeightFormat,
        comm: Communicator,
        *,
        bias: bool,
        gelu: bool = False,
    ) -> None:
        super().__init__()
        self._gelu = gelu
        inner = even_shard(intermediate_size, comm.rank, comm.size)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(whole(hidden_size), parts, format, bias=bias)
        self.down_proj = RowParallelLinear("down_proj", inner, hidden_size, format, comm, bias=bias)

    def forward(self, residual: Residual, norm: RMSNorm, rows: Rows) -> Residual:
        hidden, stream = self.inner_of_norm(residual, norm, rows)
        return self.down_proj.add_to(hidden, stream, rows)

    def inner_of_norm(self, residual: Residual, norm: RMSNorm, rows: Rows) -> tuple[Any, Tensor]:
        """(what the map down multiplies, the stream as one tensor)."""
        gate_up, down = self.gate_up_proj.product, self.down_proj.product
        return gate_up.gated_mul_of_norm(residual, norm, down, rows, gelu=self._gelu)

    def summand(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's summand of the result for x [num_rows, hidden_size]: a new tensor like x."""
        return self.down_proj.product(self._inner(x, rows), rows)

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows) -> Residual:
        """The stream with the result for x added, both [num_rows, hidden_size]. May overwrite the
        stream."""
        return self.down_proj.add_to(self._inner(x, rows), stream, rows)

    def _inner(self, x: Tensor, rows: Rows) -> Any:
        gate_up, down = self.gate_up_proj.product, self.down_proj.product
        return gate_up.gated_mul_of(x, down, rows, gelu=self._gelu)
