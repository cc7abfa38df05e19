"""A mixture of experts in FP8: the inputs of both products are rounded to e4m3, in a launch before
each GEMM, which multiplies on FP8 tensor cores."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.moe.fp8.config import choose_tiles
from minisgl.kernels.moe.fp8.many_rows import many_rows_experts
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.moe.routing import place_for_sum
from minisgl.kernels.tuning import ManyTiles, tuning_of


def fused_experts(
    x: Tensor,
    logits: Tensor,
    experts: Fp8Experts,
    routing: Routing,
    residual: Tensor | None = None,
    *,
    tiles: ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As fused_experts of moe/launch.py, for experts whose inputs are rounded."""
    tensors = (x, logits, *experts.weights.values(), *(() if residual is None else (residual,)))
    assert all(tensor.is_contiguous() for tensor in tensors)
    if tiles is None:
        tiles = choose_tiles(len(x), experts, routing, tuning_of(x.device))
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    return many_rows_experts(x, logits, experts, routing, residual, tiles, pdl)
