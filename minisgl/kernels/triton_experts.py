"""A mixture of experts in Triton. The references, and the rounding that is kept to, are those of
experts.py.

The time is that of reading the weights of the experts that any row has chosen, once; of many rows,
that of the products. Nothing here asks the host: which experts are read follows from what the
router has written. A row and one of its experts are a *pair*. There are two ways:

- *few* rows, of which two seldom share an expert (where they do, its weights come out of L2): two
  launches, each of which finds the chosen experts in the logits by itself. In the second, a program
  has some outputs of all the experts of one row. It asks for their weights before the first launch
  has ended, since the logits are older than that, holds them in registers, and adds everything up.
- *many* rows: one program for each expert lists its pairs. The grid of a product has a place for
  every expert, and several for its pairs; a program whose expert has none left returns at once. W
  is on the left, as in triton_linear.py, because an expert has few pairs. The second product leaves
  each pair's weighted share, and the last kernel adds up those of a row.

A row's sum does not depend on the other rows, but for the tiles that its experts are worked on in.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.experts import ExpertWeights, Routing
from minisgl.kernels.triton_launch import (
    fitting_stages,
    pdl_options,
    shared_bytes_of,
    warps_for,
)
from minisgl.kernels.triton_linear import from_here

MAX_FEW_PAIRS = 8
_MAX_LISTED = 4096  # pairs that a program looks at at a time
_HELD = 48 << 10  # elements of W in the registers of a program at most


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is shared out. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of the gated product, rows of either half
    block_m: int  # pairs
    block_k: int
    num_warps: int
    num_stages: int
    places: int = 1  # programs that share an expert's pairs


@dataclass(frozen=True, slots=True)
class FewTiles:
    """How the products of few rows are shared out: the gated one, for one pair in a program, and
    the one behind it."""

    inner: Tiles = Tiles(32, 16, 128, num_warps=4, num_stages=4)
    block_n: int = 8  # outputs in a program
    block_k: int = 256
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class ManyTiles:
    """How the products of many rows are shared out: the gated one and the one behind it."""

    inner: Tiles
    outer: Tiles


def mix(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: Tensor | None = None,
    *,
    how: FewTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As mix of experts.py, all contiguous; or added to `residual`, like x, in its place: then also
    the squares that a triton_linear.Norm of it takes.

    Of equally good experts the lower comes first. A row whose probabilities are NaN chooses experts
    that there are, each once, and is NaN: a number out of range, or many of the same, would let the
    kernels leave their tensors. `pdl`: overlap launches where the device can, by the rule of
    triton_launch.py.
    """
    tensors = (x, logits, *experts) if residual is None else (x, logits, *experts, residual)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if how is None:
        how = tiles(len(x), experts, routing, shared_bytes_of(x.device))
    if len(x) == 0:
        return _place_for_sum(x, residual, 1)
    if isinstance(how, FewTiles):
        return _mix_few(x, logits, experts, routing, residual, how, pdl)
    return _mix_many(x, logits, experts, routing, residual, how, pdl)


