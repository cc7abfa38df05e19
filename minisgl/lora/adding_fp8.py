"""Rows with adapters, and weights for FP8 tensor cores."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct
from minisgl.kernels.lora.select_kernels import AdapterKernels
from minisgl.kernels.residual import PendingNorm
from minisgl.kernels.rows import Rows
from minisgl.lora.adding import Adding

if TYPE_CHECKING:
    from minisgl.kernels.comm.mailbox import Mailbox


class AddingFp8(Adding):
    """Rounds x for the base, and adds in our GEMM where that is taken."""

    def __init__(
        self,
        base: TensorCoreProduct,
        adapters: AdapterWeights,
        rows: AdaptedRows,
        kernels: AdapterKernels,
    ) -> None:
        super().__init__(base, adapters, rows, kernels)
        self._fp8 = base

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self._gemm(x) if self._fp8.fuses(len(x)) else super().__call__(x, rows)

    def add(self, x: Tensor, delta: Delta, rows: Rows | None) -> Tensor:
        if not self._fp8.fuses(len(x)):
            return super().add(x, delta, rows)
        return self._fp8.gemm(self._fp8.rounded_rows(x), delta=delta)

    def send(self, x: Tensor, mailbox: Mailbox, rows: Rows | None = None) -> PendingNorm | None:
        if not self._fp8.fuses(len(x)):
            return None
        from minisgl.kernels.comm import one_shot

        self._gemm(x, mailbox)
        return partial(one_shot.received_norm, mailbox=mailbox)

    def _gemm(self, x: Tensor, mailbox: Mailbox | None = None) -> Tensor:
        rounded = self._fp8.rounded_rows(x)  # first: W is fetched while the shrink runs
        return self._fp8.gemm(rounded, mailbox=mailbox, delta=self.delta(x))
