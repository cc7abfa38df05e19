"""Experts with INT4 weights on a GPU."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.moe.int4 import launch
from minisgl.kernels.moe.quantized import Int4Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.residual import Residual


class WeightOnlyExperts(Int4Experts):
    """Experts whose INT4 weights a kernel dequantises in registers."""

    def __call__(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        return launch.fused_experts(x, logits, self, routing)[0]

    def add_to(self, x: Tensor, logits: Tensor, routing: Routing, rows: Tensor) -> Residual:
        rows, squares = launch.fused_experts(x, logits, self, routing, rows)
        return Residual(rows, squares=squares)
