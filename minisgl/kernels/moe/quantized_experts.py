"""The products of a layer's experts with quantised weights, by the arithmetic of
linear/quantized.py: the inputs of both products are rounded, as those of any FP8 product."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.elementwise.reference import gated_mul
from minisgl.kernels.linear.nvfp4 import Nvfp4Product, Nvfp4Weights
from minisgl.kernels.linear.quantized import (
    ExpertMatrices,
    Fp8Product,
    Fp8Weights,
    Int4Product,
    Int4Weights,
    QuantizedProduct,
)
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.reference import Clamped, Expert, ExpertBiases


class InputScales(NamedTuple):
    """Of STATIC activations, one float32 number for each expert: [num_experts]."""

    gate_up: Tensor
    down: Tensor


class QuantizedExperts(ExpertsProduct):
    """Experts whose matrices are quantised."""

    gate_up: ExpertMatrices  # [num_experts, 2 · size, hidden_size], an expert's gates first
    down: ExpertMatrices  # [num_experts, hidden_size, size]
    input_scales: InputScales | None = None
    biases: ExpertBiases | None = None
    clamped: Clamped | None = None  # the activation; None: silu(gate) · up, or that of `gelu`
    gelu: bool = False  # as in ExpertWeights

    def __init__(self, gate_up: ExpertMatrices, down: ExpertMatrices) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def weights(self) -> Mapping[str, Tensor]:
        scales = {} if self.input_scales is None else self.input_scales._asdict()
        named = {f"{name}_proj_input_scale": scale for name, scale in scales.items()}
        return self.gate_up.named("gate_up_proj") | self.down.named("down_proj") | named


class ExpertsOfProducts(QuantizedExperts):
    """Experts whose matrices are products of one expert each, on any device."""

    @abstractmethod
    def products(self, expert: int) -> tuple[QuantizedProduct, QuantizedProduct]:
        """[num_rows, hidden_size] → [num_rows, 2 · size], the gates first, and [num_rows, size] →
        [num_rows, hidden_size]."""
        ...

    def expert(self, index: int) -> Expert:
        gate_up, down = self.products(index)
        return Expert(gate_up, partial(gated_mul, gelu=self.gelu), down)


class Fp8Experts(ExpertsOfProducts):
    """Experts in FP8, and their inputs rounded as `activations` says."""

    gate_up: Fp8Weights
    down: Fp8Weights

    def __init__(
        self,
        gate_up: Fp8Weights,
        down: Fp8Weights,
        *,
        activations: Activations,
        input_scales: InputScales | None = None,
        gelu: bool = False,
    ) -> None:
        super().__init__(gate_up, down)
        self.activations = activations
        self.input_scales = input_scales
        self.gelu = gelu

    def products(self, expert: int) -> tuple[QuantizedProduct, QuantizedProduct]:
        def product(weights: Fp8Weights, scales: Tensor | None) -> Fp8Product:
            scale = None if scales is None else scales[expert]
            return Fp8Product(
                weights.expert(expert), activations=self.activations, input_scale=scale
            )

        of_up, of_down = self.input_scales or (None, None)
        return product(self.gate_up, of_up), product(self.down, of_down)


class Int4Experts(ExpertsOfProducts):
    """Experts in INT4."""

    gate_up: Int4Weights
    down: Int4Weights

    def __init__(self, gate_up: Int4Weights, down: Int4Weights, *, gelu: bool = False) -> None:
        super().__init__(gate_up, down)
        self.gelu = gelu

    def products(self, expert: int) -> tuple[QuantizedProduct, QuantizedProduct]:
        return Int4Product(self.gate_up.expert(expert)), Int4Product(self.down.expert(expert))


class Nvfp4Experts(ExpertsOfProducts):
    """Experts in NVFP4."""

    gate_up: Nvfp4Weights
    down: Nvfp4Weights

    def __init__(self, gate_up: Nvfp4Weights, down: Nvfp4Weights, *, gelu: bool = False) -> None:
        super().__init__(gate_up, down)
        self.gelu = gelu

    def products(self, expert: int) -> tuple[QuantizedProduct, QuantizedProduct]:
        return Nvfp4Product(self.gate_up.expert(expert)), Nvfp4Product(self.down.expert(expert))
