"""The product y = x Wᵀ + b that a linear layer owns, whatever W is made of.

A format of weights (quantised, with an adapter) is one subclass. It must implement `weights` and
`__call__`; the other methods have default bodies in terms of these, and are overridden where a
kernel computes several steps at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.kernels.dispatch import gated_mul, rms_norm
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual, norm
from minisgl.kernels.rows import Rows

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox


class Product(ABC):
    """x: [num_rows, k], of the model's dtype; y: [num_rows, n], the same.

    rows: what the step says of the rows of x; None: they are of none.
    """

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that a checkpoint fills in place, by their names in it: `weight`, `bias`."""
        ...

    @property
    def plain(self) -> Product:
        """The product without what adapters add."""
        return self

    @abstractmethod
    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Returns y, a new tensor."""
        ...

    def of_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns y for x the norm of the stream, and the stream as one tensor [num_rows, k]."""
        x, stream = norm(residual, weights)
        return self(x, rows), stream

    def of_input_norm(self, x: Tensor, weights: NormWeights, rows: Rows | None = None) -> Tensor:
        """Returns y for the norm of x, which is no stream: its rows may be parts of wider ones."""
        return self(rms_norm(x.contiguous(), weights.weight, weights.eps), rows)

    def of_kept_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, the norm of the stream, with y of it and the stream as one tensor."""
        x, stream = norm(residual, weights)
        return x, self(x, rows), stream

    def gated_mul(self, gate_up: Tensor, rows: Rows | None = None, *, gelu: bool = False) -> Any:
        """silu(gate) · up, or gelu(gate) · up, as an x of this product: a tensor, or whatever else
        this one takes.

        gate_up: [num_rows, 2 · k], the gates first.
        """
        return gated_mul(gate_up, gelu)

    def gated_mul_of_norm(
        self,
        residual: Residual,
        weights: NormWeights,
        after: Product,
        rows: Rows | None = None,
        *,
        gelu: bool = False,
    ) -> tuple[Any, Tensor]:
        """Returns `gated_mul` by the product `after` of y, whose first half is the gate, for x the
        norm of the stream: [num_rows, n / 2]. And the stream as one tensor."""
        y, stream = self.of_norm(residual, weights, rows)
        return after.gated_mul(y, rows, gelu=gelu), stream

    def gated_mul_of(
        self, x: Tensor, after: Product, rows: Rows | None = None, *, gelu: bool = False
    ) -> Any:
        """Returns `gated_mul` by the product `after` of y, whose first half is the gate."""
        return after.gated_mul(self(x, rows), rows, gelu=gelu)

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows | None = None) -> Residual:
        """The stream with y added. May overwrite it: [num_rows, n] contiguous."""
        return Residual(stream, delta=self(x, rows))

    def send(self, x: Tensor, mailbox: Mailbox, rows: Rows | None = None) -> PendingNorm | None:
        """Send y to all ranks as this one's summand, if there is a kernel that does; else None.

        Returns what adds up the summands of all ranks; no other exchange may come between.
        """
        return None

    def prepare(self, dtype: torch.dtype) -> None:  # noqa: B027 - most have nothing to do
        """Make what a kernel reads of the weights, once a checkpoint has filled them. dtype: of x.
        Must come before a graph is captured."""

    @property
    def can_refresh(self) -> bool:
        """Whether the weights can be filled again after `prepare`."""
        return True

    def refresh(self) -> None:  # noqa: B027 - likewise
        """Make again, in place, what `prepare` has made, of weights that were filled again."""
