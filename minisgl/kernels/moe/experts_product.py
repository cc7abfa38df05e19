"""The products of a layer's experts, whatever their weights are made of.

A format of weights is one subclass, as in linear/product.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from minisgl.kernels.moe.reference import Choice
from minisgl.kernels.residual import Residual


class ExpertsProduct(ABC):
    """The weighted sum over each row's chosen experts e of down[e] · gated_mul(gate_up[e] · x).

    x: [num_rows, hidden_size]; it and the tensors of a choice are contiguous, and of the model's
    dtype.
    """

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that a checkpoint fills in place, by the names of the layer's parameters."""
        ...

    @abstractmethod
    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        """Returns a new tensor like x."""
        ...

    def add_to(self, x: Tensor, choice: Choice, rows: Tensor) -> Residual:
        """The stream rows + self(...). May overwrite rows, which are like x."""
        return Residual(rows, delta=self(x, choice))


class OneFunction(ExpertsProduct):
    """Mixed into experts whose result one function computes, alone or added to the stream."""

    # (x, choice, self, rows or None) → as fused_experts of moe/fused_experts.py.
    fused: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]]

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        return self.fused(x, choice, self)[0]

    def add_to(self, x: Tensor, choice: Choice, rows: Tensor) -> Residual:
        """As in ExpertsProduct."""
        rows, squares = self.fused(x, choice, self, rows)
        return Residual(rows, squares=squares)
