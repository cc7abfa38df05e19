"""What a mixture of experts computes behind its router: one function for each step, and the torch
reference of both. Where Triton runs, its kernels of triton_experts.py do the work."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.fused import runs_triton
from minisgl.kernels.reference import silu_mul


def choose(logits: Tensor, num_chosen: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Of each row the experts with the largest probabilities, and these as weights.

    logits: [num_rows, num_experts]. Returns [num_rows, num_chosen] int32 and, of logits' dtype, the
    softmax over all experts in float32; if `normalize` the chosen ones' add up to 1.
    """
    if runs_triton(logits.device):
        from minisgl.kernels import triton_experts

        return triton_experts.choose(logits, num_chosen, normalize=normalize)
    return choose_reference(logits, num_chosen, normalize=normalize)


def apply(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over each row's chosen experts e of down[e] · silu_mul(gate_up[e] · x).

    x: [num_rows, hidden_size]; gate_up: [num_experts, 2 · size, hidden_size], the gates first;
    down: [num_experts, hidden_size, size]; chosen and weights: [num_rows, num_chosen]. Returns a
    new tensor like x.
    """
    if runs_triton(x.device):
        from minisgl.kernels import triton_experts

        return triton_experts.apply(x, gate_up, down, chosen, weights)
    return apply_reference(x, gate_up, down, chosen, weights)


def choose_reference(logits: Tensor, num_chosen: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(num_chosen, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen.int(), weights.to(logits.dtype)


def apply_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Expert by expert. An expert's output is rounded, and its weighted share is; the shares are
    added in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul(F.linear(x[rows], gate_up[expert]))
        shares = F.linear(inner, down[expert]) * weights[rows, places, None]
        out.index_add_(0, rows, shares.float())
    return out.to(x.dtype)
