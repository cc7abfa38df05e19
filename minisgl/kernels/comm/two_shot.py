"""All-reduce of many rows in two shots.

A rank sends each of the others one part of the columns (reduce-scatter), adds up the part that is
its own, and sends the result to all (all-gather). Elements carry no flags: a program signals those
with the same rows on the other ranks when its own are written. All ranks take the sum that one of
them has computed, and so have the same, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.comm.mailbox import addresses_after, pointer
from minisgl.kernels.comm.one_shot import finish_row
from minisgl.kernels.comm.shared_memory import SharedMemory
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for

# Rows of a program in one round.
_ROWS_OF_ROUND = tl.constexpr(4)


def all_reduce(out: Tensor, part: Tensor, shared: SharedMemory) -> None:
    """Writes the sum of all ranks' `part` to `out`; both [num_rows, size] contiguous.

    The size must be divisible by the ranks, and `part` fit into half of the shared memory.
    """
    _launch(out, part, None, None, 0.0, shared)


def all_reduce_norm(
    out: Tensor, part: Tensor, rows: Tensor, weight: Tensor, eps: float, shared: SharedMemory
) -> None:
    """Adds the sum of all ranks' `part` to `rows`, and writes the norm of these to `out`. What
    all_reduce asks of the tensors holds here, too."""
    _launch(out, part, rows, weight, eps, shared)


def _launch(
    out: Tensor,
    part: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    eps: float,
    shared: SharedMemory,
) -> None:
    (num_rows, size), num_ranks = part.shape, shared.barrier_mailbox.num_ranks
    rank = shared.barrier_mailbox.rank
    assert part.is_contiguous() and (rows is None or rows.is_contiguous())
    assert size % num_ranks == 0 and 2 * part.nbytes <= shared.num_bytes
    max_programs = shared.flags.shape[1]
    many = num_rows > max_programs * _ROWS_OF_ROUND.value  # more than a round
    block = triton.next_power_of_2(size)
    _all_reduce_rows[(min(num_rows, max_programs),)](
        out,
        part,
        rows,
        weight,
        eps,
        num_rows,
        addresses_after(rank, shared.addresses),
        shared.num_bytes // 2 // part.itemsize,
        shared.flags,
        addresses_after(rank, shared.flag_addresses),
        shared.rounds,
        max_programs,
        rank,
        size=size,
        block=block,
        width_block=triton.next_power_of_2(size // num_ranks),
        lanes=triton.next_power_of_2(num_ranks),
        many=many,
        # Two programs on an SM, of which one of many rows takes more registers.
        num_warps=warps_for(block, 32 if many else 16),
        **pdl_options(part.device, True),
    )


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _all_reduce_rows(
    out,
    part,
    residual,
    weight,
    eps,
    num_rows,
    targets,
    to_results,
    flags,
    flag_targets,
    rounds,
    max_programs,
    rank,
    size: tl.constexpr,
    block: tl.constexpr,
    width_block: tl.constexpr,
    lanes: tl.constexpr,
    many: tl.constexpr,
    pdl: tl.constexpr,
):
    """Some rows. A rank's memory holds the ranks' summands of its part of the columns, [ranks,
    num_rows, width], and `to_results` elements later the sums, [num_rows, size].

    A program works in rounds of a few rows. The first shot of the next round is sent while it waits
    for that of this one, and so on, so that the links are always busy. What other ranks have
    written is read past the L1 cache, which is not coherent with it.
    """
    num_ranks: tl.constexpr = len(targets)
    column = tl.arange(0, block)
    inside = column < size
    factor = residual
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(pdl)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    stride = num_programs * _ROWS_OF_ROUND
    num_rounds = tl.cdiv(num_rows - program, stride)
    first_flags = program * num_ranks
    second_flags = (max_programs + program) * num_ranks
    this = tl.load(rounds + program) + 1
    last = this + num_rounds - 1

    memory = pointer(targets[num_ranks - 1], part.dtype.element_ty)
    end = tl.minimum(stride, num_rows)
    _first_shot(part, targets, program, end, num_rows, rank, size, width_block)
    _signal(flag_targets, first_flags + rank, this, lanes)
    for start in range(program, num_rows, stride):
        ahead = start + stride
        end = tl.minimum(ahead, num_rows)
        if many and ahead < num_rows:
            ahead_end = tl.minimum(ahead + stride, num_rows)
            _first_shot(part, targets, ahead, ahead_end, num_rows, rank, size, width_block)
            _signal(flag_targets, first_flags + rank, this + 1, lanes)
        _wait_for_all(flags + first_flags, this, num_ranks, lanes)
        _second_shot(memory, targets, to_results, start, end, num_rows, rank, size, width_block)
        _signal(flag_targets, second_flags + rank, this, lanes)
        if many and start > program:
            _wait_for_all(flags + second_flags, this - 1, num_ranks, lanes)
            _finish_rows(
                out, residual, memory + to_results, factor, eps, start - stride, start, size, block
            )
        this += 1
    _wait_for_all(flags + second_flags, last, num_ranks, lanes)
    start = program + (num_rounds - 1) * stride
    _finish_rows(out, residual, memory + to_results, factor, eps, start, num_rows, size, block)
    tl.store(rounds + program, last)


@triton.jit
def _first_shot(
    part,
    targets,
    start,
    end,
    num_rows,
    rank,
    size: tl.constexpr,
    width_block: tl.constexpr,
):
    """Sends each rank its columns of some rows."""
    width: tl.constexpr = size // len(targets)
    column = tl.arange(0, width_block)
    for row in range(start, end, tl.num_programs(0)):
        own = part + row * size + column
        there = (rank * num_rows + row) * width + column
        _scatter(own, targets, there, column < width, rank, width)


@triton.jit
def _second_shot(
    memory,
    targets,
    to_results,
    start,
    end,
    num_rows,
    rank,
    size: tl.constexpr,
    width_block: tl.constexpr,
):
    """Adds up this rank's columns of some rows, and sends the sums to all."""
    kind: tl.constexpr = memory.dtype.element_ty
    width: tl.constexpr = size // len(targets)
    column = tl.arange(0, width_block)
    inside = column < width
    for row in range(start, end, tl.num_programs(0)):
        total = tl.zeros([width_block], tl.float32)
        for source in tl.static_range(len(targets)):
            here = memory + (source * num_rows + row) * width + column
            total += tl.load(here, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        there = to_results + row * size + rank * width + column
        for to in tl.static_range(len(targets)):
            results = pointer(targets[to], kind)
            tl.store(results + there, total.to(kind), mask=inside)


@triton.jit
def _finish_rows(
    out,
    residual,
    sums,
    factor,
    eps,
    start,
    end,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """Finishes some rows, whose sums are complete."""
    column = tl.arange(0, block)
    inside = column < size
    for row in range(start, end, tl.num_programs(0)):
        place = row * size + column
        total = tl.load(sums + place, mask=inside, other=0.0, cache_modifier=".cg")
        x = residual
        if residual is not None:
            x = tl.load(residual + place, mask=inside, other=0.0)
        finish_row(out, residual, total.to(tl.float32), x, factor, place, inside, eps, size)


@triton.jit
def _scatter(own, targets, there, within, rank, width: tl.constexpr):
    """Sends each rank its columns of a row. All are read before the first is written."""
    parts = ()
    for step in tl.static_range(len(targets)):
        at = own + (rank + 1 + step) % len(targets) * width
        parts += (tl.load(at, mask=within, other=0.0),)
    for step in tl.static_range(len(targets)):
        memory = pointer(targets[step], own.dtype.element_ty)
        tl.store(memory + there, parts[step], mask=within)


@triton.jit
def _signal(flag_targets, place, number, lanes: tl.constexpr):
    """Signals all ranks that this program's writes of round `number` are visible, one rank a
    lane."""
    lane = tl.arange(0, lanes)
    address = tl.zeros([lanes], tl.int64)
    for step in tl.static_range(len(flag_targets)):
        address = tl.where(lane == step, flag_targets[step], address)
    flag = address.to(tl.pointer_type(tl.int32)) + place
    # A few threads release what all have written before the barrier.
    tl.debug_barrier()
    seen = tl.zeros([lanes], tl.int32) + number
    tl.atomic_xchg(flag, seen, mask=lane < len(flag_targets), sem="release", scope="sys")


@triton.jit
def _wait_for_all(flags, number, num_ranks: tl.constexpr, lanes: tl.constexpr):
    missing = _count_missing(flags, number, num_ranks, lanes)
    while missing > 0:
        missing = _count_missing(flags, number, num_ranks, lanes)


@triton.jit
def _count_missing(flags, number, num_ranks: tl.constexpr, lanes: tl.constexpr):
    lane = tl.arange(0, lanes)
    nothing = tl.zeros([lanes], tl.int32)
    real = lane < num_ranks
    # In place of a load with acquire semantics, which Triton lacks.
    seen = tl.atomic_add(flags + lane, nothing, mask=real, sem="acquire", scope="sys")
    return tl.sum((real & (seen - number < 0)).to(tl.int32))
