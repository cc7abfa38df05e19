"""What the GPUs of one host exchange, through memory that all of them can address.

A few rows go through inboxes (triton_mailbox.py), in one shot: every rank sends all of its rows to
all, and adds up what has come. The product that makes the rows can send them itself
(triton_linear.py), which spares a launch's latency; then only the second half is left to do here.

With many rows the bytes count. Their sum takes two shots: a rank sends each of the others a share
of the columns, adds up the share that is its own, and sends that to all. The elements carry no
stamps; a program tells those that have the same rows on the other ranks when its own are through.

A sum and the norm behind it are one kernel. All ranks add in one order, or take what one of them
has added, and so have the same sum, bit for bit.

Programs wait for those with the same rows on other ranks. That is safe where all run at once, as
they do at the sizes of common models, and where a GPU starts programs in the order of their
numbers, which none promises and all are known to do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import pdl_options, warps_for
from minisgl.kernels.triton_mailbox import Mailbox, after, pointer, receive, send

# Of a program in two shots.
_ROWS_OF_ROUND = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of each rank that the others address, for one stream."""

    own: Tensor  # [num_bytes] uint8
    addresses: tuple[int, ...]  # of each rank's
    # [2, programs, ranks] int32, zero at first: the last round of which a rank's program has done
    # the first shot, and the second. The ranks write.
    flags: Tensor
    flag_addresses: tuple[int, ...]  # of each rank's
    rounds: Tensor  # [programs] int32, zero at first: of each program, those so far
    bell: Mailbox  # of one row with two words

    @property
    def num_bytes(self) -> int:
        return len(self.own)


def sum_rows(part: Tensor, mailbox: Mailbox) -> Tensor:
    """The sum of all ranks' `part`, [num_rows, size] contiguous, rounded once to its dtype. A new
    tensor."""
    out = torch.empty_like(part)
    _launch_sum(out, part, None, None, 0.0, mailbox)
    return out


def sum_norm(
    part: Tensor, rows: Tensor, weight: Tensor, eps: float, mailbox: Mailbox
) -> tuple[Tensor, Tensor]:
    """triton_norm.add_rms_norm of `sum_rows` of `part` and `rows`; all contiguous."""
    out = torch.empty_like(part)
    _launch_sum(out, part, rows, weight, eps, mailbox)
    return out, rows


def received_norm(
    rows: Tensor, weight: Tensor, eps: float, mailbox: Mailbox
) -> tuple[Tensor, Tensor]:
    """sum_norm of parts that all ranks have sent already, or are about to."""
    out = torch.empty_like(rows)
    _launch_sum(out, None, rows, weight, eps, mailbox)
    return out, rows


def maximum(values: Tensor, mailbox: Mailbox, *, pdl: bool = True) -> Tensor:
    """The largest of each row of all ranks' `values` [num_rows, any] int64, whose columns are
    contiguous: [num_rows]. The mailbox has two words of 32 bits a row."""
    num_rows, num_columns = values.shape
    assert num_rows <= mailbox.max_rows and values.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _maximum_of_row[(num_rows,)](
        out,
        values,
        values.stride(0),
        num_columns,
        mailbox.inbox,
        mailbox.targets,
        mailbox.exchanges,
        mailbox.max_rows,
        mailbox.rank,
        columns=triton.next_power_of_2(num_columns),
        sources=triton.next_power_of_2(mailbox.num_ranks),
        num_warps=1,
        **pdl_options(values.device, pdl),
    )
    return out


def barrier(shared: SharedMemory) -> None:
    """Behind it, what all ranks queued before it is done and can be seen.

    Launched without overlap, so that the device has finished what came before in every respect.
    """
    anything = shared.own[:8].view(torch.int64).view(1, 1)
    maximum(anything, shared.bell, pdl=False)


def sum_many(out: Tensor, part: Tensor, shared: SharedMemory) -> None:
    """Leave sum_rows of `part` in `out`, in two shots: of at most half the shared memory, and a
    size that divides by the ranks."""
    _launch_two_shots(out, part, None, None, 0.0, shared)


