"""The gated MLP of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)). x: [num_rows, hidden_size]; returns the same shape."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up: [num_rows, 2 · size], the gates first; returns [num_rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
