"""A mixture of experts in Triton. The references, and the rounding that is kept to, are those of
experts.py.

The time is that of reading the weights of the experts that any row has chosen, once; of many rows,
that of the products. Nothing here asks the host: which experts are read follows from what the
router has written. A row and one of its experts are a *pair*.

- Of few rows each pair is worked on by itself: two rows seldom share an expert, and where they do
  its weights come out of L2. So the lists below need not be made.
- Of more, one program for each expert lists its pairs. Then the grid has a place for every expert,
  and several for its rows; a program whose expert has none left returns at once.

The products have W on the left, as those of triton_linear.py, because an expert has few rows. The
first one applies the activation to what it has in registers; the second leaves each pair's weighted
share, and the last kernel adds a row's shares in their order: the sum does not depend on the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import pdl_options, warps_for

# Up to so many pairs each is worked on by itself.
MAX_SINGLE_PAIRS = 64
_LISTED = 1024  # pairs that a program looks at at a time


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is shared out."""

    block_n: int  # rows of W in a program
    block_m: int  # pairs
    block_k: int
    num_warps: int
    num_stages: int
    places: int = 1  # programs that share an expert's pairs


def choose(
    logits: Tensor, num_chosen: int, *, normalize: bool, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """As in experts.py; logits contiguous. Of equals the lower expert comes first.

    A row whose probabilities are NaN has such weights too, of experts that there are, each once: a
    number out of range, or many of the same, would let the kernels of `apply` leave their tensors.
    """
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous()
    chosen = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, num_chosen), dtype=logits.dtype, device=logits.device)
    _choose_row[(num_rows,)](
        logits,
        chosen,
        weights,
        num_experts=num_experts,
        num_chosen=num_chosen,
        normalize=normalize,
        block=triton.next_power_of_2(num_experts),
        places=triton.next_power_of_2(num_chosen),
        num_warps=1,
        **pdl_options(logits.device, pdl),
    )
    return chosen, weights


def apply(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, *, pdl: bool = True
) -> Tensor:
    """As in experts.py; all contiguous."""
    assert all(tensor.is_contiguous() for tensor in (x, gate_up, down, chosen, weights))
    num_rows, hidden_size = x.shape
    num_experts, _, size = down.shape
    num_chosen = chosen.shape[1]
    num_pairs = num_rows * num_chosen
    options = pdl_options(x.device, pdl)
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    single = num_pairs <= MAX_SINGLE_PAIRS
    counts = lists = chosen
    if not single:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        # An expert is chosen once by a row at most.
        lists = torch.empty((num_experts, num_rows), dtype=torch.int32, device=x.device)
        _list_pairs[(num_experts,)](
            chosen, counts, lists, num_pairs, num_rows, block=_LISTED, num_warps=4, **options
        )
    how = tiles(num_pairs, num_experts, x.dtype)
    groups = num_pairs if single else num_experts
    inner = x.new_empty((num_pairs, size))
    shares = x.new_empty((num_pairs, hidden_size))
    for source, weight, target, gated in ((x, gate_up, inner, True), (inner, down, shares, False)):
        num_outputs, num_inputs = target.shape[1], source.shape[1]
        _expert_product[(triton.cdiv(num_outputs, how.block_n), groups, how.places)](
            source,
            weight,
            target,
            chosen,
            counts,
            lists,
            weights,
            num_rows,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_chosen=num_chosen,
            places=how.places,
            gated=gated,
            single=single,
            exact=x.dtype == torch.float32,
            block_n=how.block_n,
            block_m=how.block_m,
            block_k=how.block_k,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **options,
        )
    block = min(triton.next_power_of_2(hidden_size), 1024)
    # The rows first: the other dimensions of a grid end at 65,535.
    _add_shares[(num_rows, triton.cdiv(hidden_size, block))](
        out,
        shares,
        hidden_size=hidden_size,
        num_chosen=num_chosen,
        block=block,
        num_warps=warps_for(block, 8),
        **options,
    )
    return out


def tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """By the number of pairs that an expert has, if they spread evenly."""
    if dtype == torch.float32:  # for tests
        return Tiles(32, 16, 32, num_warps=4, num_stages=2, places=2)
    if num_pairs <= MAX_SINGLE_PAIRS:
        return Tiles(32, 16, 128, num_warps=4, num_stages=4)
    pairs = num_pairs / num_experts
    if pairs <= 8:
        return Tiles(64, 16, 128, num_warps=4, num_stages=4)
    if pairs <= 48:
        return Tiles(64, 64, 64, num_warps=4, num_stages=4)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3, places=8)


@triton.jit
def _choose_row(
    logits,
    chosen,
    weights,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    normalize: tl.constexpr,
    block: tl.constexpr,
    places: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    expert = tl.arange(0, block)
    inside = expert < num_experts
    x = tl.load(logits + row * num_experts + expert, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    powers = tl.exp(x - tl.max(x))
    total = tl.sum(powers)
    is_number = total > 0
    probability = tl.where(is_number, powers / total, 0.0)
    probability = tl.where(inside, probability, -1.0)
    place = tl.arange(0, places)
    found = tl.zeros([places], tl.int32)
    found_weight = tl.zeros([places], tl.float32)
    for step in tl.static_range(num_chosen):
        largest = tl.max(probability)
        best = tl.min(tl.where(probability == largest, expert, block))
        found = tl.where(place == step, best, found)
        found_weight = tl.where(place == step, largest, found_weight)
        probability = tl.where(expert == best, -1.0, probability)
    if normalize:
        found_weight /= tl.sum(found_weight)
    found_weight = tl.where(is_number, found_weight, float("nan"))
    target = row * num_chosen + place
    tl.store(chosen + target, found, mask=place < num_chosen)
    tl.store(weights + target, found_weight.to(weights.dtype.element_ty), mask=place < num_chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _list_pairs(chosen, counts, lists, num_pairs, num_rows, block: tl.constexpr, pdl: tl.constexpr):
    """Those of one expert, in their order."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    lists += expert.to(tl.int64) * num_rows
    count = 0
    for first in range(0, num_pairs, block):
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
    target,
    chosen,
    counts,
    lists,
    weights,
    num_rows,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    num_chosen: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    single: tl.constexpr,
    exact: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of outputs, for some of an expert's pairs.

    gated: the first product. All pairs of a row share a row of `source`, the first half of W's rows
    are gates, and the activation is applied. Otherwise the second: each pair has a row of `source`,
    and the result is weighted.
    """
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(1)
    precision: tl.constexpr = "ieee" if exact else "tf32"
    if single:
        expert = tl.load(chosen + group)
        count = 1
    else:
        expert = group
        count = tl.load(counts + group)
        lists += group.to(tl.int64) * num_rows
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    halves: tl.constexpr = 2 if gated else 1
    weight += expert.to(tl.int64) * (halves * num_outputs * num_inputs)
    w_rows = weight + output[:, None].to(tl.int64) * num_inputs
    for first in range(tl.program_id(2) * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        if single:
            pair = group + tl.zeros([block_m], tl.int32)
        else:
            pair = tl.load(lists + member, mask=inside, other=0)
        row = pair // num_chosen if gated else pair
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
                up = tl.load(
                    w_rows + num_outputs * num_inputs + column[None, :], mask=w_mask, other=0.0
                )
                up_total = tl.dot(up, x, up_total, input_precision=precision)
        kind = target.dtype.element_ty
        result = total.to(kind).to(tl.float32)
        if gated:
            silu = (result / (1.0 + tl.exp(-result))).to(kind).to(tl.float32)
            result = silu * up_total.to(kind).to(tl.float32)
        else:
            share = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
            result = result * share[None, :]
        place = pair[None, :].to(tl.int64) * num_outputs + output[:, None]
        mask = (output < num_outputs)[:, None] & inside[None, :]
        tl.store(target + place, result.to(kind), mask=mask)


@triton.jit
def _add_shares(
    out,
    shares,
    hidden_size: tl.constexpr,
    num_chosen: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden_size
    total = tl.zeros([block], tl.float32)
    for place in tl.static_range(num_chosen):
        share = shares + (row * num_chosen + place) * hidden_size + column
        total += tl.load(share, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden_size + column, total.to(out.dtype.element_ty), mask=inside)
