"""The choice of experts among groups as one Triton kernel, as `choose_grouped` of grouped.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.moe.grouped import ByScores


def choose_grouped(choice: ByScores, *, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """See grouped.py; all contiguous. Of experts, and of groups, that count alike the lower one
    comes first; a row that holds NaN chooses existing experts, each once. `pdl`: see
    launch_options.py."""
    logits, routing, bias = choice
    assert logits.is_contiguous() and (bias is None or bias.is_contiguous())
    num_rows, num_experts = logits.shape
    num_places = routing.top_k + routing.num_shared
    chosen = torch.empty((num_rows, num_places), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=logits.dtype)
    if num_rows == 0:
        return chosen, weights
    of_group = num_experts // routing.num_groups
    _choose_row[(num_rows,)](
        logits,
        bias,
        chosen,
        weights,
        routing.factor,
        num_experts=num_experts,
        top_k=routing.top_k,
        normalize=routing.normalize,
        sigmoid=routing.sigmoid,
        least_sum=routing.least_sum,
        num_groups=routing.num_groups,
        num_kept=routing.num_kept,
        num_shared=routing.num_shared,
        groups_block=triton.next_power_of_2(routing.num_groups),
        group_block=triton.next_power_of_2(of_group),
        places_block=triton.next_power_of_2(num_places),
        num_warps=1,  # whose lanes compare without shared memory
        **pdl_options(logits.device, pdl),
    )
    return chosen, weights


@triton.jit
def _choose_row(
    logits,
    bias,
    chosen,
    weights,
    factor,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
    sigmoid: tl.constexpr,
    least_sum: tl.constexpr,
    num_groups: tl.constexpr,
    num_kept: tl.constexpr,
    num_shared: tl.constexpr,
    groups_block: tl.constexpr,
    group_block: tl.constexpr,
    places_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One row a program, whose experts are [groups_block, group_block]."""
    of_group: tl.constexpr = num_experts // num_groups
    group, lane = tl.arange(0, groups_block), tl.arange(0, group_block)
    expert = group[:, None] * of_group + lane[None, :]
    exists = (group < num_groups)[:, None] & (lane < of_group)[None, :]
    if bias is not None:
        added = tl.load(bias + expert, mask=exists, other=0.0)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(logits + row * num_experts + expert, mask=exists, other=-float("inf"))
    x = x.to(tl.float32)
    if sigmoid:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        grown = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = grown / tl.sum(tl.sum(grown, 1), 0)
    compared = score
    if bias is not None:
        compared += added
    compared = tl.where(compared == compared, compared, -1.0e30)  # NaN
    compared = tl.where(exists, compared, -float("inf"))
    if num_groups > 1:
        best = tl.max(compared, 1)
        if sigmoid:
            first = tl.min(tl.where(compared == best[:, None], lane[None, :], group_block), 1)
            others = tl.where(lane[None, :] == first[:, None], -float("inf"), compared)
            best += tl.max(others, 1)
        is_kept = tl.zeros([groups_block], tl.int1)
        for _ in tl.static_range(num_kept):
            most = tl.max(best, 0)
            next_group = tl.min(tl.where(best == most, group, groups_block), 0)
            is_kept = is_kept | (group == next_group)
            best = tl.where(group == next_group, -float("inf"), best)
        compared = tl.where(is_kept[:, None], compared, -float("inf"))

    place = tl.arange(0, places_block)
    experts = tl.zeros([places_block], tl.int32)
    weight = tl.zeros([places_block], tl.float32)
    for index in tl.static_range(top_k):
        most = tl.max(tl.max(compared, 1), 0)
        taken = tl.where(compared == most, expert, num_experts)
        taken = tl.min(tl.min(taken, 1), 0)
        is_taken = expert == taken
        its = tl.sum(tl.sum(tl.where(is_taken & exists, score, 0.0), 1), 0)
        compared = tl.where(is_taken, -float("inf"), compared)
        experts = tl.where(place == index, taken, experts)
        weight = tl.where(place == index, its, weight)
    if normalize:
        weight /= tl.sum(weight, 0) + least_sum
    weight *= factor
    if num_shared > 0:
        experts = tl.where(place < top_k, experts, num_experts + place - top_k)
        weight = tl.where(place < top_k, weight, 1.0)
    num_places: tl.constexpr = top_k + num_shared
    at, inside = row * num_places + place, place < num_places
    tl.store(chosen + at, experts, mask=inside)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=inside)
