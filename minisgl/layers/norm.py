"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.kernels.residual import Residual, norm
from minisgl.layers.linear import parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight of each row.

    `adds_one`: a checkpoint stores weight - 1; 1 is added at load, in float32. `factor` multiplies
    a checkpoint's weight at load, in float32.
    """

    weight: nn.Parameter  # [size]

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        adds_one: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if adds_one or factor != 1 else dtype
        self.weight = parameter(torch.empty(size, dtype=dtype))
        self.eps = eps
        self.has_one_added = adds_one
        self.factor = factor

    def forward(self, residual: Residual) -> Tensor:
        """Returns [num_rows, size]."""
        normed, _ = norm(residual, self)
        return normed
