"""Selects the product of a linear layer for the device of its weights, and shares among the
products of a model the memory that their kernels need."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear import dense
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import Fp8Product, Fp8Weights


def fp8_product(
    weight: Fp8Weights,
    bias: Tensor | None,
    *,
    activations: Activations,
    input_scale: Tensor | None = None,
) -> Fp8Product:
    """A product with FP8 weights; the arguments are those of Fp8Product."""
    kind = Fp8Product
    if activations != Activations.NONE and runs_triton(weight.data.device):
        from minisgl.kernels.linear.fp8.product import TensorCoreProduct

        kind = TensorCoreProduct
    return kind(weight, bias, activations=activations, input_scale=input_scale)


def share_kernels(products: Iterable[Product]) -> None:
    """Give these products, which run one at a time, their kernels and the memory of these."""
    products = list(products)
    dense.share_kernels(products)
    if runs_triton(next(iter(products[0].weights.values())).device):
        from minisgl.kernels.linear.fp8.product import share_kernels

        share_kernels(products)
