"""Linear maps of few rows (decode) in Triton: y = x Wᵀ, half precision, sums in float32.

With few rows the time is that of reading W once: n · k · 2 bytes at 4.28 TB/s on an H200, for which
some 40 KiB must be under way to each of the 132 multiprocessors at any time. So the kernels are
made around W. It is the left side of the product, acc[n, m] = W[n, k] xᵀ[k, m], whose rows the
tensor cores take 64 (wgmma) or 16 (mma) at a time; x is the right side, where they take 8, and it
comes out of L2. Two kernels:

- *stream*: a loop over tiles of k, several of them in flight. Where the tiles of n are too few to
  fill the device, k is split over programs, too; each leaves its part in float32, and the last to
  arrive adds them up in their order, so that the result is the same at every run.
- *burst*, for small W: a program has all its rows of W in flight at once, in registers, before it
  even waits for x, whose way from L2 is then all that lies between the kernel before and the
  result.

A tile of less than 64 rows of W is too little for four warps: there they share out the tile's k
instead (`groups`), and their sums are added at the end.

W does not depend on the kernel before. With programmatic dependent launch (triton_launch.py) a
program fetches it before the wait, burst into registers and stream its first part into L2, so that
the memory works while the launches before still compute.

With little to read, each launch in a row costs more than its work. So what lies between two
products is part of them, with the rounding of reference.py:

- `linear_silu_mul` is the gated MLP's first product and activation: a program has the same rows of
  the gate and of the other half.
- `linear_add` adds its product to the residual stream, and leaves the sums of squares of what it
  wrote, one for each block of columns.
- With these sums the next product norms its x on the way from L2 to the tensor cores (`Norm`).
- `linear_send` leaves its product in the inboxes of all ranks (triton_mailbox.py), each of which
  has a summand of what is wanted.
"""

# mypy: disable-error-code="untyped-decorator, assignment, union-attr"

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import fitting_stages, pdl_options, shared_bytes_of
from minisgl.kernels.triton_mailbox import Mailbox, send

MAX_ROWS = 128  # with more, is_worth_it says no


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a linear map is shared out. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of a gated map, rows of either half
    block_m: int  # rows of x
    block_k: int  # elements of k in a tile, of all groups together
    splits: int = 1  # programs that share a tile's k
    groups: int = 1  # parts of block_k that different warps take
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight, the one at work included
    burst: bool = False  # all tiles of k at once, in registers
    prefetch: int = 0  # elements of k, a multiple of 128, that L2 fetches before the wait


