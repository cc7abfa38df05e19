"""Rotary position embedding (Su et al., arXiv 2104.09864).

Dimension i of a head is paired with dimension i + head_dim / 2, as in Hugging Face checkpoints;
pair i is rotated by the angle position · frequency i.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(frequencies: Tensor, max_seq_len: int, *, scale: float = 1.0) -> Tensor:
    """The rotations at every position that can occur, [max_seq_len, head_dim] float32: the cos of
    each pair, then the sin of each, both multiplied by scale.

    frequencies: [head_dim / 2] float32, radians per position.
    """
    positions = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
