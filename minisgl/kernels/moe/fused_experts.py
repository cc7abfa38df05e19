"""A mixture of experts in Triton, with the rounding of reference.py.

With few rows the time is that of reading the weights of all chosen experts once; with many rows it
is that of the GEMMs. The host knows nothing of the routing: the kernels read the router's logits. A
row and one of its experts are a *pair*. There are two ways:

- *few* rows (few_rows.py), of which two rarely share an expert (if they do, its weights come from
  L2): two launches, each of which finds the chosen experts in the logits itself, unless they are
  given. In the second a program computes some outputs of one row over all its experts. The logits
  are older than the first launch, so the second loads the weights into registers before the first
  has ended. In MXFP4 and NVFP4 both GEMMs have a program for each pair, and a last launch adds up
  those of a row.
- *many* rows (many_rows.py): one program for each expert lists its pairs. The grid of a GEMM has a
  column for every expert and several programs for its pairs; a program without pairs returns at
  once. W is the left operand, as in linear/dense_gemm.py, because an expert has few pairs. The
  second GEMM writes the weighted output of each pair, and a last kernel adds up those of a row.

A row's sum depends on the other rows only in the tiles that are chosen for their number.

What adapters add is added in the GEMMs of many rows, which a step with adapted rows takes however
few these are (pair_deltas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from minisgl.kernels.adapters import ExpertAdapters
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.experts_product import Adapted, ExpertsProduct
from minisgl.kernels.moe.few_rows import few_rows_experts
from minisgl.kernels.moe.fp8_experts import multiply_fp8
from minisgl.kernels.moe.int4_experts import multiply_int4
from minisgl.kernels.moe.many_rows import Listed, PairGemm, add_outputs, list_pairs, multiply_dense
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts
from minisgl.kernels.moe.mxfp4_experts import multiply_e2m1, multiply_pairs
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.kernels.moe.reference import ByRouter, Choice, ExpertWeights, rows_held
from minisgl.kernels.moe.routing import choose, place_for_sum
from minisgl.kernels.moe.shrink_pairs import shrink_pairs
from minisgl.kernels.tuning import FewTiles, ManyTiles, PairTiles, tuning_of

# (experts, gemm, choice, pairs) computes one of both products for listed pairs.
_MULTIPLY: Mapping[type, Callable[..., None]] = {
    ExpertWeights: multiply_dense,
    Fp8Experts: multiply_fp8,
    Int4Experts: multiply_int4,
    Mxfp4Experts: multiply_e2m1,
    Nvfp4Experts: multiply_e2m1,
}


def fused_experts(
    x: Tensor,
    choice: Choice,
    experts: ExpertWeights | ExpertsProduct,
    residual: Tensor | None = None,
    *,
    adapted: Adapted | None = None,
    tiles: FewTiles | PairTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum over each row's chosen experts, as fused_experts of reference.py.

    x and residual: [num_rows, hidden_size]; all contiguous and of one dtype. Returns a new tensor
    like x, and None; or `residual`, to which the sum was added, and the squares [num_rows, any]
    float32 that a FusedNorm of it takes. adapted: what adapters add to both products, and which
    adapter each row has, [num_rows] int32; 0: none.

    Of equally likely experts the lower one comes first. A row whose probabilities are NaN still
    chooses existing experts, each once, so that no kernel leaves its tensors; its result is NaN.
    `pdl`: see launch_options.py.
    """
    weights = experts.tensors if isinstance(experts, ExpertWeights) else experts.weights.values()
    tensors = (x, residual, *weights, *choice)
    assert all(part.is_contiguous() for part in tensors if isinstance(part, Tensor))
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    num_held, num_outputs, _ = next(iter(weights)).shape  # of the gates and ups
    if tiles is None:
        num_rows = rows_held(len(x), choice, num_held)
        tuning, listed = tuning_of(x.device), adapted is not None
        tiles = choose_tiles(num_rows, experts, choice.top_k, x.dtype, tuning, listed=listed)
    if isinstance(tiles, FewTiles):
        assert isinstance(experts, ExpertWeights) and adapted is None
        return few_rows_experts(x, choice, experts, residual, tiles, pdl)
    multiply: Callable[[PairGemm], None]
    if isinstance(tiles, PairTiles):
        assert isinstance(experts, Mxfp4Experts | Nvfp4Experts)
        if not isinstance(choice, ByRouter) or choice.scales is not None:
            choice = choose(choice, pdl=pdl)
        multiply = partial(multiply_pairs, experts, choice)
    else:
        choice = choose(choice, pdl=pdl)
        chosen, pair_weights, _ = choice
        pairs = Listed(*list_pairs(chosen, num_held, pdl=pdl), pair_weights, len(chosen))
        multiply = partial(_MULTIPLY[type(experts)], experts, choice, pairs)
        if adapted is not None:
            multiply = partial(_multiply_adapted, multiply, pairs, *adapted)
    num_pairs = len(x) * choice.top_k
    inner = x.new_empty((num_pairs, num_outputs // 2))
    outputs = x.new_empty((num_pairs, x.shape[1]))
    multiply(PairGemm(x, inner, tiles.inner, True, pdl))
    multiply(PairGemm(inner, outputs, tiles.outer, False, pdl))
    return add_outputs(outputs, x, residual, choice, pdl=pdl)


def _multiply_adapted(
    multiply: Callable[[PairGemm], None],
    pairs: Listed,
    weights: ExpertAdapters,
    adapters: Tensor,
    gemm: PairGemm,
) -> None:
    of_product = weights.gate_up if gemm.gated else weights.down
    multiply(gemm._replace(delta=shrink_pairs(gemm, pairs, of_product, adapters)))
