"""A mixture of experts in Triton. The references, and the rounding that is kept to, are those of
experts.py.

The time is that of reading the weights of the experts that any row has chosen, once; of many rows,
that of the products. Nothing here asks the host: which experts are read follows from what the
router has written. A row and one of its experts are a *pair*. There are two ways:

- *few* rows, of which two seldom share an expert (where they do, its weights come out of L2): two
  launches, each of which finds the chosen experts in the logits by itself. In the second, a program
  has some outputs of all the experts of one row. It asks for their weights before the first launch
  has ended, since the logits are older than that, holds them in registers, and adds everything up.
- *many* rows: one program for each expert lists its pairs. The grid of a product has a place for
  every expert, and several for its pairs; a program whose expert has none left returns at once. W
  is on the left, as in linear/launch.py, because an expert has few pairs. The second product leaves
  each pair's weighted share, and the last kernel adds up those of a row.

A row's sum does not depend on the other rows, but for the tiles that its experts are worked on in.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.moe.config import choose_tiles
from minisgl.kernels.moe.few_rows import few_rows_experts
from minisgl.kernels.moe.many_rows import many_rows_experts
from minisgl.kernels.moe.reference import ExpertWeights, Routing
from minisgl.kernels.moe.routing import place_for_sum
from minisgl.kernels.tuning import FewTiles, ManyTiles, tuning_of


def fused_experts(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: Tensor | None = None,
    *,
    tiles: FewTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum over each row's chosen experts, as fused_experts of reference.py.

    x and residual: [num_rows, hidden_size]; logits: [num_rows, num_experts]; all contiguous and of
    one dtype. Returns a new tensor like x, and None; or `residual`, to which the sum was added, and
    the squares [num_rows, any] float32 that a FusedNorm of it takes.

    Of equally likely experts the lower one comes first. A row whose probabilities are NaN still
    chooses existing experts, each once, so that no kernel leaves its tensors; its result is NaN.
    `pdl`: overlap launches where the device can, by the rule of launch.py.
    """
    tensors = (x, logits, *experts) if residual is None else (x, logits, *experts, residual)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if tiles is None:
        tiles = choose_tiles(len(x), experts, routing, tuning_of(x.device))
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    if isinstance(tiles, FewTiles):
        return few_rows_experts(x, logits, experts, routing, residual, tiles, pdl)
    return many_rows_experts(x, logits, experts, routing, residual, tiles, pdl)
