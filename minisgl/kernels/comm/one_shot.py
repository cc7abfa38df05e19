"""Collectives of few rows in one shot, through memory that the GPUs of one host can address.

Every rank sends all of its rows to all inboxes (mailbox.py), and adds up what it receives. The GEMM
that computes the rows can send them itself (linear/epilogue.py), which saves the latency of a
launch; then only the second half is done here. With many rows the bandwidth counts; see
two_shot.py.

An all-reduce and the norm after it are one kernel. All ranks add in the same order, and so have the
same sum, bit for bit.

Programs wait for those with the same rows on other ranks. That is safe if all run at once, as they
do at the sizes of common models, and if a GPU starts programs in the order of their numbers, which
is undocumented but true of all known ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox, receive, send
from minisgl.kernels.inlined import apply_norm, rms_scale, wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for


def all_reduce(part: Tensor, mailbox: Mailbox) -> Tensor:
    """The sum of all ranks' `part` [num_rows, size] contiguous, rounded once to its dtype: a new
    tensor. num_rows: at most mailbox.max_rows."""
    out = torch.empty_like(part)
    _launch(out, part, None, None, 0.0, mailbox)
    return out


def all_reduce_norm(
    part: Tensor, rows: Tensor, weight: Tensor, eps: float, mailbox: Mailbox
) -> tuple[Tensor, Tensor]:
    """add_rms_norm of the sum of all ranks' `part` and `rows`; all [num_rows, size] contiguous.

    Returns the norm, a new tensor, and `rows`, which holds the new residual stream.
    """
    out = torch.empty_like(part)
    _launch(out, part, rows, weight, eps, mailbox)
    return out, rows


def received_norm(
    rows: Tensor, weight: Tensor, eps: float, mailbox: Mailbox
) -> tuple[Tensor, Tensor]:
    """all_reduce_norm of summands that the ranks have sent or will send, by a GEMM."""
    out = torch.empty_like(rows)
    _launch(out, None, rows, weight, eps, mailbox)
    return out, rows


def all_reduce_max(values: Tensor, mailbox: Mailbox, *, pdl: bool = True) -> Tensor:
    """The maximum of each row of all ranks' `values` [num_rows, any] int64, whose columns are
    contiguous: [num_rows]. The mailbox has rows of two words of 32 bits."""
    num_rows, num_columns = values.shape
    assert num_rows <= mailbox.max_rows and values.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _max_row[(num_rows,)](
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


def _launch(
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
    _all_reduce_row[(num_rows,)](
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


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_row(
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
    """One row; `part` is sent unless it is None, since it has been sent."""
    num_ranks: tl.constexpr = len(targets)
    column = tl.arange(0, block)
    inside = column < size
    factor = residual
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(pdl)
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
    # As many ranks at a time as fit into the registers.
    for first in tl.static_range(0, num_ranks, together):
        source = first + tl.arange(0, together)[:, None]
        here = ((half + source) * max_rows + row) * size + column[None, :]
        expected = (source < num_ranks) & inside[None, :]
        parts = receive(inbox + here, expected, exchange, out.dtype.element_ty)
        total += tl.sum(parts.to(tl.float32), 0)
    finish_row(out, residual, total, x, factor, place, inside, eps, size)
    # After the sums, which no thread passes before all threads have read the count.
    tl.store(exchanges + row, exchange)


@triton.jit
def finish_row(out, residual, total, x, factor, place, inside, eps, size: tl.constexpr):
    """Writes a row's sum or, with a residual, the residual plus the sum and its norm."""
    kind: tl.constexpr = out.dtype.element_ty
    if residual is None:
        tl.store(out + place, total.to(kind), mask=inside)
    else:
        added = (x.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
        tl.store(residual + place, added, mask=inside)
        wide = added.to(tl.float32)
        scale = rms_scale(tl.sum(wide * wide), size, eps)
        normed = apply_norm(added, scale, factor)
        tl.store(out + place, normed, mask=inside)


@triton.jit(do_not_specialize=["stride", "num_columns", "rank"])
def _max_row(
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
    wait_for_previous(pdl)
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
