"""Weights in NVFP4, and their product: e2m1 numbers in blocks of 16 columns of a row that share an
e4m3 scale, and a float32 factor of each row.

A number times its scale is exact in half precision. x is never rounded, and the factor multiplies
the float32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.linear.e2m1 import E2M1_STD, numbers_of, pack_e2m1, tiled, untiled
from minisgl.kernels.linear.quantized import CHUNK, QuantizedProduct

BLOCK = 16  # columns that share a scale
# A scale is a byte: five bits of exponent, and e4m3's three of the mantissa. The fifth makes a
# normal number of each that e4m3 has, so that kernels have only to move the bits, and needs the
# place of the sign.
_SCALE_BIAS = 22
_MOVED = 127 - _SCALE_BIAS << 3  # to the exponent of float32
_RANDOM_SCALE = 32.0  # of random weights


class Nvfp4Weights(NamedTuple):
    """A matrix, or with a leading dimension one of each expert. k is a multiple of CHUNK."""

    data: Tensor  # [..., n, k / 4] int16: as from pack_e2m1
    scale: Tensor  # [..., k / CHUNK, n] int32: as from pack_scales
    factor: Tensor  # [..., n] float32
    is_tiled: bool  # whether `data` is as from `tiled`

    @staticmethod
    def allocate(*shape: int, is_tiled: bool) -> Nvfp4Weights:
        """Uninitialised weights [..., n, k], on torch's default device."""
        *leading, n, k = shape
        return Nvfp4Weights(
            torch.empty([*leading, n, k // 4], dtype=torch.int16),
            torch.empty([*leading, k // CHUNK, n], dtype=torch.int32),
            torch.empty([*leading, n], dtype=torch.float32),
            is_tiled,
        )

    def named(self, name: str) -> dict[str, Tensor]:
        return {name: self.data, f"{name}_scale": self.scale, f"{name}_factor": self.factor}

    def rows(self, first: int, size: int) -> Nvfp4Weights:
        part = slice(first, first + size)
        return self._replace(
            data=self.data[part], scale=self.scale[:, part], factor=self.factor[part]
        )

    def expert(self, index: int) -> Nvfp4Weights:
        return self._replace(
            data=self.data[index], scale=self.scale[index], factor=self.factor[index]
        )

    def words_of(self, codes: Tensor) -> Tensor:
        """`data` of numbers by their four bits: [n, k] uint8."""
        words = pack_e2m1(codes)
        return tiled(words) if self.is_tiled else words

    def dequantized(self) -> Tensor:
        numbers = numbers_of(untiled(self.data) if self.is_tiled else self.data)
        scale = unpack_scales(self.scale).repeat_interleave(BLOCK, dim=-1)
        return numbers * scale * self.factor[..., None]

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        for words in self.data if self.data.dim() == 3 else [self.data]:
            words.random_(-(1 << 15), 1 << 15, generator=generator)
        shape = *self.factor.shape, 4 * self.scale.shape[-2]
        scales = torch.full(shape, _RANDOM_SCALE, device=self.scale.device)
        self.scale.copy_(pack_scales(scales))
        self.factor.fill_(std / (_RANDOM_SCALE * E2M1_STD))


def pack_scales(scale: Tensor) -> Tensor:
    """The scales of a chunk in one number, those of the lower columns in its lower bits.

    scale: [..., n, k / BLOCK], numbers of e4m3 that are not negative; returns [..., k / CHUNK, n]
    int32.
    """
    bits = (scale.float().view(torch.int32) >> 20) - _MOVED
    codes = torch.where(scale.float() == 0, 0, bits).to(torch.uint8)
    return codes.contiguous().view(torch.int32).mT.contiguous()


def unpack_scales(packed: Tensor) -> Tensor:
    """The inverse of `pack_scales`, float32."""
    places = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    codes = (packed.mT[..., None] >> places & 255).flatten(-2)
    return torch.where(codes == 0, 0, codes + _MOVED << 20).view(torch.float32)


class Nvfp4Product(QuantizedProduct):
    """W [n, k] in NVFP4."""

    weight: Nvfp4Weights
