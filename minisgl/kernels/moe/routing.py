"""Which experts a row goes to, and what both ways to compute them share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.launch import pdl_options
from minisgl.kernels.moe.reference import Routing


def place_for_sum(
    x: Tensor, residual: Tensor | None, num_blocks: int
) -> tuple[Tensor, Tensor | None]:
    """Where a row's sum goes and, if it is added to a residual, the squares of each block."""
    if residual is None:
        return torch.empty_like(x), None
    return residual, x.new_empty((len(x), num_blocks), dtype=torch.float32)


def topk_softmax(logits: Tensor, routing: Routing, *, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """As topk_softmax of moe/reference.py; logits contiguous."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty((num_rows, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=logits.dtype)
    _choose_row[(num_rows,)](
        logits,
        chosen,
        weights,
        num_experts=num_experts,
        top_k=routing.top_k,
        normalize=routing.normalize,
        experts_block=triton.next_power_of_2(num_experts),
        num_warps=4,
        **pdl_options(logits.device, pdl),
    )
    return chosen, weights


@triton.jit
def expert_places(logits, num_experts: tl.constexpr, block: tl.constexpr):
    """How likely each expert of a row is, NaN for all if the row is not of numbers, and how many
    come before it."""
    expert = tl.arange(0, block)
    x = tl.load(logits + expert, mask=expert < num_experts, other=-float("inf")).to(tl.float32)
    largest = tl.max(x)
    total = tl.sum(tl.exp(x - largest))
    is_number = total > 0
    probability = tl.where(is_number, tl.exp(x - largest) / total, 0.0)
    probability = tl.where(expert < num_experts, probability, -1.0)
    rank = tl.zeros([block], tl.int32)
    chunk: tl.constexpr = block if block < 32 else 32  # compared with at a time
    for first in tl.static_range(0, block, chunk):
        other = first + tl.arange(0, chunk)
        y = tl.load(logits + other, mask=other < num_experts, other=-float("inf")).to(tl.float32)
        likely = tl.where(is_number, tl.exp(y - largest) / total, 0.0)
        likely = tl.where(other < num_experts, likely, -1.0)[None, :]
        mine = probability[:, None]
        is_before = (likely > mine) | ((likely == mine) & (other[None, :] < expert[:, None]))
        rank += tl.sum(is_before.to(tl.int32), 1)
    return tl.where(is_number, probability, float("nan")), rank


@triton.jit
def weights_of(probability, rank, top_k: tl.constexpr, normalize: tl.constexpr):
    """Those of the chosen experts; 0 for the others."""
    weight = tl.where(rank < top_k, probability, 0.0)
    if normalize:
        weight /= tl.sum(weight)
    return weight


@triton.jit
def _choose_row(
    logits,
    chosen,
    weights,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
    experts_block: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    probability, rank = expert_places(logits + row * num_experts, num_experts, experts_block)
    weight = weights_of(probability, rank, top_k, normalize)
    place = row * top_k + rank
    tl.store(chosen + place, tl.arange(0, experts_block), mask=rank < top_k)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=rank < top_k)


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