class Norm(NamedTuple):
    """Root mean square normalisation of x, as rms_norm of reference.py."""

    weight: Tensor  # [k], of x's dtype
    eps: float
    squares: Tensor  # [m, any] float32, contiguous; a row adds up to the squares of x's row


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Where the programs that share a tile leave their parts. `arrivals` is zero between launches.

    One launch at a time may use it, or launches that overlap by the rule of triton_launch.py.
    """

    partials: Tensor  # [any] float32
    arrivals: Tensor  # [any] int32

    @classmethod
    def allocate(
        cls, shapes: Iterable[tuple[int, int]], max_rows: int, device: torch.device
    ) -> LinearWorkspace:
        """Room for maps of these (n, k), plain or gated (n counting both halves)."""
        shared_bytes = shared_bytes_of(device)
        sizes = [
            workspace_size(m, n, k, tiles(m, n, k, shared_bytes, gated=gated), gated=gated)
            for n, k in shapes
            for m in _block_rows(max_rows)
            for gated in (False, True)
        ]
        return cls(
            partials=torch.empty(
                max((size[0] for size in sizes), default=0), dtype=torch.float32, device=device
            ),
            arrivals=torch.zeros(
                max((size[1] for size in sizes), default=0), dtype=torch.int32, device=device
            ),
        )


def workspace_size(m: int, n: int, k: int, how: Tiles, *, gated: bool = False) -> tuple[int, int]:
    """The elements of `partials` and of `arrivals` that a call takes."""
    splits, _ = _shares(k, how)
    if splits == 1 or how.burst:
        return 0, 0
    halves = 2 if gated else 1
    num_tiles = triton.cdiv(n // halves, how.block_n) * triton.cdiv(m, how.block_m)
    return num_tiles * splits * how.block_n * how.block_m * halves, num_tiles


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    normed: Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    how: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """The map of x or, with a norm, of x's norm. x: [m, k], its rows contiguous; weight: [n, k]
    contiguous; bias: [n].

    Returns [m, n]. `normed`, like x and contiguous, is where the norm is left, too; for tiles that
    are a burst. Without a workspace, k is not split. `pdl`: overlap launches where the device can,
    by the rule of triton_launch.py; the weights and the bias must be older than two launches.
    """
    out, _ = _launch(
        x, weight, bias, None, norm, workspace, how, gated=False, pdl=pdl, normed=normed
    )
    return out


def linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    workspace: LinearWorkspace | None = None,
    how: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """silu_mul(linear(x, weight)), to the rounding. weight: [2 · size, k], the gates first.

    Returns [m, size].
    """
    out, _ = _launch(x, weight, None, None, norm, workspace, how, gated=True, pdl=pdl)
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    workspace: LinearWorkspace | None = None,
    how: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Add linear(x, weight, bias), rounded, to `residual`, [m, n] contiguous, in its place.

    Returns the squares that a Norm of the sum takes.
    """
    _, squares = _launch(x, weight, bias, residual, None, workspace, how, gated=False, pdl=pdl)
    assert squares is not None
    return squares


def linear_send(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mailbox: Mailbox,
    *,
    workspace: LinearWorkspace | None = None,
    how: Tiles | None = None,
    pdl: bool = True,
) -> None:
    """Send linear(x, weight, bias) to all ranks, rows 0 to m - 1 of their inboxes, whose rows have
    n elements: what triton_peers.received_norm waits for."""
    assert x.shape[0] <= mailbox.max_rows and mailbox.takes(weight.T)
    _launch(x, weight, bias, None, None, workspace, how, gated=False, pdl=pdl, mailbox=mailbox)


# -- the choice of tiles ---------------------------------------------------------------------------

_NUM_SMS = 132


