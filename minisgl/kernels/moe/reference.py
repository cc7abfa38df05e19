"""The torch reference of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.elementwise.reference import silu_mul


class Routing(NamedTuple):
    """How a row's experts follow from the router's logits."""

    top_k: int
    normalize: bool  # whether their weights add up to 1


class ExpertWeights(NamedTuple):
    gate_up: Tensor  # [num_experts, 2 · size, hidden_size], an expert's gates first
    down: Tensor  # [num_experts, hidden_size, size]


def topk_softmax(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Of each row the experts with the largest probabilities, and these as weights.

    Returns [num_rows, top_k] int32 and, of logits' dtype, the softmax over all experts in
    float32, made to add up to 1 if so.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(routing.top_k, dim=-1)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen.int(), weights.to(logits.dtype)


def fused_experts(x: Tensor, experts: ExpertWeights, chosen: Tensor, weights: Tensor) -> Tensor:
    """Expert by expert. An expert's output is rounded, and its weighted share is; the shares are
    added in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul(F.linear(x[rows], experts.gate_up[expert]))
        shares = F.linear(inner, experts.down[expert]) * weights[rows, places, None]
        out.index_add_(0, rows, shares.float())
    return out.to(x.dtype)
