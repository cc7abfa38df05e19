"""Experts of few rows, of which two rarely share an expert; see fused_experts.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import from_here, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.moe.grouped import ByScores, GroupRouting
from minisgl.kernels.moe.reference import ByRouter, Choice, Chosen, ExpertWeights
from minisgl.kernels.moe.routing import (
    activated,
    choose,
    clamp_options,
    expert_places,
    multiply,
    place_for_sum,
    scored_places,
    scored_weights,
    weights_of,
)
from minisgl.kernels.tuning import FewTiles


def few_rows_experts(
    x: Tensor,
    choice: Choice,
    experts: ExpertWeights,
    residual: Tensor | None,
    tiles: FewTiles,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:
    num_rows, hidden_size = x.shape
    num_experts, _, size = experts.down.shape
    if isinstance(choice, ByScores) and choice.routing.num_groups > 1:
        choice = choose(choice, pdl=pdl)
    logits, scales, chosen, weights, routing = None, None, None, None, GroupRouting(0, False, False)
    score_bias, scored, normalize = None, isinstance(choice, ByScores), False
    if isinstance(choice, ByRouter):
        logits, (_, normalize), scales = choice
    elif isinstance(choice, ByScores):
        logits, routing, score_bias = choice
        normalize = routing.normalize
    else:
        chosen, weights, _ = choice
    num_routed = num_experts if logits is None else logits.shape[1]
    drops = choice.dropped is not None if isinstance(choice, Chosen) else False
    up_bias, down_bias = experts.biases or (None, None)
    numbers = {
        "hidden_size": hidden_size,
        "size": size,
        "num_experts": num_routed,
        "top_k": choice.top_k,
        "num_shared": routing.num_shared,
        "experts_block": triton.next_power_of_2(num_routed),
        "scored": scored,
        "sigmoid": routing.sigmoid,
        "drops": drops,
        **pdl_options(x.device, pdl),
    }
    inner = x.new_empty((num_rows * choice.top_k, size))
    _few_inner[(triton.cdiv(size, tiles.inner.block_n), len(inner))](
        inner,
        x,
        logits,
        score_bias,
        chosen,
        experts.gate_up,
        up_bias,
        exact=x.dtype == torch.float32,
        **clamp_options(experts.clamped),
        gelu=experts.gelu,
        block_n=tiles.inner.block_n,
        block_m=tiles.inner.block_m,
        block_k=tiles.inner.block_k,
        num_warps=tiles.inner.num_warps,
        num_stages=tiles.inner.num_stages,
        **numbers,
    )
    num_blocks = triton.cdiv(hidden_size, tiles.block_n)
    out, squares = place_for_sum(x, residual, num_blocks)
    _few_outer[(num_blocks, num_rows)](
        out,
        squares,
        inner,
        logits,
        score_bias,
        scales,
        chosen,
        weights,
        experts.down,
        down_bias,
        normalize=normalize,
        least_sum=routing.least_sum,
        factor=routing.factor,
        places=triton.next_power_of_2(choice.top_k),
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        pieces=triton.cdiv(size, tiles.block_k),
        num_warps=tiles.num_warps,
        **numbers,
    )
    return out, squares


@triton.jit
def _few_inner(
    inner,
    x,
    logits,
    score_bias,
    chosen,
    weight,
    bias,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    num_shared: tl.constexpr,
    experts_block: tl.constexpr,
    scored: tl.constexpr,
    sigmoid: tl.constexpr,
    drops: tl.constexpr,
    exact: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a pair's activations. drops: whether other ranks have some of the experts."""
    wait_for_previous(pdl)
    pair = tl.program_id(1)
    row = pair // top_k
    if chosen is not None:
        expert = tl.load(chosen + pair)
        if drops:  # noqa: SIM102 - the compiler decides this one, the device the next
            if expert < 0:
                return
    else:
        if scored:
            _, order = scored_places(
                logits + row * num_experts, score_bias, num_experts, experts_block, sigmoid
            )
        else:
            _, order = expert_places(logits + row * num_experts, num_experts, experts_block)
        is_mine = order == pair % top_k
        expert = tl.sum(tl.where(is_mine, tl.arange(0, experts_block), 0))
        if num_shared > 0:
            behind = pair % top_k - (top_k - num_shared)
            expert = tl.where(behind >= 0, num_experts + behind, expert)
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    weight += expert.to(tl.int64) * (2 * size * hidden_size)
    rows = row + tl.zeros([block_m], tl.int32)
    inside = tl.arange(0, block_m) == 0
    gate, up = multiply(
        weight, x, output, rows, inside, size, hidden_size, True, exact, block_n, block_m, block_k
    )
    if bias is not None:
        bias += expert * (2 * size) + output
        gate += tl.load(bias, mask=output < size, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + size, mask=output < size, other=0.0).to(tl.float32)[:, None]
    result = activated(gate, up, limit, alpha, gelu, inner.dtype.element_ty)
    place = inner + pair * size + output[:, None] + tl.zeros([1, block_m], tl.int32)
    tl.store(place, result, mask=(output < size)[:, None] & inside[None, :])


