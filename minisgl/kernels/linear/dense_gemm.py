"""Linear maps of few rows (decode) in Triton: y = x Wᵀ, half precision, sums in float32.

With few rows the time is that of reading W once: n · k · 2 bytes at 4.28 TB/s on an H200, which
takes some 40 KiB in flight to each of the 132 SMs at any time. So the kernels are built around W.
It is the left operand, acc[n, m] = W[n, k] xᵀ[k, m], of which the tensor cores take 64 (wgmma) or
16 (mma) rows at a time; x is the right operand, where they take 8, and comes from L2. There are
three kernels:

- *stream*: a pipelined loop over tiles of k. If the tiles of n are too few to fill the device, k is
  split over programs (split-k): each stores its partial sums in float32, and the last one to finish
  adds them up in a fixed order, so that the result is the same at every run.
- *burst*, for small W: a program loads all its rows of W into registers before it waits for x, so
  that only the load of x from L2 lies between the previous kernel and the result.
- *small*, in place of burst for one or two rows: the same on CUDA cores, with so few rows of W in a
  program that the programs of several launches fit on an SM, and load their W at once.

A tile of fewer than 64 rows of W is too small for four warps: there the warps divide the tile's k
(`groups`), and their sums are added at the end.

W does not depend on the previous kernel. With programmatic dependent launch (launch_options.py) a
program loads it before the wait, burst into registers and stream its first part into L2, while the
previous launches still compute.

With little to read, a launch costs more than its work. So the operations between two GEMMs are
fused into them, with the rounding of elementwise/reference.py:

- The gated MLP's first GEMM does its activation: a program has the same rows of the gate and of the
  other half.
- A GEMM adds its result to the residual stream, and writes the sums of squares of the new stream,
  one for each block of columns.
- With these sums the next GEMM norms its x between L2 and the tensor cores (`FusedNorm`). Where x
  is short, and no stream, each of its programs sums up the squares.
- A GEMM writes its result into the inboxes of all ranks (comm/mailbox.py) as this rank's summand of
  an all-reduce.
"""

from __future__ import annotations

import triton
from torch import Tensor

from minisgl.kernels.comm.mailbox import sending
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.burst_kernel import burst_kernel
from minisgl.kernels.linear.delta_parts import adding
from minisgl.kernels.linear.dense_tiles import choose_tiles, smaller
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.small_kernel import small_kernel
from minisgl.kernels.linear.stream_kernel import stream_kernel
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, split_arguments
from minisgl.kernels.tuning import tuning_of

_SQUARED = 16384  # elements of x that a program of the stream kernel sums the squares of at once


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = PLAIN,
    norm: FusedNorm | None = None,
    normed: Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """What the epilogue makes of x Wᵀ + bias, or with a norm of the same of x's norm.

    x: [m, k], its rows contiguous; weight: [n, k] contiguous; bias: [n]; all of one dtype.
    `normed`, a contiguous tensor like x, receives the norm; it requires burst tiles. Without a
    workspace, k is not split. `pdl`: see launch_options.py; weight and bias must be older than two
    launches.
    """
    (m, k), n = x.shape, weight.shape[0]
    assert weight.is_contiguous() and weight.shape[1] == k and x.stride(1) == 1
    x_squares = None if norm is None else norm.squares
    assert x_squares is None or (x_squares.is_contiguous() and x_squares.shape[0] == m)
    gated = epilogue.gated
    assert not gated or bias is None
    if tiles is None:
        may_split = workspace is not None
        tiles = choose_tiles(m, n, k, tuning_of(x.device), gated=gated, may_split=may_split)
        if normed is None and epilogue.mailbox is None and epilogue.delta is None:
            tiles = smaller(tiles, m, tuning_of(x.device))
    if gated:
        n //= 2
    across_n, across_m = triton.cdiv(n, tiles.block_n), triton.cdiv(m, tiles.block_m)
    out, squares = epilogue.place(x, n, across_n)
    result = out if squares is None else squares
    if m == 0:
        return result

    num_parts = 1 if x_squares is None else x_squares.shape[1]
    # As wide as a tile of x, so that the compiler keeps both in one layout.
    parts = max(triton.next_power_of_2(num_parts), tiles.block_k // tiles.groups)
    if norm is not None and x_squares is None:
        parts = max(128, min(triton.next_power_of_2(k), _SQUARED // tiles.block_m))
    tensors = (
        out,
        squares,
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        x_squares,
    )
    numbers = (m, n, k, x.stride(0), num_parts, 0.0 if norm is None else norm.eps)
    options = {
        "block_n": tiles.block_n,
        "block_m": tiles.block_m,
        "block_k": tiles.block_k,
        "parts": parts,
        "gated": gated,
        "gelu": epilogue.gelu,
        "whole_n": n % tiles.block_n == 0,
        "whole_k": k % tiles.block_k == 0,
        "num_warps": tiles.num_warps,
        **pdl_options(x.device, pdl),
    }
    pieces = triton.cdiv(k, tiles.block_k)
    if tiles.small:
        assert normed is None and epilogue.mailbox is None and epilogue.delta is None
        small_kernel[(across_m, 1, across_n)](*tensors, *numbers, pieces=pieces, **options)
        return result
    exchange = (*sending(epilogue.mailbox), adding(epilogue.delta, tiles.block_n))
    options |= {"groups": tiles.groups, "lanes": tiles.num_warps * 32}
    assert normed is None or (tiles.burst and norm is not None and normed.is_contiguous())
    if tiles.burst:
        burst_kernel[(across_m, 1, across_n)](
            *tensors, *numbers, *exchange, normed, pieces=pieces, **options
        )
        return result

    splits, split = split_arguments(m, weight.shape[0], k, tiles, workspace, gated=gated)
    prefetch = tiles.prefetch
    if epilogue.delta is not None:
        num_bytes = across_m * splits * weight.shape[0] * 128 * weight.itemsize  # of 128 elements
        prefetch = max(tuning_of(x.device).delta_prefetch // num_bytes * 128, prefetch)
    stream_kernel[(across_m, splits, across_n)](
        *tensors,
        *numbers,
        *exchange,
        *split,
        prefetch if k % 8 == 0 else 0,
        stages=tiles.num_stages,
        **options,
    )
    return result