def sum_norm_many(
    out: Tensor, part: Tensor, rows: Tensor, weight: Tensor, eps: float, shared: SharedMemory
) -> None:
    """As sum_norm, in two shots, with the norm left in `out`."""
    _launch_two_shots(out, part, rows, weight, eps, shared)


def gather(part: Tensor, shared: SharedMemory) -> Tensor:
    """All ranks' `part` [num_rows, width] side by side: [num_rows, ranks · width], a new tensor.

    part: of at most as many bytes as the shared memory; its rows are a multiple of 4 bytes.
    """
    rank, num_ranks = shared.bell.rank, shared.bell.num_ranks
    shared.own[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    barrier(shared)
    whole = part.new_empty((part.shape[0], num_ranks * part.shape[1]))
    num_words = whole.view(torch.int32).shape[1] // num_ranks
    block = 4096
    _gather_row[(triton.cdiv(num_words, block), num_ranks, part.shape[0])](
        whole.view(torch.int32),
        after(rank, shared.addresses),
        num_words,
        rank,
        block=block,
        num_warps=8,
    )
    barrier(shared)  # nobody writes there before all have read
    return whole


def _launch_sum(
    out: Tensor,
    part: Tensor | None,
    rows: Tensor | None,
    weight: Tensor | None,
    eps: float,
    mailbox: Mailbox,
) -> None:
    num_rows, size = out.shape
    assert all(tensor is None or tensor.is_contiguous() for tensor in (part, rows))
    assert num_rows <= mailbox.max_rows and mailbox.takes(out)
    block = triton.next_power_of_2(size)
    _sum_row[(num_rows,)](
        out,
        part,
        rows,
        weight,
        eps,
        mailbox.inbox,
        mailbox.targets,
        mailbox.exchanges,
        mailbox.max_rows,
        mailbox.rank,
        size=size,
        block=block,
        together=2 if mailbox.num_ranks == 2 else 4,
        num_warps=warps_for(block, 8),
        **pdl_options(out.device, True),
    )


def _launch_two_shots(
    out: Tensor,
    part: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    eps: float,
    shared: SharedMemory,
) -> None:
    (num_rows, size), num_ranks = part.shape, shared.bell.num_ranks
    rank = shared.bell.rank
    assert part.is_contiguous() and (rows is None or rows.is_contiguous())
    assert size % num_ranks == 0 and 2 * part.nbytes <= shared.num_bytes
    max_programs = shared.flags.shape[1]
    many = num_rows > max_programs * _ROWS_OF_ROUND.value  # more than a round
    block = triton.next_power_of_2(size)
    _sum_in_two_shots[(min(num_rows, max_programs),)](
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


@triton.jit(do_not_specialize=["rank"])
def _sum_row(
    out,
    part,
    residual,
    weight,
    eps,
    inbox,
    targets,
    exchanges,
    max_rows,
    rank,
    size: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    pdl: tl.constexpr,
):
    """A row, of which `part` is sent unless it has been."""
    num_ranks: tl.constexpr = len(targets)
    column = tl.arange(0, block)
    inside = column < size
    factor = residual
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = row * size + column
    exchange = tl.load(exchanges + row) + 1
    half = (exchange & 1) * num_ranks
    if part is not None:
        own = tl.load(part + place, mask=inside, other=0.0)
        there = ((half + rank) * max_rows + row) * size + column
        send(targets, there, own, exchange, inside)
    x = residual
    if residual is not None:
        x = tl.load(residual + place, mask=inside, other=0.0)

    total = tl.zeros([block], tl.float32)
    # As many ranks at once as the registers hold.
    for first in tl.static_range(0, num_ranks, together):
        source = first + tl.arange(0, together)[:, None]
        here = ((half + source) * max_rows + row) * size + column[None, :]
        expected = (source < num_ranks) & inside[None, :]
        parts = receive(inbox + here, expected, exchange, out.dtype.element_ty)
        total += tl.sum(parts.to(tl.float32), 0)
    _settle_row(out, residual, total, x, factor, place, inside, eps, size)
    # Behind the sums, which no thread passes before all have read the count.
    tl.store(exchanges + row, exchange)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _sum_in_two_shots(
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
    _tell(flag_targets, first_flags + rank, this, lanes)
    for start in range(program, num_rows, stride):
        ahead = start + stride
        end = tl.minimum(ahead, num_rows)
        if many and ahead < num_rows:
            ahead_end = tl.minimum(ahead + stride, num_rows)
            _first_shot(part, targets, ahead, ahead_end, num_rows, rank, size, share_block)
            _tell(flag_targets, first_flags + rank, this + 1, lanes)
        _wait_for_all(flags + first_flags, this, num_ranks, lanes)
        _second_shot(memory, targets, to_results, start, end, num_rows, rank, size, share_block)
        _tell(flag_targets, second_flags + rank, this, lanes)
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
        _settle_row(out, residual, total.to(tl.float32), x, factor, place, inside, eps, size)


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
def _settle_row(out, residual, total, x, factor, place, inside, eps, size: tl.constexpr):
    """Leave a row's sum or, where it is added to a residual, that and its norm."""
    kind: tl.constexpr = out.dtype.element_ty
    if residual is None:
        tl.store(out + place, total.to(kind), mask=inside)
    else:
        added = (x.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
        tl.store(residual + place, added, mask=inside)
        wide = added.to(tl.float32)
        quotient = (wide * tl.rsqrt(tl.sum(wide * wide) * (1.0 / size) + eps)).to(kind)
        product = factor.to(tl.float32) * quotient.to(tl.float32)
        tl.store(out + place, product.to(kind), mask=inside)


@triton.jit
def _tell(flag_targets, place, number, lanes: tl.constexpr):
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


@triton.jit(do_not_specialize=["stride", "num_columns", "rank"])
def _maximum_of_row(
    out,
    values,
    stride,
    num_columns,
    inbox,
    targets,
    exchanges,
    max_rows,
    rank,
    columns: tl.constexpr,
    sources: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    lowest = -(2**63)
    found = tl.load(values + row * stride + column, mask=column < num_columns, other=lowest)
    best = tl.max(found)
    exchange = tl.load(exchanges + row) + 1
    num_ranks: tl.constexpr = len(targets)
    half = (exchange & 1) * num_ranks
    word = tl.arange(0, 2)
    there = ((half + rank) * max_rows + row) * 2 + word
    own = (best >> (32 * word)).to(tl.int32)
    send(targets, there, own, exchange, word < 2)
    source = tl.arange(0, sources)
    here = ((half + source) * max_rows + row)[:, None] * 2 + word[None, :]
    expected = (source < num_ranks)[:, None] & (word < 2)[None, :]
    halves = receive(inbox + here, expected, exchange, tl.int32)
    all_best = tl.sum((halves.to(tl.int64) & 0xFFFFFFFF) << (32 * word)[None, :], 1)
    tl.store(out + row, tl.max(tl.where(source < num_ranks, all_best, lowest)))
    tl.store(exchanges + row, exchange)


@triton.jit(do_not_specialize=["num_words", "rank"])
def _gather_row(whole, targets, num_words, rank, block: tl.constexpr):
    """A part of a row of one rank. Past the L1 cache, which does not see what others write."""
    word = tl.program_id(0) * block + tl.arange(0, block)
    step, num_ranks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    inside = word < num_words
    address = targets[0]
    for other in tl.static_range(1, len(targets)):
        address = tl.where(step == other, targets[other], address)
    part = pointer(address, tl.int32)
    words = tl.load(part + row * num_words + word, mask=inside, other=0, cache_modifier=".cg")
    place = (row * num_ranks + (rank + 1 + step) % num_ranks) * num_words + word
    tl.store(whole + place, words, mask=inside)
