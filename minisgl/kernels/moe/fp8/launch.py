"""A mixture of experts in FP8, in the two ways of the folder above.

The inputs of both products are rounded to e4m3. With many rows a launch before each GEMM does it,
and the GEMM multiplies on FP8 tensor cores. With few rows there are two launches as in bfloat16: a
program of either reads whole rows anyway, and rounds them itself. The first one multiplies on
tensor cores; the second, which holds its weights in registers, multiplies the same numbers in
float32.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.moe.fp8.config import choose_tiles
from minisgl.kernels.moe.fp8.few_rows import few_rows_experts
from minisgl.kernels.moe.fp8.many_rows import many_rows_experts
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.moe.routing import place_for_sum
from minisgl.kernels.tuning import FewTiles, ManyTiles, tuning_of


def fused_experts(
    x: Tensor,
    logits: Tensor,
    experts: Fp8Experts,
    routing: Routing,
    residual: Tensor | None = None,
    *,
    tiles: FewTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As fused_experts of moe/launch.py, for experts whose inputs are rounded."""
    tensors = (x, logits, *experts.weights.values(), *(() if residual is None else (residual,)))
    assert all(tensor.is_contiguous() for tensor in tensors)
    if tiles is None:
        tiles = choose_tiles(len(x), experts, routing, tuning_of(x.device))
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    if isinstance(tiles, FewTiles):
        return few_rows_experts(x, logits, experts, routing, residual, tiles, pdl)
    return many_rows_experts(x, logits, experts, routing, residual, tiles, pdl)
