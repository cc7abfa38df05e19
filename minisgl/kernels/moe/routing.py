"""The router's softmax and top-k, and helpers of both ways to compute experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import clamped_mul, gated_mul, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.moe.grouped import ByScores
from minisgl.kernels.moe.grouped_kernel import choose_grouped
from minisgl.kernels.moe.reference import (
    ByRouter,
    Choice,
    Chosen,
    Clamped,
    Routing,
)
from minisgl.kernels.moe.reference import choose_of as choose_given_of
from minisgl.shards import Shard


def place_for_sum(
    x: Tensor, residual: Tensor | None, num_blocks: int
) -> tuple[Tensor, Tensor | None]:
    """Where the sums are written and, if they are added to a residual, their squares by block."""
    if residual is None:
        return torch.empty_like(x), None
    return residual, x.new_empty((len(x), num_blocks), dtype=torch.float32)


def topk_softmax(
    logits: Tensor,
    routing: Routing,
    scales: Tensor | None = None,
    *,
    own: Shard | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely experts of each row, and their weights; both contiguous. own: the
    experts that are here; None: all. `pdl`: see launch_options.py."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty((num_rows, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=logits.dtype)
    _topk_softmax_row[(num_rows,)](
        logits,
        scales,
        chosen,
        weights,
        num_experts=num_experts,
        top_k=routing.top_k,
        normalize=routing.normalize,
        experts_block=triton.next_power_of_2(num_experts),
        first=None if own is None else own.first,
        num_own=num_experts if own is None else own.size,
        num_warps=4,
        **pdl_options(logits.device, pdl),
    )
    return chosen, weights


def choose(choice: Choice, *, pdl: bool = True) -> Chosen:
    """The experts of each row, and their weights. The tensors of a choice are contiguous. `pdl`:
    see launch_options.py."""
    assert all(part.is_contiguous() for part in choice if isinstance(part, Tensor))
    if isinstance(choice, ByScores):
        return Chosen(*choose_grouped(choice, pdl=pdl))
    return choice if isinstance(choice, Chosen) else Chosen(*topk_softmax(*choice, pdl=pdl))


def choose_of(choice: Choice, own: Shard, *, pdl: bool = True) -> Chosen:
    """The experts of each row as a rank sees them that has only its `own`. `pdl`: see
    launch_options.py."""
    if not isinstance(choice, ByRouter):
        return choose_given_of(choose(choice, pdl=pdl), own)
    return Chosen(*topk_softmax(*choice, own=own, pdl=pdl), own.whole)


def clamp_options(clamped: Clamped | None) -> dict[str, float | None]:
    """The launch arguments for `activated`."""
    return {"limit": clamped and clamped.limit, "alpha": clamped and clamped.alpha}


@triton.jit
def activated(
    gate,
    up,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    dtype: tl.constexpr,
):
    """What the second product of an expert multiplies; not clamped without a limit."""
    if limit is None:
        return gated_mul(gate, up, gelu, dtype)
    else:
        return clamped_mul(gate, up, limit, alpha, dtype)


@triton.jit
def expert_places(logits, num_experts: tl.constexpr, block: tl.constexpr):
    """(probability, place) of each expert of a row: its softmax, NaN for all if the logits are not
    numbers, and how many experts precede it."""
    expert = tl.arange(0, block)
    x = tl.load(logits + expert, mask=expert < num_experts, other=-float("inf")).to(tl.float32)
    largest = tl.max(x)
    total = tl.sum(tl.exp(x - largest))
    is_number = total > 0
    probability = tl.where(is_number, tl.exp(x - largest) / total, 0.0)
    probability = tl.where(expert < num_experts, probability, -1.0)
    place = tl.zeros([block], tl.int32)
    width: tl.constexpr = block if block < 32 else 32  # experts that are compared with at a time
    for first in tl.static_range(0, block, width):
        other = first + tl.arange(0, width)
        y = tl.load(logits + other, mask=other < num_experts, other=-float("inf")).to(tl.float32)
        likely = tl.where(is_number, tl.exp(y - largest) / total, 0.0)
        likely = tl.where(other < num_experts, likely, -1.0)[None, :]
        mine = probability[:, None]
        precedes = (likely > mine) | ((likely == mine) & (other[None, :] < expert[:, None]))
        place += tl.sum(precedes.to(tl.int32), 1)
    return tl.where(is_number, probability, float("nan")), place


@triton.jit
def scored_places(
    logits,
    bias,
    num_experts: tl.constexpr,
    block: tl.constexpr,
    sigmoid: tl.constexpr,
):
    """(score, place) of each expert of a row, by scores and biases without groups: how many experts
    precede it."""
    expert = tl.arange(0, block)
    x = tl.load(logits + expert, mask=expert < num_experts, other=-float("inf")).to(tl.float32)
    largest, total = 0.0, 1.0
    if not sigmoid:
        largest = tl.max(x)
        total = tl.sum(tl.exp(x - largest))
    score = _score(x, largest, total, sigmoid)
    mine = _compared(score, bias, expert, num_experts)[:, None]
    place = tl.zeros([block], tl.int32)
    width: tl.constexpr = block if block < 32 else 32  # experts that are compared with at a time
    for first in tl.static_range(0, block, width):
        other = first + tl.arange(0, width)
        y = tl.load(logits + other, mask=other < num_experts, other=-float("inf")).to(tl.float32)
        score_there = _score(y, largest, total, sigmoid)
        there = _compared(score_there, bias, other, num_experts)[None, :]
        precedes = (there > mine) | ((there == mine) & (other[None, :] < expert[:, None]))
        place += tl.sum(precedes.to(tl.int32), 1)
    return score, place


@triton.jit
def _score(x, largest, total, sigmoid: tl.constexpr):
    if sigmoid:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.exp(x - largest) / total


@triton.jit
def _compared(score, bias, expert, num_experts: tl.constexpr):
    """What experts are compared by: NaN comes after all numbers, and what does not exist last."""
    if bias is not None:
        score += tl.load(bias + expert, mask=expert < num_experts, other=0.0)
    score = tl.where(score == score, score, -1.0e30)
    return tl.where(expert < num_experts, score, -float("inf"))


@triton.jit
def scored_weights(
    score,
    place,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
    least_sum: tl.constexpr,
    factor: tl.constexpr,
):
    """The weights of the chosen experts; 0 for the others."""
    weight = tl.where(place < top_k, score, 0.0)
    if normalize:
        weight /= tl.sum(weight) + least_sum
    return weight * factor


@triton.jit
def weights_of(
    probability,
    place,
    scales,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
):
    """The weights of the chosen experts, times their scales if there are some; 0 for the others."""
    weight = tl.where(place < top_k, probability, 0.0)
    if normalize:
        weight /= tl.sum(weight)
    if scales is not None:
        expert = tl.arange(0, place.shape[0])
        weight *= tl.load(scales + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _topk_softmax_row(
    logits,
    scales,
    chosen,
    weights,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
    experts_block: tl.constexpr,
    first: tl.constexpr,
    num_own: tl.constexpr,
    pdl: tl.constexpr,
):
    wait_for_previous(pdl)
    row = tl.program_id(0)
    probability, place = expert_places(logits + row * num_experts, num_experts, experts_block)
    weight = weights_of(probability, place, scales, num_experts, top_k, normalize)
    target = row * top_k + place
    expert = tl.arange(0, experts_block)
    if first is not None:
        expert -= first
        expert = tl.where((expert >= 0) & (expert < num_own), expert, -1)  # ELSEWHERE
    tl.store(chosen + target, expert, mask=place < top_k)
    tl.store(weights + target, weight.to(weights.dtype.element_ty), mask=place < top_k)


@triton.jit
def multiply(
    weight,
    source,
    output,
    row,
    inside,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    gated: tl.constexpr,
    exact: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
):
    """Rows `output` of one expert's W times rows `row` of `source`, where these are `inside`.

    Returns [block_n, block_m], and the same of W's second half, or zeros if not gated.
    """
    precision: tl.constexpr = "ieee" if exact else "tf32"
    w_rows = weight + output[:, None].to(tl.int64) * num_inputs
    x_rows = source + row[None, :].to(tl.int64) * num_inputs
    total = tl.zeros([block_n, block_m], tl.float32)
    up_total = tl.zeros([block_n, block_m], tl.float32)
    for k in range(0, num_inputs, block_k):
        column = k + tl.arange(0, block_k)
        w_mask = (output < num_outputs)[:, None] & (column < num_inputs)[None, :]
        x_mask = (column < num_inputs)[:, None] & inside[None, :]
        w = tl.load(w_rows + column[None, :], mask=w_mask, other=0.0)
        x = tl.load(x_rows + column[:, None], mask=x_mask, other=0.0)
        total = tl.dot(w, x, total, input_precision=precision)
        if gated:
            up_at = w_rows + num_outputs * num_inputs + column[None, :]
            up_total = tl.dot(
                tl.load(up_at, mask=w_mask, other=0.0), x, up_total, input_precision=precision
            )
    return total, up_total
