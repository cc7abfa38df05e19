"""The products of a layer's experts, whatever their weights are made of: a subclass for each format
of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.moe.reference import Choice, ExpertWeights
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows


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

    def weighted_sum(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        """The sum: a new tensor like x. rows: as of Product."""
        if not self.has_kernels(x.device):
            return self.reference(x, choice)
        return self._fused(x, choice)[0]

    def add_to(
        self, x: Tensor, choice: Choice, stream: Tensor, rows: Rows | None = None
    ) -> Residual:
        """The stream, which is like x, with the sum added. May overwrite it."""
        if not self.has_kernels(x.device):
            return Residual(stream, delta=self.reference(x, choice))
        stream, squares = self._fused(x, choice, stream)
        return Residual(stream, squares=squares)

    @property
    def of_kernels(self) -> ExpertWeights | ExpertsProduct:
        """What the kernels take."""
        return self

    def _fused(
        self, x: Tensor, choice: Choice, stream: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        from minisgl.kernels.moe.fused_experts import fused_experts

        return fused_experts(x, choice, self.of_kernels, stream)

    def has_kernels(self, device: torch.device) -> bool:
        """Whether kernels compute the sum on this device."""
        return runs_triton(device)
