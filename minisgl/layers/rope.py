"""Rotary position embedding (Su et al., arXiv 2104.09864).

Dimension i of a head is paired with dimension i + head_dim / 2, as in Hugging Face checkpoints;
pair i is rotated by the angle position · frequency i.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """A table of the rotations at every position that can occur, shared by all layers."""

    table: Tensor  # [max_seq_len, head_dim] float32: the cos of each pair, then the sin of each

    def __init__(self, frequencies: Tensor, max_seq_len: int, *, scale: float = 1.0) -> None:
        """frequencies: [head_dim / 2] float32, radians per position; scale multiplies cos and
        sin."""
        super().__init__()
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("table", table, persistent=False)
