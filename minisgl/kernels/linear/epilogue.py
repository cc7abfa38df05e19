"""What a GEMM of ours does besides multiplying: before, to its rows, and after, to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.adapters import Delta

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class FusedNorm(NamedTuple):
    """The RMS norm of x that a kernel applies itself, as rms_norm of reference.py."""

    weight: Tensor  # [k], of x's dtype
    eps: float
    # [m, any] float32, contiguous; each row sums up to that of the squares of x. None: the kernel
    # sums them up, in every program, as only dense_gemm.linear does.
    squares: Tensor | None


class Epilogue(NamedTuple):
    """What becomes of y = x Wᵀ + b [m, n], rounded to the dtype of x: one of these at most,
    and a delta. Without any, y is a new tensor."""

    # silu(gate) · up, a new tensor [m, n / 2]: W has the rows of the gate first, and there is no b.
    gated: bool = False
    gelu: bool = False  # if gated: gelu(gate) · up, as gated_mul of reference.py
    # [m, n] contiguous: y is added to it in place. What is returned are the squares [m, any]
    # float32 that a FusedNorm of the sum takes.
    residual: Tensor | None = None
    # y is sent to rows 0 to m - 1 of all ranks' inboxes, whose rows have n elements, and what is
    # returned is empty. one_shot.received_norm adds up the summands of all ranks.
    mailbox: Mailbox | None = None
    # Before any of these it is added to y, in float32.
    delta: Delta | None = None
    dtype: torch.dtype | None = None  # of a new tensor without any of these; None: that of x

    def place(self, x: Tensor, n: int, blocks: int) -> tuple[Tensor, Tensor | None]:
        """Where a GEMM writes a result with n columns, and where the squares of a sum, for each of
        its blocks of columns."""
        m, residual, mailbox = len(x), self.residual, self.mailbox
        if residual is not None:
            assert residual.is_contiguous() and residual.shape == (m, n)
            return residual, x.new_empty((m, blocks), dtype=torch.float32)
        if mailbox is None:
            return x.new_empty((m, n), dtype=self.dtype), None
        out = x.new_empty((0, n))
        assert m <= mailbox.max_rows and mailbox.takes(out)
        return out, None


PLAIN, GATED = Epilogue(), Epilogue(gated=True)
