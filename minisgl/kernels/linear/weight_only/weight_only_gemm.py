"""Linear maps with quantised weights and plain x in Triton: y = x Wᵀ, float32 sums.

Up to some two thousand rows W is dequantised in registers. It is built like the stream kernel of
dense weights (linear/dense_gemm.py) and does the same in one launch: split-k, a norm before it,
silu(gate) · up, the addition to the residual stream, or sending to ranks. For more rows that would
do the work of dequantising over and over; `dequantize` does it once, at the speed of memory, for
cuBLAS to multiply with.

For few rows the time is that of reading W, a quarter or a half of what dense weights take, if an SM
unpacks some 36 INT4 weights in each of its cycles. It has 128 lanes: that leaves 3 instructions a
weight for everything. See unpacking.py for how unpacking takes two.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minisgl.kernels.comm.mailbox import sending
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.delta_parts import adding
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, split_arguments
from minisgl.kernels.linear.weight_only.dequantize import dequantize_kernel
from minisgl.kernels.linear.weight_only.weight_only_kernel import weight_only_kernel
from minisgl.kernels.linear.weight_only.weight_only_tiles import choose_tiles
from minisgl.kernels.linear.weight_only.weights import WeightWords
from minisgl.kernels.tuning import tuning_of

_DEQUANTIZED_ROWS, _DEQUANTIZED_COLUMNS = 16, 512  # of a program


def linear(
    x: Tensor,
    weight: WeightWords,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = PLAIN,
    norm: FusedNorm | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """What the epilogue makes of x Wᵀ + bias, or with a norm of the same of x's norm.

    x: [m, k] float16 or bfloat16, for which the words of W are made, its rows contiguous; bias: [n]
    of x's dtype. Without a workspace, k is not split. `pdl`: see launch_options.py; weight and bias
    must be older than two launches.
    """
    (m, k), n = x.shape, weight.n
    assert weight.k == k and x.stride(1) == 1
    x_squares = None if norm is None else norm.squares
    assert (norm is None) == (x_squares is None)
    assert x_squares is None or (x_squares.is_contiguous() and x_squares.shape[0] == m)
    gated = epilogue.gated
    assert not gated or bias is None
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
    out, squares = epilogue.place(x, n, across_n)
    result = out if squares is None else squares
    if m == 0:
        return result

    splits, split = split_arguments(m, weight.n, k, tiles, workspace, gated=gated)
    num_parts = 1 if x_squares is None else x_squares.shape[1]
    weight_only_kernel[(across_m, splits, across_n)](
        out,
        squares,
        x,
        weight.words,
        weight.scales,
        weight.factor,
        bias,
        None if norm is None else norm.weight,
        x_squares,
        m,
        n,
        k,
        x.stride(0),
        num_parts,
        0.0 if norm is None else norm.eps,
        *sending(epilogue.mailbox),
        adding(epilogue.delta, tiles.block_n),
        *split,
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
        gelu=epilogue.gelu,
        whole_n=n % tiles.block_n == 0,
        stages=tiles.num_stages,
        lanes=tiles.num_warps * 32,
        packed=_packed(x, weight),
        centred=weight.centred,
        on_gpu=x.is_cuda,
        num_warps=tiles.num_warps,
        **pdl_options(x.device, pdl),
    )
    return result


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
        weight.factor,
        n,
        k,
        weight.scale_stride,
        bits=weight.bits,
        group=weight.group,
        rows=_DEQUANTIZED_ROWS,
        columns=columns,
        packed=_packed(out, weight),
        centred=weight.centred,
        num_warps=4,
        **pdl_options(out.device, pdl),
    )
    return out


def _packed(x: Tensor, weight: WeightWords) -> bool:
    """Whether the kernels take two words at a time: not in the interpreter, nor NVFP4 in
    float16."""
    return x.device.type == "cuda" and (weight.factor is None or x.dtype == torch.bfloat16)
