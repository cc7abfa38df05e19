"""Products whose GEMM does the steps around it, too, where that is faster."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minisgl.kernels.linear.epilogue import GATED, PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual, norm

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class FusingProduct(Product):
    """A subclass says with `fuses` when its `gemm` is taken."""

    bias: Tensor | None

    @abstractmethod
    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        """Whether `gemm` is faster than separate steps, with the activation of a gated MLP or a
        norm before, or else with any other epilogue."""
        ...

    @abstractmethod
    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        """What the epilogue makes of y, or of the y of x's norm."""
        ...

    def separate(self, x: Tensor) -> Tensor:
        """y for so many rows that `gemm` does not add it to the stream."""
        return self(x)

    def of_norm(self, residual: Residual, weights: NormWeights) -> tuple[Tensor, Tensor]:
        rows, squares = residual.rows, residual.squares
        if squares is None or not self.fuses(rows.shape[0], normed=True):
            return super().of_norm(residual, weights)
        return self.gemm(rows, norm=FusedNorm(weights.weight, weights.eps, squares)), rows

    def gated_mul_of_norm(
        self, residual: Residual, weights: NormWeights, after: Product, *, gelu: bool = False
    ) -> tuple[Any, Tensor]:
        rows, squares = residual.rows, residual.squares
        if self.bias is not None or not self.fuses(rows.shape[0], gated=True):
            return super().gated_mul_of_norm(residual, weights, after, gelu=gelu)
        if squares is not None and self.fuses(rows.shape[0], gated=True, normed=True):
            fused = FusedNorm(weights.weight, weights.eps, squares)
            return self.gemm(rows, GATED._replace(gelu=gelu), norm=fused), rows
        x, rows = norm(residual, weights)
        return self.gemm(x, GATED._replace(gelu=gelu)), rows

    def gated_mul_of(self, x: Tensor, after: Product, *, gelu: bool = False) -> Any:
        if self.bias is not None or not self.fuses(x.shape[0], gated=True):
            return super().gated_mul_of(x, after, gelu=gelu)
        return self.gemm(x, GATED._replace(gelu=gelu))

    def add_to(self, x: Tensor, rows: Tensor) -> Residual:
        if not self.fuses(x.shape[0]):
            return Residual(rows, delta=self.separate(x))
        return Residual(rows, squares=self.gemm(x, Epilogue(residual=rows)))

    def send(self, x: Tensor, mailbox: Mailbox) -> PendingNorm | None:
        if not self.fuses(x.shape[0]):
            return None
        from minisgl.kernels.comm import one_shot

        self.gemm(x, Epilogue(mailbox=mailbox))
        return partial(one_shot.received_norm, mailbox=mailbox)
