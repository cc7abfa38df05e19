"""What a mixture of experts computes behind its router, and the torch reference of it. Where Triton
runs, the kernels of triton_experts.py do the work."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.fused import Residual, runs_triton
from minisgl.kernels.reference import silu_mul


class Routing(NamedTuple):
    """How a row's experts follow from the router's logits."""

    num_chosen: int
    normalize: bool  # whether their weights add up to 1


class ExpertWeights(NamedTuple):
    gate_up: Tensor  # [num_experts, 2 · size, hidden_size], an expert's gates first
    down: Tensor  # [num_experts, hidden_size, size]


def mix(x: Tensor, logits: Tensor, experts: ExpertWeights, routing: Routing) -> Tensor:
    """The weighted sum over each row's chosen experts e of down[e] · silu_mul(gate_up[e] · x).

    x: [num_rows, hidden_size]; logits: [num_rows, num_experts], the router's. Returns a new tensor
    like x.
    """
    if runs_triton(x.device):
        from minisgl.kernels import triton_experts

        return triton_experts.mix(x, logits, experts, routing)[0]
    return apply_reference(x, experts, *choose_reference(logits, routing))


def mix_add(
    x: Tensor, logits: Tensor, experts: ExpertWeights, routing: Routing, rows: Tensor
) -> Residual:
    """rows + mix(...), which may be written over `rows`."""
    if runs_triton(x.device):
        from minisgl.kernels import triton_experts

        rows, squares = triton_experts.mix(x, logits, experts, routing, rows)
        return Residual(rows, squares=squares)
    return Residual(rows, delta=mix(x, logits, experts, routing))


def choose_reference(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Of each row the experts with the largest probabilities, and these as weights.

    Returns [num_rows, num_chosen] int32 and, of logits' dtype, the softmax over all experts in
    float32, made to add up to 1 if so.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(routing.num_chosen, dim=-1)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen.int(), weights.to(logits.dtype)


def apply_reference(x: Tensor, experts: ExpertWeights, chosen: Tensor, weights: Tensor) -> Tensor:
    """Expert by expert. An expert's output is rounded, and its weighted share is; the shares are
    added in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul(F.linear(x[rows], experts.gate_up[expert]))
        shares = F.linear(inner, experts.down[expert]) * weights[rows, places, None]
        out.index_add_(0, rows, shares.float())
    return out.to(x.dtype)
