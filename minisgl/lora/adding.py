"""The products of the rows of one step, some of which have adapters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.fusing_product import FusingProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.lora.select_kernels import AdapterKernels
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
        y = self.base(x, rows)
        self._kernels.expand(y, delta)
        return y


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

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.gemm(x) if self.fuses(len(x)) else super().__call__(x, rows)

    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        return not normed and self._dense.adds(num_rows, gated=gated)  # shrink takes the norm, too

    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        assert norm is None
        return self._dense.gemm(x, epilogue._replace(delta=self.delta(x)))
