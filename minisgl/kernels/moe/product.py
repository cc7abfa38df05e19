"""The products of a layer's experts, whatever their weights are made of.

A format of weights is one subclass, as in linear/product.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.moe import reference
from minisgl.kernels.moe.reference import ExpertWeights, Routing
from minisgl.kernels.residual import Residual


class ExpertsProduct(ABC):
    """The weighted sum over each row's chosen experts e of down[e] · silu_mul(gate_up[e] · x).

    x: [num_rows, hidden_size] and the router's logits: [num_rows, num_experts], both contiguous and
    of the model's dtype.
    """

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that a checkpoint fills in place, by the names of the layer's parameters."""
        ...

    @abstractmethod
    def __call__(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        """Returns a new tensor like x."""
        ...

    def add_to(self, x: Tensor, logits: Tensor, routing: Routing, rows: Tensor) -> Residual:
        """The stream rows + self(...). May overwrite rows, which are like x."""
        return Residual(rows, delta=self(x, logits, routing))


class DenseExperts(ExpertsProduct):
    """Weights of the model's own dtype."""

    def __init__(self, experts: ExpertWeights) -> None:
        self.experts = experts

    @staticmethod
    def allocate(
        num_experts: int, hidden_size: int, size: int, *, dtype: torch.dtype
    ) -> DenseExperts:
        """Uninitialised weights, on torch's default device."""
        gate_up = torch.empty((num_experts, 2 * size, hidden_size), dtype=dtype)
        down = torch.empty((num_experts, hidden_size, size), dtype=dtype)
        return DenseExperts(ExpertWeights(gate_up, down))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {"gate_up_proj": self.experts.gate_up, "down_proj": self.experts.down}

    def __call__(self, x: Tensor, logits: Tensor, routing: Routing) -> Tensor:
        if runs_triton(x.device):
            from minisgl.kernels.moe import launch

            return launch.fused_experts(x, logits, self.experts, routing)[0]
        chosen, weights = reference.topk_softmax(logits, routing)
        return reference.fused_experts(x, self.experts, chosen, weights)

    def add_to(self, x: Tensor, logits: Tensor, routing: Routing, rows: Tensor) -> Residual:
        if runs_triton(x.device):
            from minisgl.kernels.moe import launch

            rows, squares = launch.fused_experts(x, logits, self.experts, routing, rows)
            return Residual(rows, squares=squares)
        return super().add_to(x, logits, routing, rows)