def tiles(
    num_rows: int, experts: ExpertWeights, routing: Routing, shared_bytes: int
) -> FewTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. For an H200; where a
    program may have less than its shared memory, fewer tiles are in flight."""
    num_experts, _, size = experts.down.shape
    itemsize = experts.down.itemsize
    num_pairs = num_rows * routing.num_chosen
    if num_pairs <= MAX_FEW_PAIRS:
        few = FewTiles()
        held = triton.next_power_of_2(routing.num_chosen) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= _HELD:
            block_n = min(1 << (_HELD // held).bit_length() - 1, few.block_n)
            return replace(
                few, inner=_fitting(few.inner, 2, itemsize, shared_bytes), block_n=block_n
            )
    if experts.down.dtype == torch.float32:  # for tests
        slow = Tiles(32, 16, 32, num_warps=4, num_stages=2, places=2)
        return ManyTiles(slow, slow)
    pairs = num_pairs / num_experts
    if pairs <= 8:
        inner, outer = Tiles(64, 16, 128, 4, 3), Tiles(64, 16, 128, 4, 3)
    elif pairs <= 24:
        inner, outer = Tiles(64, 32, 64, 4, 3), Tiles(128, 32, 64, 4, 4)
    elif pairs <= 48:
        inner, outer = Tiles(64, 64, 64, 4, 3, places=2), Tiles(128, 64, 64, 4, 4, places=2)
    elif pairs <= 384:
        inner, outer = Tiles(64, 128, 64, 4, 3, places=4), Tiles(128, 64, 64, 4, 4, places=8)
    else:
        inner, outer = Tiles(128, 128, 64, 8, 4, places=8), Tiles(128, 256, 64, 8, 3, places=4)
    return ManyTiles(
        inner=_fitting(inner, 2, itemsize, shared_bytes),
        outer=_fitting(outer, 1, itemsize, shared_bytes),
    )


def _fitting(how: Tiles, halves: int, itemsize: int, shared_bytes: int) -> Tiles:
    """As many tiles in flight as there is room for. halves: 2 of the gated product, else 1."""
    stage_bytes = (how.block_n * halves + how.block_m) * how.block_k * itemsize
    return replace(how, num_stages=fitting_stages(how.num_stages, stage_bytes, shared_bytes))


def _mix_few(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: Tensor | None,
    how: FewTiles,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:
    num_rows, hidden_size = x.shape
    num_experts, _, size = experts.down.shape
    numbers = {
        "hidden_size": hidden_size,
        "size": size,
        "num_experts": num_experts,
        "num_chosen": routing.num_chosen,
        "experts_block": triton.next_power_of_2(num_experts),
        **pdl_options(x.device, pdl),
    }
    inner = x.new_empty((num_rows * routing.num_chosen, size))
    _few_inner[(triton.cdiv(size, how.inner.block_n), len(inner))](
        inner,
        x,
        logits,
        experts.gate_up,
        exact=x.dtype == torch.float32,
        block_n=how.inner.block_n,
        block_m=how.inner.block_m,
        block_k=how.inner.block_k,
        num_warps=how.inner.num_warps,
        num_stages=how.inner.num_stages,
        **numbers,
    )
    num_blocks = triton.cdiv(hidden_size, how.block_n)
    out, squares = _place_for_sum(x, residual, num_blocks)
    _few_outer[(num_blocks, num_rows)](
        out,
        squares,
        inner,
        logits,
        experts.down,
        normalize=routing.normalize,
        places=triton.next_power_of_2(routing.num_chosen),
        block_n=how.block_n,
        block_k=how.block_k,
        pieces=triton.cdiv(size, how.block_k),
        num_warps=how.num_warps,
        **numbers,
    )
    return out, squares


def _mix_many(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: Tensor | None,
    how: ManyTiles,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:
    num_rows, hidden_size = x.shape
    num_experts, _, size = experts.down.shape
    num_chosen, options = routing.num_chosen, pdl_options(x.device, pdl)
    chosen, weights = choose(logits, routing, pdl=pdl)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    # An expert is chosen once by a row at most.
    lists = torch.empty((num_experts, num_rows), dtype=torch.int32, device=x.device)
    block = min(triton.next_power_of_2(chosen.numel()), _MAX_LISTED)
    _list_pairs[(num_experts,)](
        chosen,
        counts,
        lists,
        chosen.numel(),
        num_rows,
        block=block,
        num_warps=warps_for(block, 8),
        **options,
    )
    inner = x.new_empty((chosen.numel(), size))
    shares = x.new_empty((chosen.numel(), hidden_size))
    for source, weight, target, product in (
        (x, experts.gate_up, inner, how.inner),
        (inner, experts.down, shares, how.outer),
    ):
        num_outputs, num_inputs = target.shape[1], source.shape[1]
        across = triton.cdiv(num_outputs, product.block_n) * product.places
        _expert_product[(across, num_experts)](
            source,
            weight,
            target,
            counts,
            lists,
            weights,
            num_rows,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_chosen=num_chosen,
            places=product.places,
            gated=source is x,
            exact=x.dtype == torch.float32,
            block_n=product.block_n,
            block_m=product.block_m,
            block_k=product.block_k,
            num_warps=product.num_warps,
            num_stages=product.num_stages,
            **options,
        )
    block = min(triton.next_power_of_2(hidden_size), 1024)
    num_blocks = triton.cdiv(hidden_size, block)
    out, squares = _place_for_sum(x, residual, num_blocks)
    # The rows first: the other dimensions of a grid end at 65,535.
    _add_shares[(num_rows, num_blocks)](
        out,
        squares,
        shares,
        hidden_size=hidden_size,
        num_chosen=num_chosen,
        block=block,
        num_warps=warps_for(block, 8),
        **options,
    )
    return out, squares


def _place_for_sum(
    x: Tensor, residual: Tensor | None, num_blocks: int
) -> tuple[Tensor, Tensor | None]:
    """Where a row's sum goes and, if it is added to a residual, the squares of each block."""
    if residual is None:
        return torch.empty_like(x), None
    return residual, x.new_empty((len(x), num_blocks), dtype=torch.float32)


