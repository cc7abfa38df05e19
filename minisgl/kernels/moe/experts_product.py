"""The products of a layer's experts, whatever their weights are made of: a subclass for each format
of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
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
        """The tensors that a checkpoint fills in place, by the names of the layer's parameters; the
        first is that of all gates and ups."""
        ...

    @abstractmethod
    def reference(self, x: Tensor, choice: Choice) -> Tensor:
        """The sum without kernels: a new tensor like x."""
        ...

    def has_kernels(self, device: torch.device) -> bool:
        """Whether kernels compute the sum on this device."""
        return runs_triton(device)

    def fused(
        self, x: Tensor, choice: Choice, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum by kernels: see fused_experts of moe/fused_experts.py."""
        from minisgl.kernels.moe.fused_experts import fused_experts

        return fused_experts(x, choice, self, residual)

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        """Returns a new tensor like x."""
        return self.fused(x, choice)[0] if self.has_kernels(x.device) else self.reference(x, choice)

    def add_to(self, x: Tensor, choice: Choice, rows: Tensor) -> Residual:
        """The stream rows + self(...). May overwrite rows, which are like x."""
        if not self.has_kernels(x.device):
            return Residual(rows, delta=self.reference(x, choice))
        rows, squares = self.fused(x, choice, rows)
        return Residual(rows, squares=squares)
