"""Quantised weights as the kernels of this folder read them, and the arithmetic of their values.

W[n, k] = q · scale, where q is e4m3 or an INT4 number minus its zero point, which the model's dtype
holds exactly. The scale is rounded to that dtype, and the product once more. Every kernel computes
with these values, whatever the number of rows; `values` is their reference.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

_SPAN = 128  # most columns of k in a span, which has one scale a row
_SPANS = {4: (128, 64), 8: (128, 64, 32)}
_BIAS = {torch.bfloat16: 128, torch.float16: 1024}  # see int4_bias in device.py
_E4M3_FACTOR = {torch.bfloat16: 1, torch.float16: 256}  # see e4m3_planes in device.py


class WeightWords(NamedTuple):
    """W [n, k] for one dtype of x."""

    words: Tensor  # [n, k · bits / 16] int16
    # [any, n] int32: two numbers of x's dtype in each. If paired the scales of two neighbouring
    # groups; else the scale of a group, below what `int4_planes` adds to its numbers.
    scales: Tensor
    bits: int  # 4 or 8
    group: int  # columns of k that share a scale, 32, 64 or 128
    paired: bool
    whole_row: bool  # one scale a row, the same for all groups

    @property
    def n(self) -> int:
        return self.words.shape[0]

    @property
    def k(self) -> int:
        return self.words.shape[1] * 16 // self.bits

    @property
    def scale_stride(self) -> int:
        """From the scales of a group, or a pair of them, to those of the next one."""
        return 0 if self.whole_row else self.n

    @property
    def span(self) -> int:
        return max(self.group, 64) if self.bits == 4 else self.group

    @property
    def unit(self) -> int:
        """Columns of k that a tile is a multiple of."""
        return max(self.span, 2 * self.group if self.paired else self.group)


def int4_words(data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> WeightWords:
    """data: [n, k / 4] int16 as from pack_int4; scale: [k / group, n]; zero: uint8 like scale, or
    None for 8. The groups have 32 or a multiple of 64 columns. dtype: float16 or bfloat16."""
    k = data.shape[1] * 4
    scale, group = _refined(scale, k, _SPANS[4] if k // scale.shape[0] != 32 else (32,))
    paired = zero is None and len(scale) % 2 == 0
    scale = scale.to(dtype)
    if paired:
        low, high = scale[0::2], scale[1::2]
    else:
        offset = torch.full_like(scale, -8 - _BIAS[dtype])
        if zero is not None:
            zero, _ = _refined(zero, k, (group,))
            offset = (-_BIAS[dtype] - zero.to(torch.float32)).to(dtype)
        low, high = scale, offset
    return WeightWords(data, _joined(low, high), 4, group, paired, whole_row=False)


def e4m3_words(
    data: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> WeightWords | None:
    """data: [n, k] e4m3 contiguous; scale: float32 [n], or with a block [⌈n / rows⌉, ⌈k / columns⌉].

    None if the blocks, or k, are not multiples of 32 columns. dtype: float16 or bfloat16.
    """
    n, k = data.shape
    words = data.view(torch.int16)
    scale = scale.float() * _E4M3_FACTOR[dtype]
    if block is None:
        group = gcd(k, _SPAN)
        if group < 32:
            return None
        rounded = scale.to(dtype)[None]
        paired = k % (2 * group) == 0
        return WeightWords(words, _joined(rounded, rounded), 8, group, paired, whole_row=True)
    rows, columns = block
    if k % columns or columns % 32:
        return None
    per_group = scale.repeat_interleave(rows, dim=0)[:n].T
    per_group, group = _refined(per_group, k, _SPANS[8])
    per_group = per_group.to(dtype)
    paired = len(per_group) % 2 == 0
    low, high = (per_group[0::2], per_group[1::2]) if paired else (per_group, per_group)
    return WeightWords(words, _joined(low, high), 8, group, paired, whole_row=False)


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
    halves = weights.scales[..., None].contiguous().view(dtype).float()  # [any, n, 2]
    if weights.bits == 8:
        numbers = weights.words.view(torch.float8_e4m3fn).float()
        halves = halves / _E4M3_FACTOR[dtype]
    else:
        words = weights.words.view(n, k // 64, 1, 16).to(torch.int32)
        shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)[:, None]
        numbers = (words >> shifts & 15).reshape(n, k).float()
    if weights.whole_row:
        return (numbers * halves[0, :, :1]).to(dtype)
    if weights.paired:
        scale = halves.permute(1, 0, 2).reshape(n, -1)
        zero = torch.full_like(scale, 8)
    else:
        scale = halves[..., 0].T
        zero = -halves[..., 1].T - _BIAS[dtype]
    scale = scale.repeat_interleave(weights.group, dim=1)
    if weights.bits == 8:
        return (numbers * scale).to(dtype)
    return ((numbers - zero.repeat_interleave(weights.group, dim=1)) * scale).to(dtype)
