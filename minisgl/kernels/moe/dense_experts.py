"""Experts with weights of the model's own dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.reference import Clamped, Expert, ExpertBiases, ExpertWeights, expert_of


class DenseExperts(ExpertsProduct):
    def __init__(self, experts: ExpertWeights) -> None:
        self.experts = experts

    @staticmethod
    def allocate(
        num_experts: int,
        hidden_size: int,
        size: int,
        *,
        dtype: torch.dtype,
        bias: bool = False,
        clamped: Clamped | None = None,
        gelu: bool = False,
    ) -> DenseExperts:
        """Uninitialised weights, on torch's default device."""
        gate_up = torch.empty((num_experts, 2 * size, hidden_size), dtype=dtype)
        down = torch.empty((num_experts, hidden_size, size), dtype=dtype)
        biases = ExpertBiases.allocate(num_experts, hidden_size, size, dtype) if bias else None
        return DenseExperts(ExpertWeights(gate_up, down, biases, clamped, gelu))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        named = {"gate_up_proj": self.experts.gate_up, "down_proj": self.experts.down}
        return named if self.experts.biases is None else named | self.experts.biases.named

    def expert(self, index: int) -> Expert:
        return expert_of(self.experts, index)
