"""Quantised weights as the kernels of this folder read them, and the arithmetic of their values.

W[n, k] = q · scale, where q is e4m3 or an INT4 number minus its zero point, which the model's dtype
holds exactly. The scale is rounded to that dtype, and the product once more. Every kernel computes
with these values, whatever the number of rows; `values` is their reference. In NVFP4 q · scale is
exact, and the factor of a row is left for the float32 sums; only where W is written out for cuBLAS
is their product rounded.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.linear.nvfp4 import Nvfp4Weights
from minisgl.kernels.linear.quantized import CHUNK

_BIAS = {torch.bfloat16: 128, torch.float16: 1024}  # see int4_bias in unpacking.py
_E4M3_FACTOR = {torch.bfloat16: 1, torch.float16: 256}  # see e4m3_planes in unpacking.py


class WeightWords(NamedTuple):
    """W [n, k] for one dtype of x."""

    words: Tensor  # [n, k · bits / 16] int16
    # [k / group, n] int32: two numbers of x's dtype in each, the scale of a group in the lower half
    # and in the upper one what `int4_planes` adds to its numbers. [1, n] if all groups have one.
    # If centred, the scales times 2 ** 117 and -8 · scales · 2 ** -16. Of NVFP4 as from
    # pack_scales.
    scales: Tensor
    bits: int  # 4 or 8
    group: int  # columns of k that share a scale: 32, 64 or 128
    centred: bool = False  # INT4 with zero point 8 for bfloat16: see _centred_int4_planes
    factor: Tensor | None = None  # of NVFP4: [n] float32

    @property
    def n(self) -> int:
        return self.words.shape[0]

    @property
    def k(self) -> int:
        return self.words.shape[1] * 16 // self.bits

    @property
    def scale_stride(self) -> int:
        """From the scales of a group to those of the next one."""
        return 0 if self.scales.shape[0] == 1 else self.n

    @property
    def span(self) -> int:
        """Columns of k that a kernel takes at once."""
        if self.factor is not None:
            return nvfp4_span(self.k)
        return max(self.group, 64) if self.bits == 4 else self.group


def int4_words(data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> WeightWords:
    """data: [n, k / 4] int16 as from pack_int4; scale: [k / group, n]; zero: uint8 like scale, or
    None for 8. The groups have 32 or a multiple of 64 columns. dtype: float16 or bfloat16."""
    k = data.shape[1] * 4
    scale, group = _refined(scale.to(dtype), k, (128, 64, 32))
    if zero is None and dtype == torch.bfloat16 and bool((scale.abs() < 1024).all()):
        wide = scale.float()
        words = _joined((wide * 2.0**117).to(dtype), (wide * -(2.0**-13)).to(dtype))
        return WeightWords(data, words, 4, group, centred=True)
    if zero is None:
        offset = torch.full_like(scale, -8 - _BIAS[dtype])
    else:
        offset = (-_BIAS[dtype] - _refined(zero, k, (group,))[0].float()).to(dtype)
    return WeightWords(data, _joined(scale, offset), 4, group)


def nvfp4_span(k: int) -> int:
    """The span of NVFP4 words: two chunks where k is made of such spans, because tiles of 8 rows of
    x take 128 columns (weight_only_tiles.py)."""
    return gcd(k, 2 * CHUNK)


def nvfp4_words(weights: Nvfp4Weights) -> WeightWords:
    """For x of any half precision."""
    return WeightWords(weights.data, weights.scale, 4, CHUNK, factor=weights.factor)


def e4m3_span(k: int, block: tuple[int, int] | None) -> int | None:
    """The span of e4m3 words; None if k, or a block, is not a multiple of 32 columns."""
    columns = gcd(k, 128) if block is None else block[1]
    return None if k % columns or columns % 32 else min(columns, 128)


def e4m3_words(
    data: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> WeightWords | None:
    """data: [n, k] e4m3 contiguous; scale: [n], or with a block [⌈n / rows⌉, ⌈k / columns⌉].

    None without an `e4m3_span`. dtype: float16 or bfloat16.
    """
    n, k = data.shape
    columns = e4m3_span(k, block)
    if columns is None:
        return None
    scale = (scale.float() * _E4M3_FACTOR[dtype]).to(dtype)
    if block is None:
        per_group, group = scale[None], columns
    else:
        rows = scale.repeat_interleave(block[0], dim=0)[:n]
        per_group, group = _refined(rows.T, k, (128, 64, 32))
    return WeightWords(data.view(torch.int16), _joined(per_group, per_group), 8, group)


def _refined(scale: Tensor, k: int, groups: tuple[int, ...]) -> tuple[Tensor, int]:
    """The scales repeated for smaller groups, the largest of these that divides theirs."""
    wide = k // scale.shape[0]
    group = next(group for group in groups if wide % group == 0)
    return scale.repeat_interleave(wide // group, dim=0), group


def _joined(low: Tensor, high: Tensor) -> Tensor:
    """int32 words [any, n] of two numbers of 16 bits."""
    return torch.stack([low, high], dim=-1).view(torch.int32).squeeze(-1)


def values(weights: WeightWords, dtype: torch.dtype) -> Tensor:
    """W [n, k] in `dtype`, which the words must be for: the reference of the kernels."""
    n, k = weights.n, weights.k
    if weights.factor is not None:
        matrix = Nvfp4Weights(weights.words, weights.scales, weights.factor, is_tiled=False)
        return matrix.dequantized().to(dtype)
    halves = weights.scales[..., None].view(dtype).float()  # [any, n, 2]
    scale, offset = (half.T.repeat_interleave(k // len(half), dim=1) for half in halves.unbind(-1))
    if weights.bits == 8:
        numbers = weights.words.view(torch.float8_e4m3fn).float()
        scale = scale / _E4M3_FACTOR[dtype]
    else:
        words = weights.words.view(n, k // 64, 1, 16).to(torch.int32)
        shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)[:, None]
        numbers = (words >> shifts & 15).reshape(n, k).float()
        if weights.centred:
            numbers, scale = numbers - 8, scale * 2.0**-117
        else:
            numbers += _BIAS[dtype] + offset
    return (numbers * scale).to(dtype)
