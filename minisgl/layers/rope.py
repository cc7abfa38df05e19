"""Rotary position embedding (Su et al., arXiv 2104.09864).

Dimension i of a head is paired with dimension i + head_dim / 2, as in Hugging Face checkpoints;
pair i turns by position · frequency i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turns of a step's rows, computed once and shared by the layers."""

    cos: Tensor  # [num_rows, 1, head_dim / 2] float32
    sin: Tensor  # the same

    def apply(self, x: Tensor) -> Tensor:
        """Turn the heads of x, [num_rows, num_heads, head_dim], in float32; returns x's dtype."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Positions to turns, through a table of cos and sin for every position that can occur."""

    table: Tensor

    def __init__(self, frequencies: Tensor, max_seq_len: int, *, scale: float = 1.0) -> None:
        """frequencies: [head_dim / 2] float32, radians per position; cos and sin times scale."""
        super().__init__()
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("table", table, persistent=False)  # [max_seq_len, head_dim] float32

    def forward(self, positions: Tensor) -> Rotation:
        """positions: [num_rows] int64, each under max_seq_len."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return Rotation(cos, sin)
