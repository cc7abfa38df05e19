"""Linear maps with quantised weights and plain x in Triton: y = x Wᵀ, float32 sums.

Up to some two thousand rows W is dequantised in registers. It is built like the stream kernel of
dense weights (linear/launch.py) and does the same in one launch: split-k, a norm before it,
silu(gate) · up, the addition to the residual stream, or sending to ranks. For more rows that would
do the work of dequantising over and over; `dequantize` does it once, at the speed of memory, for
cuBLAS to multiply with.

For few rows the time is that of reading W, a quarter or a half of what dense weights take, if an SM
unpacks some 36 INT4 weights in each of its cycles. It has 128 lanes: that leaves 3 instructions a
weight for everything. See device.py for how unpacking takes two.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.launch import pdl_options
from minisgl.kernels.linear.config import LinearTiles, LinearWorkspace, split_k, workspace_size
from minisgl.kernels.linear.launch import FusedNorm
from minisgl.kernels.linear.weight_only.config import choose_tiles
from minisgl.kernels.linear.weight_only.dequantize import dequantize_kernel
from minisgl.kernels.linear.weight_only.stream import weight_only_kernel
from minisgl.kernels.linear.weight_only.weights import WeightWords
from minisgl.kernels.tuning import tuning_of

_DEQUANTIZED_ROWS, _DEQUANTIZED_COLUMNS = 16, 512  # of a program


def linear(
    x: Tensor,
    weight: WeightWords,
    bias: Tensor | None = None,
    *,
    norm: FusedNorm | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """x Wᵀ + bias, or with a norm the same of x's norm.

    x: [m, k] float16 or bfloat16, for which the words of W are made, its rows contiguous; bias: [n]
    of x's dtype. Returns a new [m, n]. Without a workspace, k is not split. `pdl`: overlap launches
    where the device can, by the rule of kernels/launch.py; weight and bias must be older than two
    launches.
    """
    return _launch(x, weight, bias, None, norm, workspace, tiles, gated=False, pdl=pdl)[0]


def linear_silu_mul(
    x: Tensor,
    weight: WeightWords,
    *,
    norm: FusedNorm | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """silu_mul(linear(x, weight)), with the same rounding. W: [2 · size, k], the gate first.

    Returns a new [m, size].
    """
    return _launch(x, weight, None, None, norm, workspace, tiles, gated=True, pdl=pdl)[0]


def linear_add(
    x: Tensor,
    weight: WeightWords,
    bias: Tensor | None,
    residual: Tensor,
    *,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """Adds linear(x, weight, bias), rounded, to `residual` [m, n] contiguous, in place.

    Returns the squares that a FusedNorm of the sum takes: [m, any] float32.
    """
    _, squares = _launch(x, weight, bias, residual, None, workspace, tiles, gated=False, pdl=pdl)
    assert squares is not None
    return squares


def linear_send(
    x: Tensor,
    weight: WeightWords,
    bias: Tensor | None,
    mailbox: Mailbox,
    *,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> None:
    """Sends linear(x, weight, bias) to rows 0 to m - 1 of all ranks' inboxes, whose rows have n
    elements. one_shot.received_norm adds up the summands of all ranks."""
    assert x.shape[0] <= mailbox.max_rows and mailbox.takes(x.new_empty((0, weight.n)))
    _launch(x, weight, bias, None, None, workspace, tiles, gated=False, pdl=pdl, mailbox=mailbox)


def dequantize(weight: WeightWords, out: Tensor, *, pdl: bool = True) -> Tensor:
    """Writes W into the first n · k elements of `out`, which has the dtype of the words, and
    returns them as [n, k]."""
    n, k = weight.n, weight.k
    out = out.view(-1)[: n * k].view(n, k)
    columns = _DEQUANTIZED_COLUMNS
    grid = (triton.cdiv(n, _DEQUANTIZED_ROWS), triton.cdiv(k, columns))
    dequantize_kernel[grid](
        out,
        weight.words,
        weight.scales,
        n,
        k,
        weight.scale_stride,
        bits=weight.bits,
        group=weight.group,
        rows=_DEQUANTIZED_ROWS,
        columns=columns,
        packed=_packed(out),
        centred=weight.centred,
        num_warps=4,
        **pdl_options(out.device, pdl),
    )
    return out


def _packed(x: Tensor) -> bool:
    """Whether the kernels take two words at a time: not in the interpreter."""
    return x.device.type == "cuda"


def _launch(
    x: Tensor,
    weight: WeightWords,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: FusedNorm | None,
    workspace: LinearWorkspace | None,
    tiles: LinearTiles | None,
    *,
    gated: bool,
    pdl: bool,
    mailbox: Mailbox | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the result, empty if it was sent, and its squares if it was added to `residual`."""
    (m, k), n = x.shape, weight.n
    assert weight.k == k and x.stride(1) == 1
    assert residual is None or (residual.is_contiguous() and residual.shape == (m, n))
    assert norm is None or (norm.squares.is_contiguous() and norm.squares.shape[0] == m)
    if tiles is None:
        tiles = choose_tiles(
            max(m, 1),
            n,
            k,
            weight.span,
            weight.bits,
            tuning_of(x.device),
            gated=gated,
            normed=norm is not None,
            may_split=workspace is not None,
        )
    assert k % tiles.block_k == 0 and tiles.block_k % weight.span == 0
    if gated:
        n //= 2
    across_n, across_m = triton.cdiv(n, tiles.block_n), triton.cdiv(m, tiles.block_m)
    if residual is None:
        out, squares = x.new_empty((0 if mailbox else m, n)), None
    else:
        out, squares = residual, x.new_empty((m, across_n), dtype=torch.float32)
    if m == 0:
        return out, squares

    splits, split_size = split_k(k, tiles)
    partials = semaphores = None
    if splits > 1:
        assert workspace is not None
        room, counters = workspace_size(m, weight.n, k, tiles, gated=gated)
        partials, semaphores = workspace.partials, workspace.semaphores
        assert room <= partials.numel() and counters <= semaphores.numel()
    num_parts = 1 if norm is None else norm.squares.shape[1]
    exchange = (
        (None, None, 0, 0)
        if mailbox is None
        else (mailbox.targets, mailbox.exchanges, mailbox.max_rows, mailbox.rank)
    )
    weight_only_kernel[(across_m, splits, across_n)](
        out,
        squares,
        x,
        weight.words,
        weight.scales,
        bias,
        None if norm is None else norm.weight,
        None if norm is None else norm.squares,
        m,
        n,
        k,
        x.stride(0),
        num_parts,
        0.0 if norm is None else norm.eps,
        *exchange,
        partials,
        semaphores,
        split_size,
        tiles.prefetch * weight.bits // 16,
        weight.scale_stride,
        bits=weight.bits,
        group=weight.group,
        block_n=tiles.block_n,
        block_m=tiles.block_m,
        block_k=tiles.block_k,
        span=weight.span,
        parts=max(triton.next_power_of_2(num_parts), 32),
        gated=gated,
        whole_n=n % tiles.block_n == 0,
        stages=tiles.num_stages,
        lanes=tiles.num_warps * 32,
        packed=_packed(x),
        centred=weight.centred,
        num_warps=tiles.num_warps,
        **pdl_options(x.device, pdl),
    )
    return out, squares
