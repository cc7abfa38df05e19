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

W does not depend on the kernel before. With programmatic dependent launch (launch.py) a
program fetches it before the wait, burst into registers and stream its first part into L2, so that
the memory works while the launches before still compute.

With little to read, each launch in a row costs more than its work. So what lies between two
products is part of them, with the rounding of reference.py:

- `linear_silu_mul` is the gated MLP's first product and activation: a program has the same rows of
  the gate and of the other half.
- `linear_add` adds its product to the residual stream, and leaves the sums of squares of what it
  wrote, one for each block of columns.
- With these sums the next product norms its x on the way from L2 to the tensor cores (`FusedNorm`).
- `linear_send` leaves its product in the inboxes of all ranks (comm/mailbox.py), each of which
  has a summand of what is wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.launch import pdl_options
from minisgl.kernels.linear.burst import burst_kernel
from minisgl.kernels.linear.config import (
    LinearTiles,
    LinearWorkspace,
    choose_tiles,
    split_k,
    workspace_size,
)
from minisgl.kernels.linear.stream import stream_kernel
from minisgl.kernels.tuning import tuning_of


class FusedNorm(NamedTuple):
    """Root mean square normalisation of x, as rms_norm of reference.py."""

    weight: Tensor  # [k], of x's dtype
    eps: float
    squares: Tensor  # [m, any] float32, contiguous; a row adds up to the squares of x's row


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: FusedNorm | None = None,
    normed: Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """The map of x or, with a norm, of x's norm. x: [m, k], its rows contiguous; weight: [n, k]
    contiguous; bias: [n].

    Returns [m, n]. `normed`, like x and contiguous, is where the norm is left, too; for tiles that
    are a burst. Without a workspace, k is not split. `pdl`: overlap launches where the device can,
    by the rule of launch.py; the weights and the bias must be older than two launches.
    """
    out, _ = _launch(
        x, weight, bias, None, norm, workspace, tiles, gated=False, pdl=pdl, normed=normed
    )
    return out


def linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    *,
    norm: FusedNorm | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """silu_mul(linear(x, weight)), to the rounding. weight: [2 · size, k], the gates first.

    Returns [m, size].
    """
    out, _ = _launch(x, weight, None, None, norm, workspace, tiles, gated=True, pdl=pdl)
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Add linear(x, weight, bias), rounded, to `residual`, [m, n] contiguous, in its place.

    Returns the squares that a FusedNorm of the sum takes.
    """
    _, squares = _launch(x, weight, bias, residual, None, workspace, tiles, gated=False, pdl=pdl)
    assert squares is not None
    return squares


def linear_send(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mailbox: Mailbox,
    *,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> None:
    """Send linear(x, weight, bias) to all ranks, rows 0 to m - 1 of their inboxes, whose rows have
    n elements: what one_shot.received_norm waits for."""
    assert x.shape[0] <= mailbox.max_rows and mailbox.takes(weight.T)
    _launch(x, weight, bias, None, None, workspace, tiles, gated=False, pdl=pdl, mailbox=mailbox)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: FusedNorm | None,
    workspace: LinearWorkspace | None,
    tiles: LinearTiles | None,
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
    if tiles is None:
        may_split = workspace is not None
        tiles = choose_tiles(m, n, k, tuning_of(x.device), gated=gated, may_split=may_split)
    if gated:
        n //= 2
    across_n, across_m = triton.cdiv(n, tiles.block_n), triton.cdiv(m, tiles.block_m)
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
        "block_n": tiles.block_n,
        "block_m": tiles.block_m,
        "block_k": tiles.block_k,
        "groups": tiles.groups,
        # As wide as a tile of x, so that the compiler keeps both in one layout.
        "parts": max(triton.next_power_of_2(num_parts), tiles.block_k // tiles.groups),
        "gated": gated,
        "whole_n": n % tiles.block_n == 0,
        "whole_k": k % tiles.block_k == 0,
        "num_warps": tiles.num_warps,
        **pdl_options(x.device, pdl),
    }
    assert normed is None or (tiles.burst and norm is not None and normed.is_contiguous())
    if tiles.burst:
        pieces = triton.cdiv(k, tiles.block_k)
        burst_kernel[(across_m, 1, across_n)](
            *tensors, *numbers, *mail, normed, pieces=pieces, **options
        )
        return out, squares

    splits, split_size = split_k(k, tiles)
    partials = semaphores = None
    if splits > 1:
        assert workspace is not None
        room, counters = workspace_size(m, weight.shape[0], k, tiles, gated=gated)
        partials, semaphores = workspace.partials, workspace.semaphores
        assert room <= partials.numel() and counters <= semaphores.numel()
    stream_kernel[(across_m, splits, across_n)](
        *tensors,
        *numbers,
        *mail,
        partials,
        semaphores,
        split_size,
        tiles.prefetch if k % 8 == 0 else 0,
        stages=tiles.num_stages,
        lanes=tiles.num_warps * 32,
        **options,
    )
    return out, squares
