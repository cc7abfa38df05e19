"""Products whose GEMM does the steps around it, too, where that is faster."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minisgl.kernels.linear.epilogue import GATED, PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual, norm
from minisgl.kernels.rows import Rows

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

    def of_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        stream, squares = residual.rows, residual.squares
        if squares is None or not self.fuses(stream.shape[0], normed=True):
            return super().of_norm(residual, weights, rows)
        return self.gemm(stream, norm=FusedNorm(weights.weight, weights.eps, squares)), stream

    def gated_mul_of_norm(
        self,
        residual: Residual,
        weights: NormWeights,
        after: Product,
        rows: Rows | None = None,
        *,
        gelu: bool = False,
    ) -> tuple[Any, Tensor]:
        stream, squares = residual.rows, residual.squares
        if self.bias is not None or not self.fuses(stream.shape[0], gated=True):
            return super().gated_mul_of_norm(residual, weights, after, rows, gelu=gelu)
        if squares is not None and self.fuses(stream.shape[0], gated=True, normed=True):
            fused = FusedNorm(weights.weight, weights.eps, squares)
            return self.gemm(stream, GATED._replace(gelu=gelu), norm=fused), stream
        x, stream = norm(residual, weights)
        return self.gemm(x, GATED._replace(gelu=gelu)), stream

    def gated_mul_of(
        self, x: Tensor, after: Product, rows: Rows | None = None, *, gelu: bool = False
    ) -> Any:
        if self.bias is not None or not self.fuses(x.shape[0], gated=True):
            return super().gated_mul_of(x, after, rows, gelu=gelu)
        return self.gemm(x, GATED._replace(gelu=gelu))

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows | None = None) -> Residual:
        if not self.fuses(x.shape[0]):
            return Residual(stream, delta=self.separate(x))
        return Residual(stream, squares=self.gemm(x, Epilogue(residual=stream)))

    def send(self, x: Tensor, mailbox: Mailbox, rows: Rows | None = None) -> PendingNorm | None:
        if not self.fuses(x.shape[0]):
            return None
        from minisgl.kernels.comm import one_shot

        self.gemm(x, Epilogue(mailbox=mailbox))
        return partial(one_shot.received_norm, mailbox=mailbox)
