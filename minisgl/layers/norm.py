"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.layers.linear import empty_weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    The quotient is computed in float32 and rounded to x's dtype before it meets the weight, as in
    transformers, so that bfloat16 models see the rounding that they were made with.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of residual + x (None: 0), and that sum, the next residual. Shapes are alike."""
        if x is not None:
            residual = residual + x
        normed: Tensor = self(residual)
        return normed, residual
