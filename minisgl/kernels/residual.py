"""The residual stream between the blocks of a model, and its RMS norm."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from minisgl.kernels.dispatch import add_rms_norm, rms_norm


class NormWeights(Protocol):
    """The parameters of an RMS norm."""

    @property
    def weight(self) -> Tensor:
        """[size], of the dtype of the rows or float32."""
        ...

    @property
    def eps(self) -> float: ...


class PendingNorm(Protocol):
    """What takes the place of add_rms_norm of `rows` and a delta: that of the ranks' summands, with
    an all-reduce that is still to be done, or that of a result with a norm of its own."""

    def __call__(self, rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class Residual(NamedTuple):
    """The residual stream: the sum of `rows` and `delta`, or of `rows` and what is `pending`.

    A block that adds to it may overwrite `rows`, or leave the addition to the next norm.
    """

    rows: Tensor  # [num_rows, size]
    delta: Tensor | None = None  # [num_rows, size], of the dtype of rows
    # [num_rows, any] float32, only without a delta: partial sums of the squares of `rows`, from
    # which the next GEMM computes the norm itself.
    squares: Tensor | None = None
    pending: PendingNorm | None = None  # in the place of a delta


def joined(residual: Residual, weights: NormWeights) -> Tensor:
    """The stream as one tensor: [num_rows, size], of any memory layout but its own.

    weights: of any norm of this size, which is computed only where it comes with the sum.
    """
    if residual.delta is None and residual.pending is None:
        return residual.rows
    _, rows = norm(residual, weights)
    return rows


def norm(residual: Residual, weights: NormWeights) -> tuple[Tensor, Tensor]:
    """The RMS norm of the stream, and the stream as one tensor: both [num_rows, size]."""
    rows, delta = residual.rows, residual.delta
    if residual.pending is not None:
        return residual.pending(rows, weights.weight, weights.eps)
    if delta is None:
        return rms_norm(rows, weights.weight, weights.eps), rows
    return add_rms_norm(delta, rows, weights.weight, weights.eps)
