"""Selects the product of a linear layer for the device of its weights, and shares among the
products of a model the memory that their kernels need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear import dense_product
from minisgl.kernels.linear.nvfp4 import Nvfp4Product, Nvfp4Weights
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import (
    Fp8Product,
    Fp8Weights,
    Int4Product,
    Int4Weights,
    QuantizedProduct,
)
from minisgl.kernels.linear.weight_only import weight_only_product


def fp8_product(
    weight: Fp8Weights,
    bias: Tensor | None,
    *,
    activations: Activations,
    input_scale: Tensor | None = None,
) -> QuantizedProduct:
    """A product with FP8 weights; the arguments are those of Fp8Product."""
    if not runs_triton(weight.data.device):
        return Fp8Product(weight, bias, activations=activations, input_scale=input_scale)
    if activations == Activations.NONE:
        return weight_only_product.WeightOnlyFp8Product(weight, bias)
    from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct

    return TensorCoreProduct(weight, bias, activations=activations, input_scale=input_scale)


def int4_product(weight: Int4Weights, bias: Tensor | None) -> QuantizedProduct:
    """A product with INT4 weights; the arguments are those of Int4Product."""
    if not runs_triton(weight.data.device):
        return Int4Product(weight, bias)
    return weight_only_product.WeightOnlyInt4Product(weight, bias)


def nvfp4_product(weight: Nvfp4Weights, bias: Tensor | None) -> QuantizedProduct:
    """A product with NVFP4 weights; the arguments are those of Nvfp4Product."""
    if not runs_triton(weight.data.device):
        return Nvfp4Product(weight, bias)
    return weight_only_product.WeightOnlyNvfp4Product(weight, bias)


def share_kernels(products: Sequence[Product], dtype: torch.dtype, device: torch.device) -> None:
    """Give these products, which run one at a time, their kernels and the memory of these.

    dtype: of x.
    """
    dense_product.share_kernels(products)
    if runs_triton(device):
        from minisgl.kernels.linear.fp8 import fp8_product

        fp8_product.share_kernels(products)
        weight_only_product.share_kernels(products, dtype, device)


def dense_copy_bytes(products: Sequence[Product], dtype: torch.dtype) -> int:
    """The memory of the dense copies that `prepare` can make: 0 if no product takes one here."""
    return weight_only_product.dense_copy_elements(products) * dtype.itemsize


def prepare(products: Sequence[Product], dtype: torch.dtype, *, dense_copies: bool = False) -> None:
    """Make what the kernels read of the weights that a checkpoint has filled, and choose GEMMs by
    trying. Must come before anything is captured.

    dense_copies: keep weights that are quantised, and whose x is not, in x's dtype, too, for many
    rows.
    """
    for product in products:
        product.prepare(dtype)
    if dense_copies and (copies := weight_only_product.keep_dense_copies(products, dtype)):
        dense_product.share_kernels([*products, *copies])
    dense_product.tune(products)  # not the copies: it tunes for fewer rows than these are for
