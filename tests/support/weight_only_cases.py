"""Random quantised weights of every kind that the weight-only kernels take."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from support.mxfp4_checkpoints import NUMBERS
from torch import Tensor

from minisgl.kernels.linear.e2m1 import pack_e2m1, tiled
from minisgl.kernels.linear.nvfp4 import Nvfp4Weights, pack_scales
from minisgl.kernels.linear.weight_only.weight_only_product import WeightOnlyProduct
from minisgl.kernels.linear.weight_only.weights import (
    WeightWords,
    e4m3_words,
    int4_words,
    nvfp4_words,
    values,
)
from minisgl.kernels.rows import Rows


def packed_int4(q: Tensor) -> Tensor:
    """int16 [n, k / 4]: of 64 columns, bits 4i to 4i + 3 of element j hold column 16 · i + j."""
    nibbles = q.to(torch.int64).unflatten(-1, (-1, 4, 16)) << torch.arange(0, 16, 4)[:, None].to(
        q.device
    )
    return nibbles.sum(-2).flatten(-2).to(torch.int16)


def random_int4(
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype,
    *,
    symmetric: bool,
    device: torch.device,
    scale_dtype: torch.dtype | None = None,
) -> tuple[WeightWords, Tensor]:
    """The words, and W [n, k] float64 as its definition has it: (q - zero) · scale, with the scale
    and the product rounded to dtype."""
    q = torch.randint(0, 16, (n, k), device=device)
    scale = (torch.rand(k // group, n, device=device) + 0.1) / k**0.5 / 4
    scale *= 2 * torch.randint(0, 2, scale.shape, device=device) - 1
    scale = scale.to(scale_dtype or dtype)
    zero = None
    if not symmetric:
        zero = torch.randint(0, 16, (k // group, n), device=device, dtype=torch.uint8)
    shift = torch.full_like(scale, 8) if zero is None else zero
    numbers = q - spread(shift, group).double()
    values = (numbers * spread(scale.to(dtype), group).double()).to(dtype)
    return int4_words(packed_int4(q), scale, zero, dtype), values.double()


def random_e4m3(
    n: int, k: int, block: tuple[int, int] | None, dtype: torch.dtype, *, device: torch.device
) -> tuple[WeightWords, Tensor]:
    """As random_int4, for e4m3 with a scale of each row or block; all finite bit patterns occur."""
    bits = torch.randint(0, 256, (n, k), device=device, dtype=torch.uint8)
    bits[bits & 127 == 127] = 0
    data = bits.view(torch.float8_e4m3fn)
    if block is None:
        scale = torch.rand(n, device=device) * 1e-3
        wide = scale[:, None].expand(n, k)
    else:
        scale = torch.rand(-(-n // block[0]), -(-k // block[1]), device=device) * 1e-3
        wide = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    factor = 256 if dtype == torch.float16 else 1  # float16 has subnormal numbers below 6e-5
    rounded = (wide * factor).to(dtype).double() / factor
    words = e4m3_words(data, scale, block, dtype)
    assert words is not None
    return words, (data.double() * rounded).to(dtype).double()


def random_nvfp4(
    n: int, k: int, dtype: torch.dtype, *, device: torch.device
) -> tuple[WeightWords, Tensor]:
    """As random_int4, for numbers and scales of any bits."""
    weights, exact = nvfp4_weights(n, k, device=device, is_tiled=False)
    return nvfp4_words(weights), exact


def nvfp4_weights(*shape: int, device: torch.device, is_tiled: bool) -> tuple[Nvfp4Weights, Tensor]:
    """[..., n, k], and the same float64. Factors of rows have two bits, so that half precision
    holds every product."""
    *leading, n, k = shape
    codes = torch.randint(0, 16, shape, device=device, dtype=torch.uint8)
    bits = torch.randint(0, 127, (*leading, n, k // 16), device=device, dtype=torch.uint8)
    scale = bits.view(torch.float8_e4m3fn)
    factor = torch.randint(2, 4, (*leading, n), device=device) * 2.0**-14
    words = pack_e2m1(codes)
    weights = Nvfp4Weights(
        tiled(words) if is_tiled else words, pack_scales(scale), factor.float(), is_tiled
    )
    numbers = NUMBERS.to(device).double()[codes.long()]
    wide = scale.double().repeat_interleave(16, dim=-1)
    return weights, numbers * wide * factor.double()[..., None]


def spread(values: Tensor, group: int) -> Tensor:
    """[k / group, n] → [n, k]."""
    return values.T.repeat_interleave(group, dim=1)


class GivenWords(WeightOnlyProduct):
    """A product of given words, made for x of `dtype`."""

    def __init__(self, words: WeightWords, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        super().__init__(cast(Any, words), bias)
        self.given, self.dtype = words, dtype

    @property
    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.given.words}

    @property
    def shape(self) -> tuple[int, int]:
        return self.given.n, self.given.k

    @property
    def bits(self) -> int:
        return self.given.bits

    @property
    def span(self) -> int | None:
        return self.given.span

    def make_words(self, dtype: torch.dtype) -> WeightWords:
        assert dtype == self.dtype
        return self.given

    def reference(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return F.linear(x, values(self.given, self.dtype), self.bias)
