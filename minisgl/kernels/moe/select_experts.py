"""Selects the product of a layer's experts for the device of their weights, and what chooses among
those of a rank."""

from __future__ import annotations

import torch

from minisgl.config import Activations
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear.quantized import Fp8Weights, Int4Weights
from minisgl.kernels.moe import reference
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales, Int4Experts
from minisgl.kernels.moe.reference import (
    Choice,
    Chosen,
    Clamped,
    ExpertBiases,
)
from minisgl.kernels.tuning import tuning_of
from minisgl.shards import Shard


def choose_of(choice: Choice, own: Shard) -> Chosen:
    """As choose_of of reference.py."""
    if not isinstance(choice, Chosen) and runs_triton(choice.logits.device):
        from minisgl.kernels.moe import routing

        return routing.choose_of(choice, own)
    return reference.choose_of(choice, own)


def fp8_experts(
    gate_up: Fp8Weights,
    down: Fp8Weights,
    *,
    activations: Activations,
    input_scales: InputScales | None = None,
    gelu: bool = False,
) -> Fp8Experts:
    """Experts in FP8; the arguments are those of Fp8Experts."""
    kind = Fp8Experts
    if activations != Activations.NONE and runs_triton(gate_up.data.device):
        from minisgl.kernels.moe.fp8_experts import TensorCoreExperts

        kind = TensorCoreExperts
    return kind(gate_up, down, activations=activations, input_scales=input_scales, gelu=gelu)


def int4_experts(gate_up: Int4Weights, down: Int4Weights, *, gelu: bool = False) -> Int4Experts:
    """Experts in INT4; the arguments are those of Int4Experts."""
    kind = Int4Experts
    if runs_triton(gate_up.data.device):
        from minisgl.kernels.moe.int4_experts import WeightOnlyExperts

        kind = WeightOnlyExperts
    return kind(gate_up, down, gelu=gelu)


def mxfp4_experts(
    gate_up: Mxfp4Weights,
    down: Mxfp4Weights,
    biases: ExpertBiases | None = None,
    clamped: Clamped | None = None,
) -> Mxfp4Experts:
    """Experts in MXFP4; the arguments are those of Mxfp4Experts."""
    kind = Mxfp4Experts
    if runs_triton(gate_up.data.device):
        from minisgl.kernels.moe.mxfp4_experts import WeightOnlyExperts

        kind = WeightOnlyExperts
    return kind(gate_up, down, biases, clamped)


def joins_shared(num_rows: int, device: torch.device) -> bool:
    """Whether so many rows have a shared expert computed with the others, and not beside them."""
    return num_rows <= tuning_of(device).shared_expert_rows
