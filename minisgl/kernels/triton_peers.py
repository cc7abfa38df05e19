"""What the GPUs of one host exchange, through memory that all of them can address.

For the few rows of a decode step a collective costs latency, not bandwidth. So nobody asks and
nobody waits twice: a rank writes what it has straight into an inbox that each of the others keeps
for it, and looks into its own until everything has come. Each 4 bytes travel with 4 bytes that say
which exchange they belong to, and a store of 8 bytes arrives whole, so that no other signal is
needed (the LL protocol of NCCL; Hu et al., arXiv 2507.04786). A sum and the norm behind it are one
kernel.

The exchanges of a row are counted on the device, by each rank for itself; all come to the same
count, since all run the same kernels in the same order. Inboxes alternate between two halves. A
half is written again two exchanges later, by a rank that has seen the one in between, which its
owner sent only after it was done with that half.

Many rows go without stamps: a rank writes into memory of its own, and the others read it behind a
`barrier`. A sum is then in two shots: each rank adds up its share, and writes it to all.

All add in the order of ranks, or take what one has added, and so have the same sum, bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import pdl_options, warps_for

_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Where ranks leave each other words of 4 bytes, for one stream."""

    inbox: Tensor  # [2, ranks, max_rows, num_words] int64, zero at first, which the others write
    addresses: Tensor  # [ranks] int64 on the device: of each rank's inbox
    exchanges: Tensor  # [max_rows] int32, zero at first: of each row, those so far
    rank: int

    @property
    def num_ranks(self) -> int:
        return self.inbox.shape[1]

    @property
    def max_rows(self) -> int:
        return self.inbox.shape[2]

    @property
    def num_words(self) -> int:
        return self.inbox.shape[3]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of each rank that the others read or write between barriers, for one stream."""

    own: Tensor  # [num_bytes] uint8; sums are in the first half, their results in the second
    addresses: Tensor  # [ranks] int64 on the device: of each rank's
    bell: Mailbox  # of one row with two words

    @property
    def num_bytes(self) -> int:
        return len(self.own)


def sum_rows(part: Tensor, mailbox: Mailbox, *, pdl: bool = True) -> Tensor:
    """The sum of all ranks' `part`, [num_rows, size] contiguous, rounded once to its dtype. A new
    tensor. size is even."""
    out = torch.empty_like(part)
    _launch_sum(out, part, None, None, 0.0, mailbox, pdl)
    return out


def sum_norm(
    part: Tensor, rows: Tensor, weight: Tensor, eps: float, mailbox: Mailbox, *, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """triton_norm.add_rms_norm of `sum_rows` of `part` and `rows`; all contiguous."""
    out = torch.empty_like(part)
    _launch_sum(out, part, rows, weight, eps, mailbox, pdl)
    return out, rows


def maximum(values: Tensor, mailbox: Mailbox, *, pdl: bool = True) -> Tensor:
    """The largest of each row of all ranks' `values` [num_rows, any] int64, whose columns are
    contiguous: [num_rows]. The mailbox has two words a row."""
    num_rows, num_columns = values.shape
    assert num_rows <= mailbox.max_rows and values.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _maximum_of_row[(num_rows,)](
        out,
        values,
        values.stride(0),
        num_columns,
        mailbox.inbox,
        mailbox.addresses,
        mailbox.exchanges,
        mailbox.max_rows,
        columns=triton.next_power_of_2(num_columns),
        rank=mailbox.rank,
        num_ranks=mailbox.num_ranks,
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


def sum_many(part: Tensor, shared: SharedMemory) -> Tensor:
    """As sum_rows, in two shots. The result lies in the shared memory until its next use.

    part: contiguous, of at most half the shared memory; each rank's share is a whole number of
    16 bytes.
    """
    num_bytes, num_ranks = part.nbytes, shared.bell.num_ranks
    assert num_bytes % (16 * num_ranks) == 0 and 2 * num_bytes <= shared.num_bytes
    shared.own[:num_bytes].view(part.dtype).view(part.shape).copy_(part)
    barrier(shared)
    share, block = part.numel() // num_ranks, 1024
    _sum_share[(triton.cdiv(share, block),)](
        shared.addresses,
        share,
        shared.num_bytes // 2 // part.itemsize,
        block=block,
        kind=_KINDS[part.dtype],
        rank=shared.bell.rank,
        num_ranks=num_ranks,
        num_warps=4,
    )
    barrier(shared)
    half = shared.num_bytes // 2
    return shared.own[half : half + num_bytes].view(part.dtype).view(part.shape)


def gather(part: Tensor, shared: SharedMemory) -> Tensor:
    """All ranks' `part` [num_rows, width] side by side: [num_rows, ranks · width], a new tensor.

    part: of at most as many bytes as the shared memory; its rows are a multiple of 4 bytes.
    """
    num_ranks = shared.bell.num_ranks
    shared.own[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    barrier(shared)
    whole = part.new_empty((part.shape[0], num_ranks * part.shape[1]))
    num_words = whole.view(torch.int32).shape[1] // num_ranks
    block = 4096
    _gather_row[(triton.cdiv(num_words, block), num_ranks, part.shape[0])](
        whole.view(torch.int32), shared.addresses, num_words, block=block, num_warps=8
    )
    barrier(shared)  # nobody writes there before all have read
    return whole


def _launch_sum(
    out: Tensor,
    part: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    eps: float,
    mailbox: Mailbox,
    pdl: bool,
) -> None:
    num_rows, size = part.shape
    assert part.is_contiguous() and (rows is None or rows.is_contiguous())
    words, own, residual, factor = (
        None if tensor is None else tensor.view(torch.int32) for tensor in (out, part, rows, weight)
    )
    assert words is not None
    num_words = words.shape[1]
    assert num_rows <= mailbox.max_rows and num_words == mailbox.num_words
    block = triton.next_power_of_2(num_words)
    _sum_row[(num_rows,)](
        words,
        own,
        residual,
        factor,
        eps,
        mailbox.inbox,
        mailbox.addresses,
        mailbox.exchanges,
        mailbox.max_rows,
        size=size,
        num_words=num_words,
        block=block,
        kind=_KINDS[part.dtype],
        rank=mailbox.rank,
        num_ranks=mailbox.num_ranks,
        num_warps=warps_for(block, 4),
        **pdl_options(part.device, pdl),
    )


@triton.jit
def _sum_row(
    out,
    part,
    residual,
    weight,
    eps,
    inbox,
    addresses,
    exchanges,
    max_rows,
    size: tl.constexpr,
    num_words: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    pdl: tl.constexpr,
):
    """A row. Everything is read and written in words of one float32 or two halves."""
    word = tl.arange(0, block)
    inside = word < num_words
    factor = 0
    if weight is not None:
        factor = tl.load(weight + word, mask=inside, other=0)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = row * num_words + word
    exchange = tl.load(exchanges + row) + 1
    half = (exchange & 1) * num_ranks
    own = tl.load(part + place, mask=inside, other=0)
    there = ((half + rank) * max_rows + row) * num_words + word
    _send(addresses, there, own, inside, exchange, rank, num_ranks)
    x = 0
    if residual is not None:
        x = tl.load(residual + place, mask=inside, other=0)

    low = tl.zeros([block], tl.float32)
    high = tl.zeros([block], tl.float32)
    for source in tl.static_range(num_ranks):
        words = own
        if source != rank:
            here = ((half + source) * max_rows + row) * num_words + word
            words = _receive(inbox + here, inside, exchange)
        low += _low(words, kind)
        high += _high(words, kind)
    total = _join(low, high, kind)
    if weight is None:
        tl.store(out + place, total, mask=inside)
    else:
        x = _join(_low(x, kind) + _low(total, kind), _high(x, kind) + _high(total, kind), kind)
        tl.store(residual + place, x, mask=inside)
        low, high = _low(x, kind), _high(x, kind)
        scale = tl.rsqrt(tl.sum(low * low + high * high) * (1.0 / size) + eps)
        quotient = _join(low * scale, high * scale, kind)
        product = _join(
            _low(factor, kind) * _low(quotient, kind),
            _high(factor, kind) * _high(quotient, kind),
            kind,
        )
        tl.store(out + place, product, mask=inside)
    # Behind the sums, which no thread passes before all have read the count.
    tl.store(exchanges + row, exchange)


@triton.jit(do_not_specialize=["stride", "num_columns"])
def _maximum_of_row(
    out,
    values,
    stride,
    num_columns,
    inbox,
    addresses,
    exchanges,
    max_rows,
    columns: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
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
    half = (exchange & 1) * num_ranks
    word = tl.arange(0, 2)
    inside = word < 2
    there = ((half + rank) * max_rows + row) * 2 + word
    _send(addresses, there, (best >> (32 * word)).to(tl.int32), inside, exchange, rank, num_ranks)
    for source in tl.static_range(num_ranks):
        if source != rank:
            here = ((half + source) * max_rows + row) * 2 + word
            words = _receive(inbox + here, inside, exchange)
            theirs = tl.sum((words.to(tl.int64) & 0xFFFFFFFF) << (32 * word))
            best = tl.maximum(best, theirs)
    tl.store(out + row, best)
    tl.store(exchanges + row, exchange)


@triton.jit(do_not_specialize=["share"])
def _sum_share(
    addresses,
    share,
    to_results,
    block: tl.constexpr,
    kind: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
):
    """A part of this rank's share. Past the L1 cache, which does not see what others write."""
    element = tl.program_id(0) * block + tl.arange(0, block)
    inside = element < share
    element += rank * share
    total = tl.zeros([block], tl.float32)
    for source in tl.static_range(num_ranks):
        part = tl.load(addresses + source).to(tl.pointer_type(kind))
        words = tl.load(part + element, mask=inside, other=0.0, cache_modifier=".cg")
        total += words.to(tl.float32)
    for target in tl.static_range(num_ranks):
        result = tl.load(addresses + target).to(tl.pointer_type(kind)) + to_results
        tl.store(result + element, total.to(kind), mask=inside)


