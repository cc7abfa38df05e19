"""A product whose bits do not depend on how many rows there are (--batch-invariant)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import Epilogue
from minisgl.kernels.linear.product import Product
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import DeviceTuning, fitting_stages, tuning_of

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.linear.tiles import LinearTiles

BLOCK_K = 64  # elements of k in a tile


class InvariantProduct(Product):
    """y of a dense product's weights, which stay as they are, by one GEMM of ours for any number of
    rows. Nothing is fused into it, and k is not split: a sum is over tiles of BLOCK_K in their
    order. Rows take tiles of three sizes, of which that of k is the same."""

    def __init__(self, product: DenseProduct, dtype: torch.dtype | None = None) -> None:
        """dtype: of y, if it is not that of x."""
        self._product, self._epilogue = product, Epilogue(dtype=dtype)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._product.weights

    @property
    def plain(self) -> Product:
        return self._product

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        from minisgl.kernels.linear.dense_gemm import linear

        tiles = tiles_of(len(x), tuning_of(x.device))
        weight, bias = self._product.weight, self._product.bias
        return linear(x, weight, bias, epilogue=self._epilogue, tiles=tiles)


def tiles_of(num_rows: int, tuning: DeviceTuning) -> LinearTiles:
    """Those of half precision: of 64 rows of W or more, for which tensor cores have one way to
    multiply."""
    from minisgl.kernels.linear.tiles import LinearTiles

    block_n, block_m, num_warps, most_stages = 128, 128, 8, 4
    if num_rows <= 64:  # W is all there is to read
        block_n, block_m, num_warps, most_stages = 64, 16 if num_rows <= 16 else 64, 4, 8
    stage_bytes = (block_n + block_m) * BLOCK_K * 2
    num_stages = fitting_stages(most_stages, stage_bytes, tuning.shared_bytes)
    return LinearTiles(block_n, block_m, BLOCK_K, num_warps=num_warps, num_stages=num_stages)
