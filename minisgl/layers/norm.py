"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import Residual
from minisgl.layers.linear import empty_weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight of each row."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_weight(size)
        self.eps = eps

    def forward(self, residual: Residual) -> Tensor:
        """[num_rows, size]"""
        normed, _ = dispatch.norm(residual, self.weight, self.eps)
        return normed
