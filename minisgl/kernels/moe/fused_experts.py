"""A mixture of experts in Triton, with the rounding of reference.py.

With few rows the time is that of reading the weights of all chosen experts once; with many rows it
is that of the GEMMs. The host knows nothing of the routing: the kernels read the router's logits. A
row and one of its experts are a *pair*. There are two ways:

- *few* rows (few_rows.py), of which two rarely share an expert (if they do, its weights come from
  L2): two launches, each of which finds the chosen experts in the logits itself, unless they are
  given. In the second a
  program computes some outputs of one row over all its experts. The logits are older than the first
  launch, so the second loads the weights into registers before the first has ended.
- *many* rows (many_rows.py): one program for each expert lists its pairs. The grid of a GEMM has a
  column for every expert and several programs for its pairs; a program without pairs returns at
  once. W is the left operand, as in linear/dense_gemm.py, because an expert has few pairs. The
  second GEMM writes the weighted output of each pair, and a last kernel adds up those of a row.

A row's sum depends on the other rows only in the tiles that are chosen for their number.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.few_rows import few_rows_experts
from minisgl.kernels.moe.many_rows import many_rows_experts, multiply_dense
from minisgl.kernels.moe.reference import Choice, ExpertWeights, rows_held
from minisgl.kernels.moe.routing import place_for_sum
from minisgl.kernels.tuning import FewTiles, ManyTiles, tuning_of


def fused_experts(
    x: Tensor,
    choice: Choice,
    experts: ExpertWeights,
    residual: Tensor | None = None,
    *,
    tiles: FewTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum over each row's chosen experts, as fused_experts of reference.py.

    x and residual: [num_rows, hidden_size]; all contiguous and of one dtype. Returns a new tensor
    like x, and None; or `residual`, to which the sum was added, and the squares [num_rows, any]
    float32 that a FusedNorm of it takes.

    Of equally likely experts the lower one comes first. A row whose probabilities are NaN still
    chooses existing experts, each once, so that no kernel leaves its tensors; its result is NaN.
    `pdl`: overlap launches where the device can, by the rule of launch_options.py.
    """
    tensors = (x, *experts.tensors, *(() if residual is None else (residual,)))
    assert all(tensor.is_contiguous() for tensor in tensors)
    if tiles is None:
        num_rows = rows_held(len(x), choice, len(experts.down))
        tiles = choose_tiles(num_rows, experts, choice.top_k, tuning_of(x.device))
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    if isinstance(tiles, FewTiles):
        return few_rows_experts(x, choice, experts, residual, tiles, pdl)
    num_experts, _, size = experts.down.shape
    multiply = partial(multiply_dense, experts)
    return many_rows_experts(x, choice, num_experts, size, residual, multiply, tiles, pdl)
