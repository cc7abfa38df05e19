"""The products of the rows of one step, some of which have adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import GATED, PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.fusing_product import FusingProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.lora.select_kernels import AdapterKernels
from minisgl.kernels.residual import NormWeights, Residual
from minisgl.kernels.rows import Rows


class Adding(Product):
    """Adds to y of the base. The other methods are the defaults, so that x is a tensor, also where
    the base would take rounded rows of a norm or an activation."""

    def __init__(
        self, base: Product, adapters: AdapterWeights, rows: AdaptedRows, kernels: AdapterKernels
    ) -> None:
        self.base, self._adapters, self._rows, self._kernels = base, adapters, rows, kernels

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    def delta(self, x: Tensor) -> Delta:
        return self._kernels.shrink(x, self._adapters, self._rows)

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        delta = self.delta(x)  # first, so that it reads A while the kernel before still runs
        return self.add(x, delta, rows)

    def add(self, x: Tensor, delta: Delta, rows: Rows | None) -> Tensor:
        """y of the base, with the delta."""
        y = self.base(x, rows)
        self._kernels.expand(y, delta)
        return y

    def normed(self, residual: Residual, weights: NormWeights) -> tuple[Tensor, Delta] | None:
        """The norm of a stream with squares and its delta, in one launch; None without squares."""
        if residual.squares is None:
            return None
        norm = FusedNorm(weights.weight, weights.eps, residual.squares)
        return self._kernels.shrink_norm(residual.rows, norm, self._adapters, self._rows)

    def of_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        _, y, stream = self.of_kept_norm(residual, weights, rows)
        return y, stream

    def of_kept_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.normed(residual, weights)
        if normed is None:
            return super().of_kept_norm(residual, weights, rows)
        return normed[0], self.add(*normed, rows), residual.rows


class AddingDense(Adding, FusingProduct):
    """The same where our GEMM of unquantised weights may add to its sums."""

    def __init__(
        self,
        base: DenseProduct,
        adapters: AdapterWeights,
        rows: AdaptedRows,
        kernels: AdapterKernels,
    ) -> None:
        super().__init__(base, adapters, rows, kernels)
        self._dense, self.bias = base, base.bias

    def add(self, x: Tensor, delta: Delta, rows: Rows | None) -> Tensor:
        if not self.fuses(len(x)):
            return super().add(x, delta, rows)
        return self._dense.gemm(x, Epilogue(delta=delta))

    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        return not normed and self._dense.adds(num_rows, gated=gated)  # the shrink norms

    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        assert norm is None
        return self._dense.gemm(x, epilogue._replace(delta=self.delta(x)))

    def gated_mul_of_norm(
        self,
        residual: Residual,
        weights: NormWeights,
        after: Product,
        rows: Rows | None = None,
        *,
        gelu: bool = False,
    ) -> tuple[Any, Tensor]:
        if self.bias is None and self.fuses(len(residual.rows), gated=True):
            normed = self.normed(residual, weights)
            if normed is not None:
                x, delta = normed
                gated = GATED._replace(gelu=gelu, delta=delta)
                return self._dense.gemm(x, gated), residual.rows
        return super().gated_mul_of_norm(residual, weights, after, rows, gelu=gelu)
