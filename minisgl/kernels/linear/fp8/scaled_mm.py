"""FP8 linear maps of many rows by torch's scaled products: CUTLASS with scales of rows, cuBLASLt
with those of blocks. x is rounded as for our kernel, and sums are in float32 too."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.linear.quantized import E4M3, Fp8Weights


def takes(x: Fp8Rows, weights: Fp8Weights, bias: Tensor | None) -> bool:
    """Whether `linear` computes this product on this device, and rightly."""
    data, _, block = weights
    n, k = data.shape
    is_fp8 = data.device.type == "cuda" and data.dtype == E4M3
    if not is_fp8 or x.dtype != torch.bfloat16 or n % 16 or k % 16:
        return False
    if block is None:
        return _has_rows(data.device)
    # With other numbers of blocks cuBLAS reads the scales from other places than torch puts them.
    whole = block == (128, 128) and n % 128 == 0 and k % 512 == 0
    return whole and x.scale.dim() == 2 and bias is None and _has_blocks(data.device)


def linear(x: Fp8Rows, weights: Fp8Weights, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias, a new [m, n] of x.dtype, of what `takes` accepts."""
    data, scale, block = weights
    if block is None:
        return F.scaled_mm(
            x.data,
            data.T,
            x.scale[:, None],
            ScalingType.RowWise,
            scale[None, :],
            ScalingType.RowWise,
            bias=bias,
            output_dtype=x.dtype,
        )
    m, k = x.data.shape
    rows = room(m)  # cuBLAS takes the scales of a group one behind the other, and by fours
    y = F.scaled_mm(
        x.data.as_strided((rows, k), (k, 1)),
        data.T,
        x.scale.as_strided((rows, x.scale.shape[1]), (1, rows)),
        ScalingType.BlockWise1x128,
        scale.T,
        ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return y[:m]


@cache
def _has_rows(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _has_blocks(device: torch.device) -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)
