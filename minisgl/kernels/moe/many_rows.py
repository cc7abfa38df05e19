"""Experts of many rows, of which each expert has several; see fused_experts.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for
from minisgl.kernels.moe.pair_deltas import with_deltas
from minisgl.kernels.moe.reference import Choice, Chosen, ExpertWeights
from minisgl.kernels.moe.routing import activated, clamp_options, multiply, place_for_sum
from minisgl.kernels.tuning import ExpertTiles

_MAX_LISTED = 4096  # pairs that a program scans at a time


class PairGemm(NamedTuple):
    """One of both products of the experts: the first, which is gated, or the second, whose results
    are weighted."""

    source: Tensor  # [any, num_inputs]: the row of a pair, or of several
    target: Tensor  # [num_pairs, num_outputs]
    tiles: ExpertTiles
    gated: bool
    pdl: bool
    delta: tuple[Any, ...] | None = None  # what adapters add, as from shrink_pairs

    @property
    def shared(self) -> int:
        """Pairs of a row of the source."""
        return len(self.target) // len(self.source)

    def grid(self, num_experts: int) -> tuple[int, int]:
        """That of kernels with programs for each expert."""
        across = triton.cdiv(self.target.shape[1], self.tiles.block_n)
        return across * self.tiles.places, num_experts

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments that all kernels have, by their names."""
        tiles = self.tiles
        return {
            "num_outputs": self.target.shape[1],
            "num_inputs": self.source.shape[1],
            "gated": self.gated,
            "block_n": tiles.block_n,
            "block_m": tiles.block_m,
            "block_k": tiles.block_k,
            "num_warps": tiles.num_warps,
            **pdl_options(self.target.device, self.pdl),
        }


class Listed(NamedTuple):
    """The pairs of a step, as the kernels of many rows take them."""

    counts: Tensor  # as of `list_pairs`
    lists: Tensor
    weights: Tensor  # [num_rows, top_k]
    num_rows: int


def multiply_dense(experts: ExpertWeights, choice: Chosen, pairs: Listed, gemm: PairGemm) -> None:
    """A product of experts of x's dtype."""
    weight = experts.gate_up if gemm.gated else experts.down
    up_bias, down_bias = experts.biases or (None, None)
    _expert_product[gemm.grid(len(weight))](
        gemm.source,
        weight,
        up_bias if gemm.gated else down_bias,
        gemm.target,
        *pairs,
        gemm.delta,
        top_k=choice.top_k,
        places=gemm.tiles.places,
        exact=gemm.source.dtype == torch.float32,
        **clamp_options(experts.clamped),
        gelu=experts.gelu,
        num_stages=gemm.tiles.num_stages,
        **gemm.numbers,
    )


