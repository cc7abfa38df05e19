"""Products that add what adapters do. A step without adapted rows runs the products behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.kernels.adapters import AdapterWeights
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import Fp8Product
from minisgl.kernels.lora.select_kernels import AdapterKernels
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual
from minisgl.kernels.rows import Rows
from minisgl.lora.adding import Adding, AddingDense

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class AdaptedProduct(Product):
    """y of another product, with B·A added to W for each row that has an adapter."""

    def __init__(self, base: Product, adapters: AdapterWeights, kernels: AdapterKernels) -> None:
        self.base, self._adapters, self._kernels = base, adapters, kernels
        self._adding = _kind_of(base)

    def of(self, rows: Rows | None) -> Product:
        """What multiplies these rows."""
        if rows is None or rows.adapted is None:
            return self.base
        return self._adding(self.base, self._adapters, rows.adapted, self._kernels)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    @property
    def plain(self) -> Product:
        return self.base

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.of(rows)(x, rows)

    def of_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.of(rows).of_norm(residual, weights, rows)

    def of_input_norm(self, x: Tensor, weights: NormWeights, rows: Rows | None = None) -> Tensor:
        return self.of(rows).of_input_norm(x, weights, rows)

    def of_kept_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.of(rows).of_kept_norm(residual, weights, rows)

    def gated_mul(self, gate_up: Tensor, rows: Rows | None = None, *, gelu: bool = False) -> Any:
        return self.of(rows).gated_mul(gate_up, rows, gelu=gelu)

    def gated_mul_of_norm(
        self,
        residual: Residual,
        weights: NormWeights,
        after: Product,
        rows: Rows | None = None,
        *,
        gelu: bool = False,
    ) -> tuple[Any, Tensor]:
        return self.of(rows).gated_mul_of_norm(residual, weights, after, rows, gelu=gelu)

    def gated_mul_of(
        self, x: Tensor, after: Product, rows: Rows | None = None, *, gelu: bool = False
    ) -> Any:
        return self.of(rows).gated_mul_of(x, after, rows, gelu=gelu)

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows | None = None) -> Residual:
        return self.of(rows).add_to(x, stream, rows)

    def send(self, x: Tensor, mailbox: Mailbox, rows: Rows | None = None) -> PendingNorm | None:
        return self.of(rows).send(x, mailbox, rows)

    def prepare(self, dtype: torch.dtype) -> None:
        self.base.prepare(dtype)


def _kind_of(base: Product) -> Callable[..., Product]:
    """What multiplies adapted rows in the place of a product."""
    if isinstance(base, DenseProduct):
        return AddingDense
    if isinstance(base, Fp8Product) and runs_triton(base.weight.data.device):
        from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct
        from minisgl.lora.adding_fp8 import AddingFp8

        if isinstance(base, TensorCoreProduct):
            return AddingFp8
    return Adding