@triton.jit
def _few_outer(
    out,
    squares,
    inner,
    logits,
    score_bias,
    scales,
    chosen,
    weights,
    weight,
    bias,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    num_shared: tl.constexpr,
    experts_block: tl.constexpr,
    scored: tl.constexpr,
    sigmoid: tl.constexpr,
    drops: tl.constexpr,
    normalize: tl.constexpr,
    least_sum: tl.constexpr,
    factor: tl.constexpr,
    places: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a row's sum over its experts; added to `out` if there are squares."""
    row = tl.program_id(1)
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    place = tl.arange(0, places)
    is_here = place < top_k
    # What is chosen is older than the previous kernel, as the weights are.
    if chosen is not None:
        pair = row * top_k + place
        expert = tl.load(chosen + pair, mask=place < top_k, other=0)
        expert_weight = tl.load(weights + pair, mask=place < top_k, other=0.0)
        if drops:
            is_here = is_here & (expert >= 0)
    else:
        if scored:
            score, order = scored_places(
                logits + row * num_experts, score_bias, num_experts, experts_block, sigmoid
            )
            expert_weight = scored_weights(
                score, order, top_k - num_shared, normalize, least_sum, factor
            )
        else:
            score, order = expert_places(logits + row * num_experts, num_experts, experts_block)
            expert_weight = weights_of(score, order, scales, num_experts, top_k, normalize)
        at_place = order[:, None] == place[None, :]
        expert = tl.sum(tl.where(at_place, tl.arange(0, experts_block)[:, None], 0), 0)
        expert_weight = tl.sum(tl.where(at_place, expert_weight[:, None], 0.0), 0)
        if num_shared > 0:
            behind = place - (top_k - num_shared)
            expert = tl.where(behind >= 0, num_experts + behind, expert)
            expert_weight = tl.where(behind >= 0, 1.0, expert_weight)
    w_at = weight + expert.to(tl.int64)[:, None, None] * (hidden_size * size)
    w_at += output[None, :, None] * size
    is_output = is_here[:, None, None] & (output < hidden_size)[None, :, None]
    w, rows = (), ()
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, None, :]
        w += (tl.load(w_at + k, mask=is_output & (k < size), other=0.0),)
    wait_for_previous(pdl)
    inner += (row * top_k + place)[:, None, None] * size
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, None, :]
        mask = is_here[:, None, None] & (k < size)
        rows += (tl.load(inner + k, mask=mask, other=0.0),)
    out += row * hidden_size + output
    if squares is not None:
        residual = tl.load(out, mask=output < hidden_size, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all loads are issued

    product = tl.zeros([places, block_n, block_k], tl.float32)
    for i in tl.static_range(pieces):
        product += from_here(w[i], pdl).to(tl.float32) * rows[i].to(tl.float32)
    kind = out.dtype.element_ty
    result = tl.sum(product, 2)
    if bias is not None:
        b_at = bias + expert[:, None] * hidden_size + output[None, :]
        b_mask = is_here[:, None] & (output < hidden_size)[None, :]
        result += tl.load(b_at, mask=b_mask, other=0.0).to(tl.float32)
    result = result.to(kind).to(tl.float32) * expert_weight.to(kind).to(tl.float32)[:, None]
    result = tl.sum(result.to(kind).to(tl.float32), 0).to(kind)
    if squares is not None:
        result = (residual + result.to(tl.float32)).to(kind)
        wide = tl.where(output < hidden_size, result.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide))
    tl.store(out, result, mask=output < hidden_size)
