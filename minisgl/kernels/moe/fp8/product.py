"""Experts on FP8 tensor cores."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.moe.fp8 import launch
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.residual import Residual


class TensorCoreExperts(Fp8Experts):
    """Experts in FP8 whose inputs are rounded, on a GPU."""

    def __call__(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        return launch.fused_experts(x, logits, self, routing)[0]

    def add_to(self, x: Tensor, logits: Tensor, routing: Routing, rows: Tensor) -> Residual:
        rows, squares = launch.fused_experts(x, logits, self, routing, rows)
        return Residual(rows, squares=squares)
