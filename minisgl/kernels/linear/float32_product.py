"""A product of half-precision numbers that is computed and kept in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.rows import Rows


class Float32Product(Product):
    """y in float32, of a dense product's weights, which stay as they are: float32 holds the product
    of two half-precision numbers exactly, so only the sums are rounded."""

    def __init__(self, product: DenseProduct) -> None:
        self.product = product

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.product.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        weight, bias = self.product.weight, self.product.bias
        if not x.is_cuda:  # where torch has no product that is wider than its operands
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)
