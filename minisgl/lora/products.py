"""Products that add what adapters do. A step without adapted rows runs the products behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.fusing_product import FusingProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.lora.select_kernels import AdapterKernels
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual
from minisgl.kernels.rows import Rows

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class AdaptedProduct(Product):
    """y of another product, with B·A added to W for each row that has an adapter."""

    def __init__(self, base: Product, adapters: AdapterWeights, kernels: AdapterKernels) -> None:
        self.base, self.adapters, self._kernels = base, adapters, kernels

    def of(self, rows: Rows | None) -> Product:
        """What multiplies these rows."""
        if rows is None or rows.adapted is None:
            return self.base
        if isinstance(self.base, DenseProduct):
            return _AddingGemm(self.base, self.adapters, rows.adapted, self._kernels)
        return _Adding(self.base, self.adapters, rows.adapted, self._kernels)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

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


class _Adding(Product):
    """The product of the adapted rows of one step. The other methods are the defaults, so that x is
    a tensor, also where the base would take rounded rows of a norm or an activation."""

    def __init__(
        self, base: Product, adapters: AdapterWeights, rows: AdaptedRows, kernels: AdapterKernels
    ) -> None:
        self.base, self._adapters, self._rows, self._kernels = base, adapters, rows, kernels

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    def _delta(self, x: Tensor) -> Delta:
        return self._kernels.shrink(x, self._adapters, self._rows)

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        y = self.base(x, rows)
        self._kernels.expand(y, self._delta(x))
        return y


class _AddingGemm(_Adding, FusingProduct):
    """The same where a GEMM of ours may add to its sums what the adapters do."""

    def __init__(
        self,
        base: DenseProduct,
        adapters: AdapterWeights,
        rows: AdaptedRows,
        kernels: AdapterKernels,
    ) -> None:
        super().__init__(base, adapters, rows, kernels)
        self.dense, self.bias = base, base.bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.gemm(x) if self.fuses(len(x)) else super().__call__(x, rows)

    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        return not normed and self.dense.fuses(num_rows, gated=gated)  # x is shrunk, too

    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        assert norm is None
        return self.dense.gemm(x, epilogue._replace(delta=self._delta(x)))
