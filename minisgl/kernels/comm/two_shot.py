"""Sums of many rows over ranks, in two shots; see one_shot.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.comm.mailbox import after, pointer
from minisgl.kernels.comm.one_shot import settle_row
from minisgl.kernels.comm.shared_memory import SharedMemory
from minisgl.kernels.launch import pdl_options, warps_for

# Of a program in two shots.
_ROWS_OF_ROUND = tl.constexpr(4)


def all_reduce(out: Tensor, part: Tensor, shared: SharedMemory) -> None:
    """Leave the sum of `part` in `out`, in two shots: of at most half the shared memory, and a
    size that divides by the ranks."""
    _launch(out, part, None, None, 0.0, shared)


def all_reduce_norm(
    out: Tensor, part: Tensor, rows: Tensor, weight: Tensor, eps: float, shared: SharedMemory
) -> None:
    """As all_reduce_norm of one_shot.py, in two shots, with the norm left in `out`."""
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
        after(rank, shared.addresses),
        shared.num_bytes // 2 // part.itemsize,
        shared.flags,
        after(rank, shared.flag_addresses),
        shared.rounds,
        max_programs,
        rank,
        size=size,
        block=block,
        share_block=triton.next_power_of_2(size // num_ranks),
        lanes=triton.next_power_of_2(num_ranks),
        many=many,
        # Two programs on a multiprocessor, of which one of many rows takes more registers.
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
    share_block: tl.constexpr,
    lanes: tl.constexpr,
    many: tl.constexpr,
    pdl: tl.constexpr,
):
    """Some rows. A rank's memory has the ranks' parts of its share of the columns first,
    [ranks, num_rows, share], and behind `to_results` elements the sums, [num_rows, size].

    A program has rounds of a few rows. The next round's first shot is under way while it waits for
    this one's, and so on, so that the links have always something to carry. What others have
    written is read past the L1 cache, which does not see it.
    """
    num_ranks: tl.constexpr = len(targets)
    column = tl.arange(0, block)
    inside = column < size
    factor = residual
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    stride = num_programs * _ROWS_OF_ROUND
    num_rounds = tl.cdiv(num_rows - program, stride)
    first_flags = program * num_ranks
    second_flags = (max_programs + program) * num_ranks
    this = tl.load(rounds + program) + 1
    last = this + num_rounds - 1

    memory = pointer(targets[num_ranks - 1], part.dtype.element_ty)
    end = tl.minimum(stride, num_rows)
    _first_shot(part, targets, program, end, num_rows, rank, size, share_block)
    _signal(flag_targets, first_flags + rank, this, lanes)
    for start in range(program, num_rows, stride):
        ahead = start + stride
        end = tl.minimum(ahead, num_rows)
        if many and ahead < num_rows:
            ahead_end = tl.minimum(ahead + stride, num_rows)
            _first_shot(part, targets, ahead, ahead_end, num_rows, rank, size, share_block)
            _signal(flag_targets, first_flags + rank, this + 1, lanes)
        _wait_for_all(flags + first_flags, this, num_ranks, lanes)
        _second_shot(memory, targets, to_results, start, end, num_rows, rank, size, share_block)
        _signal(flag_targets, second_flags + rank, this, lanes)
        if many and start > program:
            _wait_for_all(flags + second_flags, this - 1, num_ranks, lanes)
            _settle_rows(
                out, residual, memory + to_results, factor, eps, start - stride, start, size, block
            )
        this += 1
    _wait_for_all(flags + second_flags, last, num_ranks, lanes)
    start = program + (num_rounds - 1) * stride
    _settle_rows(out, residual, memory + to_results, factor, eps, start, num_rows, size, block)
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
    share_block: tl.constexpr,
):
    """Deal out the shares of some rows."""
    share: tl.constexpr = size // len(targets)
    column = tl.arange(0, share_block)
    for row in range(start, end, tl.num_programs(0)):
        own = part + row * size + column
        there = (rank * num_rows + row) * share + column
        _deal_out(own, targets, there, column < share, rank, share)


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
    share_block: tl.constexpr,
):
    """Add up the own share of some rows, for all."""
    kind: tl.constexpr = memory.dtype.element_ty
    share: tl.constexpr = size // len(targets)
    column = tl.arange(0, share_block)
    inside = column < share
    for row in range(start, end, tl.num_programs(0)):
        total = tl.zeros([share_block], tl.float32)
        for source in tl.static_range(len(targets)):
            here = memory + (source * num_rows + row) * share + column
            total += tl.load(here, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        there = to_results + row * size + rank * share + column
        for to in tl.static_range(len(targets)):
            results = pointer(targets[to], kind)
            tl.store(results + there, total.to(kind), mask=inside)


@triton.jit
def _settle_rows(
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
    """What is to be done with some rows' sums."""
    column = tl.arange(0, block)
    inside = column < size
    for row in range(start, end, tl.num_programs(0)):
        place = row * size + column
        total = tl.load(sums + place, mask=inside, other=0.0, cache_modifier=".cg")
        x = residual
        if residual is not None:
            x = tl.load(residual + place, mask=inside, other=0.0)
        settle_row(out, residual, total.to(tl.float32), x, factor, place, inside, eps, size)


@triton.jit
def _deal_out(own, targets, there, within, rank, share: tl.constexpr):
    """A row's shares, each to its rank. All are read before the first is written."""
    shares = ()
    for step in tl.static_range(len(targets)):
        at = own + (rank + 1 + step) % len(targets) * share
        shares += (tl.load(at, mask=within, other=0.0),)
    for step in tl.static_range(len(targets)):
        memory = pointer(targets[step], own.dtype.element_ty)
        tl.store(memory + there, shares[step], mask=within)


@triton.jit
def _signal(flag_targets, place, number, lanes: tl.constexpr):
    """To all ranks: that what this program has written so far is there, round `number`. A lane
    tells one."""
    lane = tl.arange(0, lanes)
    address = tl.zeros([lanes], tl.int64)
    for step in tl.static_range(len(flag_targets)):
        address = tl.where(lane == step, flag_targets[step], address)
    flag = address.to(tl.pointer_type(tl.int32)) + place
    # A few threads release what all have written before the barrier.
    tl.debug_barrier()
    said = tl.zeros([lanes], tl.int32) + number
    tl.atomic_xchg(flag, said, mask=lane < len(flag_targets), sem="release", scope="sys")


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
    # A load that acquires: Triton has none.
    said = tl.atomic_add(flags + lane, nothing, mask=real, sem="acquire", scope="sys")
    return tl.sum((real & (said - number < 0)).to(tl.int32))
