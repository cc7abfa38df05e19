"""Linear maps in FP8 or INT8 on our kernel: y = x Wᵀ with x and W in e4m3, or both in int8, and
their scales in float32.

As in the folder above the kernel is built around W, which is the left operand, and which few rows
read at the memory's bandwidth: acc[n, m] = W[n, k] xᵀ[k, m]. x comes rounded, from
elementwise/quantize.py: it is rounded once, whatever the number of programs that read it. Sums are
in float32; the tensor cores add 128 products at most before. Those of integers are exact in int32.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minisgl.kernels.adapters import Delta
from minisgl.kernels.comm.mailbox import Mailbox, sending
from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.delta_parts import adding
from minisgl.kernels.linear.fp8.fp8_kernel import fp8_kernel
from minisgl.kernels.linear.fp8.fp8_tiles import choose_tiles
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, split_arguments
from minisgl.kernels.tuning import tuning_of

_EXACT_K = 128  # products of FP8 that the tensor cores add up by themselves


def exact_k(weights: Tensor, block_k: int) -> int:
    """How many products of a tile the tensor cores may add up by themselves; 0: any number."""
    return 0 if weights.dtype == torch.int8 else min(_EXACT_K, max(block_k, 32))


def linear(
    x: Fp8Rows,
    weights: Fp8Weights,
    bias: Tensor | None,
    *,
    mailbox: Mailbox | None = None,
    delta: Delta | None = None,
    workspace: LinearWorkspace | None = None,
    tiles: LinearTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """x Wᵀ + bias, a new [m, n] of x.dtype; bias: [n], of the same. With a mailbox it is sent, as
    by an Epilogue of other GEMMs, and what is returned is empty. A delta is as there.

    x has scales of rows, or where W has blocks, of groups as wide as these. Without a workspace, k
    is not split. `pdl`: see launch_options.py; weights and bias must be older than two launches.
    """
    data, scale, block = weights
    (m, k), n = x.data.shape, len(data)
    assert data.is_contiguous() and data.shape[1] == k and x.data.is_contiguous()
    assert data.dtype == x.data.dtype and scale.is_contiguous()
    assert m <= 1 or x.scale.stride(0) == 1
    rows = m if mailbox is None else 0
    out = torch.empty((rows, n), dtype=x.dtype, device=data.device)
    assert mailbox is None or (m <= mailbox.max_rows and mailbox.takes(out))
    if m == 0:
        return out
    x_scale = x.scale
    if block is not None and x_scale.dim() == 1:  # the same for all groups
        x_scale = x_scale[:, None].expand(m, scale.shape[1])
    assert x_scale.dim() == (1 if block is None else 2)
    if tiles is None:
        may_split = workspace is not None
        tiles = choose_tiles(
            m, n, k, tuning_of(data.device), group=weights.group, may_split=may_split
        )
    assert block is None or tiles.block_k == block[1]

    splits, split = split_arguments(m, n, k, tiles, workspace)
    grid = (triton.cdiv(m, tiles.block_m), splits, triton.cdiv(n, tiles.block_n))
    fp8_kernel[grid](
        out,
        x.data,
        x_scale,
        data,
        scale,
        bias,
        m,
        n,
        k,
        x_scale.stride(-1),
        *sending(mailbox),
        adding(delta, tiles.block_n),
        *split,
        tiles.prefetch if k % 16 == 0 else 0,
        block_n=tiles.block_n,
        block_m=tiles.block_m,
        block_k=tiles.block_k,
        scale_rows=0 if block is None else block[0],
        exact_k=exact_k(data, tiles.block_k),
        whole_n=n % tiles.block_n == 0,
        whole_k=k % tiles.block_k == 0 and tiles.block_k >= 32,
        whole_m=room(m) % tiles.block_m == 0,
        stages=tiles.num_stages,
        lanes=tiles.num_warps * 32,
        num_warps=tiles.num_warps,
        **pdl_options(data.device, pdl),
    )
    return out