def list_pairs(chosen: Tensor, num_experts: int, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """The number of each expert's pairs [num_experts], and a list of them [num_experts, num_rows],
    both int32. chosen: [num_rows, top_k] int32 contiguous; pair p is chosen.flatten()[p]."""
    num_rows, device = len(chosen), chosen.device
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    # An expert is chosen once by a row at most.
    lists = torch.empty((num_experts, num_rows), dtype=torch.int32, device=device)
    block = min(triton.next_power_of_2(chosen.numel()), _MAX_LISTED)
    _list_pairs[(num_experts,)](
        chosen,
        counts,
        lists,
        chosen.numel(),
        num_rows,
        block=block,
        num_warps=warps_for(block, 8),
        **pdl_options(device, pdl),
    )
    return counts, lists


def add_outputs(
    outputs: Tensor, x: Tensor, residual: Tensor | None, choice: Choice, *, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """Adds up the weighted outputs of each row's pairs [num_rows · top_k, hidden_size], but those
    that the choice has dropped, which are not written; returns what fused_experts does."""
    num_rows, hidden_size = x.shape
    block = min(triton.next_power_of_2(hidden_size), 1024)
    num_blocks = triton.cdiv(hidden_size, block)
    out, squares = place_for_sum(x, residual, num_blocks)
    # The rows first: the other dimensions of a grid end at 65,535.
    _add_outputs[(num_rows, num_blocks)](
        out,
        squares,
        outputs,
        choice.dropped if isinstance(choice, Chosen) else None,
        hidden_size=hidden_size,
        top_k=choice.top_k,
        block=block,
        num_warps=warps_for(block, 8),
        **pdl_options(x.device, pdl),
    )
    return out, squares


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _list_pairs(chosen, counts, lists, num_pairs, num_rows, block: tl.constexpr, pdl: tl.constexpr):
    """Lists the pairs of one expert, in their order."""
    wait_for_previous(pdl)
    expert = tl.program_id(0)
    lists += expert.to(tl.int64) * num_rows
    count = 0
    for first in tl.range(0, num_pairs, block, num_stages=4):
        pair = first + tl.arange(0, block)
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        ones = mine.to(tl.int32)
        tl.store(lists + count + tl.cumsum(ones, 0) - 1, pair, mask=mine)
        count += tl.sum(ones)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    source,
    weight,
    bias,
    target,
    counts,
    lists,
    weights,
    num_rows,
    delta,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    top_k: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    exact: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs, for some of an expert's pairs.

    gated: the first product. All pairs of a row share a row of `source`, the first half of W's rows
    are gates, and the activation is applied. Otherwise the second: each pair has a row of `source`,
    and the result is weighted.
    """
    wait_for_previous(pdl)
    # The programs of one expert are neighbours, so that its weights are read from memory once.
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    output = tl.program_id(0) % across * block_n + tl.arange(0, block_n)
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    weight += expert.to(tl.int64) * ((2 if gated else 1) * num_outputs * num_inputs)
    if bias is not None:
        bias += expert * ((2 if gated else 1) * num_outputs)
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        row = pair // top_k if gated else pair
        total, up_total = multiply(
            weight, source, output, row, inside, num_outputs, num_inputs, gated, exact,
            block_n, block_m, block_k,
        )  # fmt: skip
        store_outputs(
            target, weights, total, up_total, pair, inside, output, num_outputs, gated,
            bias, limit, alpha, gelu, delta, expert,
        )  # fmt: skip


@triton.jit
def store_outputs(
    target,
    weights,
    total,
    up_total,
    pair,
    inside,
    output,
    num_outputs: tl.constexpr,
    gated: tl.constexpr,
    bias=None,
    limit: tl.constexpr = None,
    alpha: tl.constexpr = None,
    gelu: tl.constexpr = False,
    delta=None,
    expert=None,
):
    """Writes columns `output` of the pairs that are `inside`, as `finished` makes them. total,
    up_total: [outputs, pairs] float32, to which a delta of the expert is added."""
    if delta is not None:
        total, up_total = with_deltas(
            delta, expert, pair, inside, output, total, up_total, num_outputs, gated
        )
    pair_weight = total  # a placeholder unless it is used
    if not gated:
        pair_weight = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = target.dtype.element_ty
    result = finished(
        total, up_total, pair_weight, output, num_outputs, gated, bias, limit, alpha, gelu, kind
    )
    target_at = target + pair[None, :].to(tl.int64) * num_outputs + output[:, None]
    mask = (output < num_outputs)[:, None] & inside[None, :]
    tl.store(target_at, result, mask=mask)


@triton.jit
def finished(
    total,
    up_total,
    pair_weight,
    output,
    num_outputs: tl.constexpr,
    gated: tl.constexpr,
    bias,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    kind: tl.constexpr,
):
    """What `activated` makes of total and up_total if gated, else total times the weight of its
    pair; with the bias of the expert, and in the dtype `kind`."""
    if bias is not None:
        is_output = output < num_outputs
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if gated:
            up_bias = tl.load(bias + num_outputs + output, mask=is_output, other=0.0)
            up_total += up_bias.to(tl.float32)[:, None]
    if gated:
        return activated(total, up_total, limit, alpha, gelu, kind)
    else:
        return (total.to(kind).to(tl.float32) * pair_weight).to(kind)


@triton.jit
def _add_outputs(
    out,
    squares,
    outputs,
    dropped,
    hidden_size: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a row's sum over its experts; added to `out` if there are squares."""
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden_size
    total = tl.zeros([block], tl.float32)
    for place in tl.static_range(top_k):
        output = outputs + (row * top_k + place) * hidden_size + column
        present = inside
        if dropped is not None:
            present = inside & (tl.load(dropped + row * top_k + place) >= 0)
        total += tl.load(output, mask=present, other=0.0).to(tl.float32)
    out += row * hidden_size + column
    result = total.to(out.dtype.element_ty)
    if squares is not None:
        residual = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        result = (residual + result.to(tl.float32)).to(result.dtype)
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide))
    tl.store(out, result, mask=inside)
