"""The products of a layer's experts with quantised weights, by the arithmetic of
linear/quantized.py: the inputs of both products are rounded, as those of any FP8 product."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.elementwise.reference import gated_mul
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import (
    Fp8Product,
    Fp8Weights,
    Int4Product,
    Int4Weights,
)
from minisgl.kernels.moe import reference
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.reference import Choice
from minisgl.kernels.rows import Rows


class InputScales(NamedTuple):
    """Of STATIC activations, one float32 number for each expert: [num_experts]."""

    gate_up: Tensor
    down: Tensor


class QuantizedExperts(ExpertsProduct):
    """Experts whose matrices are products of one expert each, on any device. `gelu`: as in
    ExpertWeights."""

    gelu: bool

    @abstractmethod
    def gate_up_of(self, expert: int) -> Product:
        """[num_rows, hidden_size] → [num_rows, 2 · size], the gates first."""
        ...

    @abstractmethod
    def down_of(self, expert: int) -> Product:
        """[num_rows, size] → [num_rows, hidden_size]."""
        ...

    def reference(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        def output(expert: int, rows: Tensor) -> Tensor:
            return self.down_of(expert)(gated_mul(self.gate_up_of(expert)(rows), self.gelu))

        return reference.weighted_sum(x, output, choice)


class Fp8Experts(QuantizedExperts):
    """Experts in FP8, and their inputs rounded as `activations` says."""

    def __init__(
        self,
        gate_up: Fp8Weights,
        down: Fp8Weights,
        *,
        activations: Activations,
        input_scales: InputScales | None = None,
        gelu: bool = False,
    ) -> None:
        """gate_up: [num_experts, 2 · size, hidden_size], an expert's gates first; down:
        [num_experts, hidden_size, size]."""
        self.gate_up = gate_up
        self.down = down
        self.activations = activations
        self.input_scales = input_scales
        self.gelu = gelu

    @property
    def weights(self) -> Mapping[str, Tensor]:
        named = {
            "gate_up_proj": self.gate_up.data,
            "gate_up_proj_scale": self.gate_up.scale,
            "down_proj": self.down.data,
            "down_proj_scale": self.down.scale,
        }
        if self.input_scales is not None:
            named["gate_up_proj_input_scale"] = self.input_scales.gate_up
            named["down_proj_input_scale"] = self.input_scales.down
        return named

    def has_kernels(self, device: torch.device) -> bool:
        return self.activations != Activations.NONE and super().has_kernels(device)

    def gate_up_of(self, expert: int) -> Product:
        scale = None if self.input_scales is None else self.input_scales.gate_up[expert]
        return self._product(self.gate_up.expert(expert), scale)

    def down_of(self, expert: int) -> Product:
        scale = None if self.input_scales is None else self.input_scales.down[expert]
        return self._product(self.down.expert(expert), scale)

    def _product(self, weight: Fp8Weights, input_scale: Tensor | None) -> Product:
        return Fp8Product(weight, activations=self.activations, input_scale=input_scale)


class Int4Experts(QuantizedExperts):
    """Experts in INT4."""

    def __init__(self, gate_up: Int4Weights, down: Int4Weights, *, gelu: bool = False) -> None:
        """gate_up: [num_experts, 2 · size, hidden_size], an expert's gates first; down:
        [num_experts, hidden_size, size]."""
        self.gate_up = gate_up
        self.down = down
        self.gelu = gelu

    @property
    def weights(self) -> Mapping[str, Tensor]:
        named = {
            "gate_up_proj": self.gate_up.data,
            "gate_up_proj_scale": self.gate_up.scale,
            "gate_up_proj_zero": self.gate_up.zero,
            "down_proj": self.down.data,
            "down_proj_scale": self.down.scale,
            "down_proj_zero": self.down.zero,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def gate_up_of(self, expert: int) -> Product:
        return Int4Product(self.gate_up.expert(expert))

    def down_of(self, expert: int) -> Product:
        return Int4Product(self.down.expert(expert))
