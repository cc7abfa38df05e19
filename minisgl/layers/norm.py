"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.kernels.residual import Residual, norm
from minisgl.layers.linear import parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight of each row."""

    weight: nn.Parameter  # [size]

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, residual: Residual) -> Tensor:
        """Returns [num_rows, size]."""
        normed, _ = norm(residual, self)
        return normed