@triton.jit(do_not_specialize=["num_words"])
def _gather_row(whole, addresses, num_words, block: tl.constexpr):
    """A part of a row of one rank."""
    word = tl.program_id(0) * block + tl.arange(0, block)
    source = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    inside = word < num_words
    part = tl.load(addresses + source).to(tl.pointer_type(tl.int32))
    words = tl.load(part + row * num_words + word, mask=inside, other=0, cache_modifier=".cg")
    place = (row * tl.num_programs(1) + source) * num_words + word
    tl.store(whole + place, words, mask=inside)


@triton.jit
def _send(addresses, there, words, inside, exchange, rank: tl.constexpr, num_ranks: tl.constexpr):
    """To all others, at the same place of their inboxes."""
    stamped = (words.to(tl.int64) & 0xFFFFFFFF) | (exchange.to(tl.int64) << 32)
    for other in tl.static_range(num_ranks):
        if other != rank:
            target = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
            tl.store(target + there, stamped, mask=inside, cache_modifier=".wt")


@triton.jit
def _receive(place, inside, exchange):
    """The words of this exchange, once all are there."""
    stamped = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.sum((inside & ((stamped >> 32).to(tl.int32) != exchange)).to(tl.int32))
    while missing > 0:
        stamped = tl.load(place, mask=inside, other=0, volatile=True)
        missing = tl.sum((inside & ((stamped >> 32).to(tl.int32) != exchange)).to(tl.int32))
    return stamped.to(tl.int32)


@triton.jit
def _low(words, kind: tl.constexpr):
    """float32, of a word's first number."""
    if kind == tl.float32:
        return words.to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, kind: tl.constexpr):
    """float32, of a word's second number, or 0 where there is none."""
    if kind == tl.float32:
        return words.to(tl.float32, bitcast=True) * 0.0
    else:
        return (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _join(low, high, kind: tl.constexpr):
    """Two float32 rounded and in a word; the second is lost where a word has room for one."""
    if kind == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16)