def tiles(
    m: int, n: int, k: int, shared_bytes: int, *, gated: bool = False, may_split: bool = True
) -> Tiles:
    """For half precision on an H200, by scripts/bench/bench_linear.py --tune and by the time of
    whole steps; where a program may have less than its shared memory, with what fits. n counts both
    halves of a gated map."""
    halves = 2 if gated else 1
    n //= halves
    if m > 64:
        return _tiles_of_many_rows(m, n, k, halves, shared_bytes, may_split)
    if m <= 16 and (how := _burst_tiles(m, n, k, halves, shared_bytes)) is not None:
        return how

    block_m = max(16, triton.next_power_of_2(m))
    num_tiles = triton.cdiv(n, 64)
    resident = splits = 1
    if may_split and num_tiles < _NUM_SMS:
        # As many programs on each multiprocessor as leave the fewest of their places empty, but
        # each with a few tiles at least.
        most_resident = 1 if gated else 3 if m <= 16 else 2
        most_splits = max(k // (384 if m <= 32 else 512), 1)
        found = [
            (min(_NUM_SMS * resident // num_tiles, most_splits), resident)
            for resident in range(1, most_resident + 1)
        ]
        splits, resident = max(found, key=lambda pair: pair[0] / pair[1])
    # The last programs of a gated map would have the device to themselves: let all run at once.
    narrow = resident == 3 or (gated and _NUM_SMS < num_tiles <= _NUM_SMS * 3 // 2)
    how = Tiles(64, block_m, 64 if narrow else 128, splits=splits)
    # Deep pipelines where a program has its place to itself, as gated ones have at any depth.
    alone = resident == 1 and (num_tiles <= _NUM_SMS or (gated and num_tiles > 2 * _NUM_SMS))
    stage_bytes = (64 * halves + block_m) * how.block_k * 2
    deep = (narrow or alone) and stage_bytes * 6 <= shared_bytes
    return replace(
        how,
        num_stages=6 if deep else fitting_stages(4, stage_bytes, shared_bytes),
        prefetch=256 if num_tiles * splits <= _NUM_SMS * resident else 0,
    )


def _burst_tiles(m: int, n: int, k: int, halves: int, shared_bytes: int) -> Tiles | None:
    """For at most 96 KiB of W in a program, and two programs on a multiprocessor. All of it and a
    tile of x pass through shared memory, on their way to the threads that multiply them."""
    block_k = min(max(triton.next_power_of_2(k), 128), 1024)
    block_m = 8 if m <= 8 else 16
    num_tiles = triton.cdiv(k, block_k) * halves
    if num_tiles > 3 or triton.cdiv(n, 16) > 2 * _NUM_SMS:
        return None
    if (16 * num_tiles + block_m) * block_k * 2 > shared_bytes:
        return None
    return Tiles(16, block_m, block_k, groups=8, num_warps=8, burst=True)


def _tiles_of_many_rows(
    m: int, n: int, k: int, halves: int, shared_bytes: int, may_split: bool
) -> Tiles:
    stage_bytes = (64 * halves + 64) * 128 * 2
    how = Tiles(64, 64, 128, num_stages=fitting_stages(4, stage_bytes, shared_bytes))
    num_tiles = triton.cdiv(n, how.block_n) * triton.cdiv(m, how.block_m)
    if not may_split:
        return how
    return replace(how, splits=max(min(_NUM_SMS // num_tiles, k // (how.block_k * 4)), 1))


def is_worth_it(m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether this is faster than the best of cuBLAS's algorithms, by the time of whole decode
    steps of Qwen3-0.6B and 14B on an H200. n counts both halves of a gated map."""
    if k % 64 != 0 or m > MAX_ROWS:
        return False
    if m > 32:  # cuBLAS is slow where W is small and, up to 64 rows, k the longer side
        return not gated and n * k <= 1 << 22 and (m > 64 or k > n)
    return n * k <= 1 << (26 if m <= 16 else 24)


def is_norm_worth_it(m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether this is faster than a norm by itself and what `is_worth_it` says behind it: where x
    is long, norming it in each program holds up the reading of W."""
    return m <= 32 and k <= 2048 and is_worth_it(m, n, k, gated=gated)


def can_leave_norm(m: int, n: int, k: int, *, device: torch.device) -> bool:
    """Whether `linear` can leave the norm, and that is faster than two launches."""
    if not is_norm_worth_it(m, n, k, gated=False):
        return False
    return tiles(m, n, k, shared_bytes_of(device)).burst


def _block_rows(max_rows: int) -> list[int]:
    """The numbers of rows up to `max_rows` that take most room, one for each kind of tiles."""
    powers = [1 << i for i in range(max_rows.bit_length()) if 1 << i <= max_rows]
    return [*powers, max_rows]


def _shares(k: int, how: Tiles) -> tuple[int, int]:
    """Splits that have something to do, and the elements of k of each, in whole tiles."""
    num_tiles = triton.cdiv(k, how.block_k)
    share = triton.cdiv(num_tiles, min(how.splits, num_tiles))
    return triton.cdiv(num_tiles, share), share * how.block_k


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Norm | None,
    workspace: LinearWorkspace | None,
    how: Tiles | None,
    *,
    gated: bool,
    pdl: bool,
    normed: Tensor | None = None,
    mailbox: Mailbox | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result, unless it was sent, and, where it was added to `residual`, its squares."""
    (m, k), n = x.shape, weight.shape[0]
    assert weight.is_contiguous() and weight.shape[1] == k and x.stride(1) == 1
    assert residual is None or (residual.is_contiguous() and residual.shape == (m, n))
    assert norm is None or (norm.squares.is_contiguous() and norm.squares.shape[0] == m)
    if how is None:
        may_split = workspace is not None
        how = tiles(m, n, k, shared_bytes_of(x.device), gated=gated, may_split=may_split)
    if gated:
        n //= 2
    across_n, across_m = triton.cdiv(n, how.block_n), triton.cdiv(m, how.block_m)
    if residual is None:
        out, squares = x.new_empty((0 if mailbox else m, n)), None
    else:
        out, squares = residual, x.new_empty((m, across_n), dtype=torch.float32)
    if m == 0:
        return out, squares

    num_parts = 1 if norm is None else norm.squares.shape[1]
    tensors = (
        out,
        squares,
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        None if norm is None else norm.squares,
    )
    numbers = (m, n, k, x.stride(0), num_parts, 0.0 if norm is None else norm.eps)
    mail = (
        (None, None, 0, 0)
        if mailbox is None
        else (mailbox.targets, mailbox.exchanges, mailbox.max_rows, mailbox.rank)
    )
    options = {
        "block_n": how.block_n,
        "block_m": how.block_m,
        "block_k": how.block_k,
        "groups": how.groups,
        # As wide as a tile of x, so that the compiler keeps both in one layout.
        "parts": max(triton.next_power_of_2(num_parts), how.block_k // how.groups),
        "gated": gated,
        "whole_n": n % how.block_n == 0,
        "whole_k": k % how.block_k == 0,
        "num_warps": how.num_warps,
        **pdl_options(x.device, pdl),
    }
    assert normed is None or (how.burst and norm is not None and normed.is_contiguous())
    if how.burst:
        pieces = triton.cdiv(k, how.block_k)
        _burst_kernel[(across_m, 1, across_n)](
            *tensors, *numbers, *mail, normed, pieces=pieces, **options
        )
        return out, squares

    splits, share = _shares(k, how)
    partials = arrivals = None
    if splits > 1:
        assert workspace is not None
        room, counters = workspace_size(m, weight.shape[0], k, how, gated=gated)
        partials, arrivals = workspace.partials, workspace.arrivals
        assert room <= partials.numel() and counters <= arrivals.numel()
    _stream_kernel[(across_m, splits, across_n)](
        *tensors,
        *numbers,
        *mail,
        partials,
        arrivals,
        share,
        how.prefetch if k % 8 == 0 else 0,
        stages=how.num_stages,
        lanes=how.num_warps * 32,
        **options,
    )
    return out, squares


# -- the kernels -----------------------------------------------------------------------------------


@triton.jit
def _columns(block_k: tl.constexpr, groups: tl.constexpr) -> tl.tensor:
    """The elements of k of a tile: [1, block_k], or [groups, 1, block_k / groups]."""
    if groups == 1:
        return tl.arange(0, block_k)[None, :]
    else:
        size: tl.constexpr = block_k // groups
        lanes = tl.arange(0, size)[None, None, :]
        return tl.arange(0, groups)[:, None, None] * size + lanes


@triton.jit
def _spread(row: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """What a row of a tile has, in the shape that goes with `_columns`."""
    if groups == 1:
        return row[:, None]
    else:
        return row[None, :, None]


@triton.jit
def _load(at: tl.tensor, inside: tl.tensor, whole: tl.constexpr) -> tl.tensor:
    if whole:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def from_here(x: tl.tensor, pdl: tl.constexpr) -> tl.tensor:
    """x; what is made of it stays behind this point. The compiler would make it as soon as x is
    asked for, and so wait for x, before it asks for anything else."""
    if pdl:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=pack
        )
    else:
        return x


@triton.jit
def _multiply(w: tl.tensor, x: tl.tensor, acc: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """acc + w xᵀ, of each group by itself."""
    if groups == 1:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit
def _zeros(block_n: tl.constexpr, block_m: tl.constexpr, groups: tl.constexpr) -> tl.tensor:
    if groups == 1:
        return tl.zeros((block_n, block_m), tl.float32)
    else:
        return tl.zeros((groups, block_n, block_m), tl.float32)


@triton.jit
def _total(acc: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """[block_m, block_n], the groups added up."""
    if groups > 1:
        acc = tl.sum(acc, 0)
    return tl.trans(acc)


@triton.jit
def _load_squares(
    squares: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    parts: tl.constexpr,
) -> tl.tensor:
    part = tl.arange(0, parts)
    inside = (row < num_rows)[:, None] & (part < num_parts)[None, :]
    return tl.load(squares + row[:, None] * num_parts + part[None, :], mask=inside, other=0.0)


@triton.jit
def _normed(x: tl.tensor, scale: tl.tensor, factor: tl.tensor) -> tl.tensor:
    quotient = (x.to(tl.float32) * scale).to(x.dtype)
    return (factor.to(tl.float32) * quotient.to(tl.float32)).to(x.dtype)


@triton.jit
def _finish(
    out: tl.tensor,
    squares: tl.tensor | None,
    acc: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor | None,
    residual: tl.tensor | None,
    targets: tl.tuple | None,
    exchange: tl.tensor,
    max_rows: tl.tensor,
    rank: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    gated: tl.constexpr,
) -> None:
    """Write the block at rows `row` and columns `column`. `up` is looked at if gated, `residual`,
    what is added to, if there are squares to be written, and `exchange` of each row if there are
    `targets`, inboxes."""
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if gated:
        gate = acc.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        acc = silu.to(tl.float32) * up.to(dtype).to(tl.float32)
    result = acc.to(dtype)
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    if squares is not None:
        result = (residual.to(tl.float32) + result.to(tl.float32)).to(dtype)
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        place = squares + row * tl.num_programs(2) + tl.program_id(2)
        tl.store(place, tl.sum(wide * wide, 1), mask=row < num_rows)
    if targets is not None:
        line = ((exchange & 1) * len(targets) + rank) * max_rows + row
        there = line[:, None] * n + column[None, :]
        send(targets, there, result, exchange[:, None], inside)
    else:
        tl.store(out + row[:, None] * n + column[None, :], result, mask=inside)


@triton.jit
def _fetch(
    w: tl.tensor,
    k: tl.tensor,
    length: tl.tensor,
    size: tl.tensor,
    block_n: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Ask for the first `size` elements of each of block_n rows to be brought into L2: each thread
    for a piece of a row, of which `length` is there."""
    pieces: tl.constexpr = lanes // block_n if lanes > block_n else 1
    piece = size // pieces
    lane = tl.arange(0, block_n * pieces)
    start = lane % pieces * piece
    count = tl.minimum(tl.maximum(length - start, 0), piece)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r",
        [w + lane // pieces * k + start, count * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "prefetch", "max_rows", "rank"])
def _stream_kernel(
    out: tl.tensor,
    squares: tl.tensor | None,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    norm_weight: tl.tensor | None,
    x_squares: tl.tensor | None,
    num_rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    num_parts: tl.tensor,
    eps: tl.tensor,
    targets: tl.tuple | None,
    exchanges: tl.tensor | None,
    max_rows: tl.tensor,
    rank: tl.tensor,
    partials: tl.tensor | None,
    arrivals: tl.tensor | None,
    share: tl.tensor,
    prefetch: tl.tensor,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    gated: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    stages: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A block of [block_n, block_m], over one share of k."""
    m_tile, part, n_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * share
    end = tl.minimum(first + share, k)
    weight += n_tile.to(tl.int64) * block_n * k
    up_weight = weight + n.to(tl.int64) * k
    if pdl:
        if whole_n and prefetch > 0:
            _fetch(weight + first, k, end - first, prefetch, block_n, lanes)
            if gated:
                _fetch(up_weight + first, k, end - first, prefetch, block_n, lanes)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    live = (row < num_rows)[:, None] & (column < n)[None, :]
    if squares is not None:
        residual = tl.load(out + row[:, None] * n + column[None, :], mask=live, other=0.0)
    else:
        residual = squares
    exchange = row  # anything
    if exchanges is not None:
        exchange = tl.load(exchanges + row, mask=row < num_rows, other=0) + 1
    if x_squares is not None:
        found = _load_squares(x_squares, row, num_rows, num_parts, parts)
        scale = _spread(tl.rsqrt(tl.sum(found, 1) / k + eps), groups)

    columns = _columns(block_k, groups)
    w_row = tl.arange(0, block_n)
    if not whole_n:  # rows past the end are the last one again; they are not written
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    w_place = _spread(w_row, groups) * k + columns
    x_place = _spread(row * x_stride, groups) + columns
    real = _spread(row < num_rows, groups)
    acc = _zeros(block_n, block_m, groups)
    up = acc
    if norm_weight is not None:
        # Once for each row, so that the compiler does not bring the rows into another layout.
        factor_at = norm_weight + tl.broadcast_to(columns, x_place.shape)
        factor = tl.load(factor_at + first, mask=first + columns < end, other=0.0)
    for start in tl.range(first, end, block_k, num_stages=stages):
        inside = start + columns < end
        w = _load(weight + start + w_place, inside, whole_k)
        rows = tl.load(x + start + x_place, mask=real if whole_k else real & inside, other=0.0)
        if norm_weight is not None:
            rows = _normed(rows, scale, factor)
            ahead = start + block_k  # on its way while the loop turns
            factor = tl.load(factor_at + ahead, mask=ahead + columns < end, other=0.0)
        acc = _multiply(w, rows, acc, groups)
        if gated:
            w = _load(up_weight + start + w_place, inside, whole_k)
            up = _multiply(w, rows, up, groups)

    acc = _total(acc, groups)
    up = _total(up, groups) if gated else acc
    if partials is not None:
        tile = n_tile * tl.cdiv(num_rows, block_m) + m_tile
        splits = tl.cdiv(k, share)
        block: tl.constexpr = block_m * block_n * (2 if gated else 1)
        within = tl.arange(0, block_m)[:, None] * block_n + tl.arange(0, block_n)[None, :]
        block_at = partials + tile * splits * block + within
        tl.store(block_at + part * block, acc, mask=live)
        if gated:
            tl.store(block_at + part * block + block_m * block_n, up, mask=live)
        # One thread does the atomic: the others' stores must come before it. It releases them, and
        # acquires those of the programs that came earlier.
        tl.debug_barrier()
        earlier = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if earlier == splits - 1:
            tl.store(arrivals + tile, 0)  # for the next launch
            acc = _add_up(block_at, live, splits, block, block_m, block_n)
            if gated:
                up = _add_up(block_at + block_m * block_n, live, splits, block, block_m, block_n)
            else:
                up = acc
            _finish(
                out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
                row, column, num_rows, n, gated,
            )  # fmt: skip
    else:
        _finish(
            out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
            row, column, num_rows, n, gated,
        )  # fmt: skip


@triton.jit
def _add_up(
    partials: tl.tensor,
    live: tl.tensor,
    splits: tl.tensor,
    stride: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
) -> tl.tensor:
    """The parts of all splits, four of a small block at a time on their way."""
    acc = tl.zeros((block_m, block_n), tl.float32)
    if block_m * block_n > 4096:  # of which no more fits into the registers
        for i in range(splits):
            acc += tl.load(partials + i * stride, mask=live, other=0.0, cache_modifier=".cg")
    else:
        for i in range(0, splits, 4):
            at = partials + i * stride
            left = splits - i - tl.arange(0, 1)[:, None]  # the interpreter spreads no masks
            a = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
            b = tl.load(at + stride, mask=live & (left > 1), other=0.0, cache_modifier=".cg")
            c = tl.load(at + 2 * stride, mask=live & (left > 2), other=0.0, cache_modifier=".cg")
            d = tl.load(at + 3 * stride, mask=live & (left > 3), other=0.0, cache_modifier=".cg")
            acc += (a + b) + (c + d)
    return acc


@triton.jit(do_not_specialize=["num_rows", "max_rows", "rank"])
def _burst_kernel(
    out: tl.tensor,
    squares: tl.tensor | None,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    norm_weight: tl.tensor | None,
    x_squares: tl.tensor | None,
    num_rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    num_parts: tl.tensor,
    eps: tl.tensor,
    targets: tl.tuple | None,
    exchanges: tl.tensor | None,
    max_rows: tl.tensor,
    rank: tl.tensor,
    normed: tl.tensor | None,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    pieces: tl.constexpr,
    gated: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A block of [block_n, block_m] over all of k: `pieces` tiles, held in registers. The first
    block leaves the norm of its rows in `normed`, if there is one."""
    m_tile, n_tile = tl.program_id(0), tl.program_id(2)
    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    columns = _columns(block_k, groups)
    w_row = tl.arange(0, block_n)
    if not whole_n:
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    weight += n_tile.to(tl.int64) * block_n * k
    up_weight = weight + n.to(tl.int64) * k
    w_place = _spread(w_row, groups) * k + columns
    w, up_w, factor, rows = (), (), (), ()
    for i in tl.static_range(pieces):
        at = i * block_k + columns
        w += (_load(weight + w_place + i * block_k, at < k, whole_k),)
        if gated:
            up_w += (_load(up_weight + w_place + i * block_k, at < k, whole_k),)
        if norm_weight is not None:
            factor += (_load(norm_weight + at, at < k, whole_k),)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    x += _spread(row * x_stride, groups) + columns
    for i in tl.static_range(pieces):
        there = _spread(row < num_rows, groups)
        if not whole_k:
            there &= i * block_k + columns < k
        rows += (tl.load(x + i * block_k, mask=there, other=0.0),)
    if squares is not None:
        live = (row < num_rows)[:, None] & (column < n)[None, :]
        residual = tl.load(out + row[:, None] * n + column[None, :], mask=live, other=0.0)
    else:
        residual = squares
    exchange = row  # anything
    if exchanges is not None:
        exchange = tl.load(exchanges + row, mask=row < num_rows, other=0) + 1
    if norm_weight is not None:
        found = _load_squares(x_squares, row, num_rows, num_parts, parts)
    tl.debug_barrier()  # all loads are on their way

    if norm_weight is not None:
        found = from_here(found, pdl)
        scale = _spread(tl.rsqrt(tl.sum(found, 1) / k + eps), groups)
    acc = _zeros(block_n, block_m, groups)
    up = acc
    for i in tl.static_range(pieces):
        piece = from_here(rows[i], pdl)
        if norm_weight is not None:
            piece = _normed(piece, scale, from_here(factor[i], pdl))
        if normed is not None:  # noqa: SIM102 - decided when compiled, the other when run
            if n_tile == 0:
                element = i * block_k + columns
                exists = _spread(row < num_rows, groups) & (element < k)
                tl.store(normed + _spread(row * k, groups) + element, piece, mask=exists)
        acc = _multiply(from_here(w[i], pdl), piece, acc, groups)
        if gated:
            up = _multiply(from_here(up_w[i], pdl), piece, up, groups)
    acc = _total(acc, groups)
    up = _total(up, groups) if gated else acc
    _finish(
        out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
        row, column, num_rows, n, gated,
    )  # fmt: skip