def choose(logits: Tensor, routing: Routing, *, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """As choose_reference of experts.py; logits contiguous."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty((num_rows, routing.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=logits.dtype)
    _choose_row[(num_rows,)](
        logits,
        chosen,
        weights,
        num_experts=num_experts,
        num_chosen=routing.num_chosen,
        normalize=routing.normalize,
        experts_block=triton.next_power_of_2(num_experts),
        num_warps=4,
        **pdl_options(logits.device, pdl),
    )
    return chosen, weights


@triton.jit
def _rank(logits, num_experts: tl.constexpr, block: tl.constexpr):
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
def _weights(probability, rank, num_chosen: tl.constexpr, normalize: tl.constexpr):
    """Those of the chosen experts; 0 for the others."""
    weight = tl.where(rank < num_chosen, probability, 0.0)
    if normalize:
        weight /= tl.sum(weight)
    return weight


@triton.jit
def _choose_row(
    logits,
    chosen,
    weights,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    normalize: tl.constexpr,
    experts_block: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    probability, rank = _rank(logits + row * num_experts, num_experts, experts_block)
    weight = _weights(probability, rank, num_chosen, normalize)
    place = row * num_chosen + rank
    tl.store(chosen + place, tl.arange(0, experts_block), mask=rank < num_chosen)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=rank < num_chosen)


@triton.jit
def _few_inner(
    inner,
    x,
    logits,
    weight,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    experts_block: tl.constexpr,
    exact: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of a pair's activations."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    row = pair // num_chosen
    _, rank = _rank(logits + row * num_experts, num_experts, experts_block)
    is_mine = rank == pair % num_chosen
    expert = tl.sum(tl.where(is_mine, tl.arange(0, experts_block), 0))
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    weight += expert.to(tl.int64) * (2 * size * hidden_size)
    rows = row + tl.zeros([block_m], tl.int32)
    inside = tl.arange(0, block_m) == 0
    gate, up = _multiply(
        weight, x, output, rows, inside, size, hidden_size, True, exact, block_n, block_m, block_k
    )
    result = _activated(gate, up, inner.dtype.element_ty)
    place = inner + pair * size + output[:, None] + tl.zeros([1, block_m], tl.int32)
    tl.store(place, result, mask=(output < size)[:, None] & inside[None, :])


@triton.jit
def _multiply(
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


@triton.jit
def _activated(gate, up, kind: tl.constexpr):
    gate = gate.to(kind).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return (silu * up.to(kind).to(tl.float32)).to(kind)


@triton.jit
def _few_outer(
    out,
    squares,
    inner,
    logits,
    weight,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    experts_block: tl.constexpr,
    normalize: tl.constexpr,
    places: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of a row's sum over its experts; added to what is in `out` if there are squares."""
    row = tl.program_id(1)
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    place = tl.arange(0, places)
    # Older than the kernel before, as the weights are.
    probability, rank = _rank(logits + row * num_experts, num_experts, experts_block)
    share = _weights(probability, rank, num_chosen, normalize)
    is_here = rank[:, None] == place[None, :]
    expert = tl.sum(tl.where(is_here, tl.arange(0, experts_block)[:, None], 0), 0)
    share = tl.sum(tl.where(is_here, share[:, None], 0.0), 0)
    w_at = weight + expert.to(tl.int64)[:, None, None] * (hidden_size * size)
    w_at += output[None, :, None] * size
    is_output = (place < num_chosen)[:, None, None] & (output < hidden_size)[None, :, None]
    w, rows = (), ()
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, None, :]
        w += (tl.load(w_at + k, mask=is_output & (k < size), other=0.0),)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inner += (row * num_chosen + place)[:, None, None] * size
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, None, :]
        mask = (place < num_chosen)[:, None, None] & (k < size)
        rows += (tl.load(inner + k, mask=mask, other=0.0),)
    out += row * hidden_size + output
    if squares is not None:
        residual = tl.load(out, mask=output < hidden_size, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all loads are on their way

    product = tl.zeros([places, block_n, block_k], tl.float32)
    for i in tl.static_range(pieces):
        product += from_here(w[i], pdl).to(tl.float32) * rows[i].to(tl.float32)
    kind = out.dtype.element_ty
    result = tl.sum(product, 2).to(kind).to(tl.float32) * share.to(kind).to(tl.float32)[:, None]
    result = tl.sum(result.to(kind).to(tl.float32), 0).to(kind)
    if squares is not None:
        result = (residual + result.to(tl.float32)).to(kind)
        wide = tl.where(output < hidden_size, result.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide))
    tl.store(out, result, mask=output < hidden_size)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _list_pairs(chosen, counts, lists, num_pairs, num_rows, block: tl.constexpr, pdl: tl.constexpr):
    """Those of one expert, in their order."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    target,
    counts,
    lists,
    weights,
    num_rows,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    num_chosen: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
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
    # The programs of one expert start together, so that its weights come from memory once.
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    output = tl.program_id(0) % across * block_n + tl.arange(0, block_n)
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    weight += expert.to(tl.int64) * ((2 if gated else 1) * num_outputs * num_inputs)
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        row = pair // num_chosen if gated else pair
        total, up_total = _multiply(
            weight, source, output, row, inside, num_outputs, num_inputs, gated, exact,
            block_n, block_m, block_k,
        )  # fmt: skip
        kind = target.dtype.element_ty
        if gated:
            result = _activated(total, up_total, kind)
        else:
            share = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
            result = total.to(kind).to(tl.float32) * share[None, :]
        target_at = target + pair[None, :].to(tl.int64) * num_outputs + output[:, None]
        mask = (output < num_outputs)[:, None] & inside[None, :]
        tl.store(target_at, result.to(kind), mask=mask)


@triton.jit
def _add_shares(
    out,
    squares,
    shares,
    hidden_size: tl.constexpr,
    num_chosen: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of a row's sum over its experts; added to what is in `out` if there are squares."""
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
    out += row * hidden_size + column
    result = total.to(out.dtype.element_ty)
    if squares is not None:
        residual = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        result = (residual + result.to(tl.float32)).to(result.dtype)
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide))
    tl.store(out, result, mask=inside)
