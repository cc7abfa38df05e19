"""Experts in MXFP4, the format of the OCP microscaling specification (v1.0): e2m1 numbers in blocks
of 32 columns, which share a power of two.

A weight is its number times the power of its block, rounded to the dtype of x: exact but in
float16. x is never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.moe.quantized_experts import QuantizedExperts
from minisgl.kernels.moe.reference import Clamped, Expert, ExpertBiases, activated

BLOCK = 32  # columns that share a power of two
EXPONENT_BIAS = 127
# Powers of two that a scale may be. The kernels multiply with them in bfloat16, and with others on
# the way; smaller ones count as 0.
LEAST_EXPONENT, LARGEST_EXPONENT = -68, 65
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
_E2M1_STD = (sum(number**2 for number in E2M1) / len(E2M1)) ** 0.5
GROUP = 16  # rows whose numbers lie together in memory

# Of each quarter of a chunk, the places of the four bits of a number in 32 bits, which have one in
# either half. They are where bfloat16 has them, the sign at its end and the others on both sides of
# the boundary of exponent and mantissa, turned by 0, 4, 10, or 6 and 14 places: so few operations
# take two numbers out at once.
_PLACES = tuple(
    tuple((place + turn) % 32 for place, turn in zip((6, 7, 8, 15), turns, strict=True))
    for turns in ((0, 0, 0, 0), (4, 4, 4, 4), (10, 10, 10, 10), (14, 14, 6, 14))
)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Numbers in the order in which tensor cores take them.

    codes: [..., n, k] uint8, n a multiple of GROUP and k of CHUNK; returns [..., n, k / 4] int16.

    Two words are 32 bits with numbers of one row, those of columns 2 j and 2 j + 1 of each quarter
    of a chunk. The words of GROUP rows lie together, one chunk after the other, and in it eight for
    each thread of a warp: four of row g, then the same four of row g + 8.
    """
    quarters = codes.unflatten(-1, (-1, 4, CHUNK // 8, 2)).long().unbind(-3)
    both = torch.zeros_like(quarters[0][..., 0])
    for quarter, places in zip(quarters, _PLACES, strict=True):
        for half in range(2):
            for bit, place in enumerate(places):
                both |= (quarter[..., half] >> bit & 1) << (place + 16 * half) % 32
    words = torch.stack((both, both >> 16), dim=-1).to(torch.int16)  # the low 16 bits of each
    threads = words.reshape(*codes.shape[:-2], -1, 2, GROUP // 2, *both.shape[-2:-1], 4, 4)
    return _swapped(threads, (-6, -3, -4, -2, -5, -1)).reshape(*codes.shape[:-1], -1)


def unpack_e2m1(data: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`."""
    *_, n, num_words = data.shape
    threads = data.reshape(*data.shape[:-2], n // GROUP, num_words // 16, GROUP // 2, 4, 2, 4)
    words = _swapped(threads, (-6, -2, -4, -5, -3, -1)).reshape(*data.shape[:-1], -1, CHUNK // 8, 2)
    low, high = (words.long() & 0xFFFF).unbind(-1)
    both = low | high << 16
    quarters = [
        torch.stack([_number_at(both, places, half) for half in range(2)], dim=-1)
        for places in _PLACES
    ]
    return torch.stack(quarters, dim=-3).to(torch.uint8).reshape(*data.shape[:-1], -1)


def _number_at(both: Tensor, places: tuple[int, ...], half: int) -> Tensor:
    bits = [(both >> (place + 16 * half) % 32 & 1) << bit for bit, place in enumerate(places)]
    return torch.stack(bits).sum(0)


def _swapped(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """With its last dimensions in this order."""
    return tensor.permute(*range(tensor.dim() - len(dims)), *dims)


class Mxfp4Weights(NamedTuple):
    """The matrices of all experts. n is a multiple of GROUP, k of CHUNK."""

    data: Tensor  # [num_experts, n, k / 4] int16: the bits of four numbers, as from pack_e2m1
    # [num_experts, k / CHUNK, n] int32: two bfloat16 numbers, the first block's in the lower half
    scale: Tensor

    @staticmethod
    def allocate(num_experts: int, n: int, k: int) -> Mxfp4Weights:
        """Uninitialised weights, on torch's default device."""
        return Mxfp4Weights(
            torch.empty((num_experts, n, k // 4), dtype=torch.int16),
            torch.empty((num_experts, k // CHUNK, n), dtype=torch.int32),
        )

    def named(self, name: str) -> dict[str, Tensor]:
        return {name: self.data, f"{name}_scale": self.scale}

    def expert(self, index: int) -> Mxfp4Weights:
        return Mxfp4Weights(self.data[index], self.scale[index])

    def dequantized(self) -> Tensor:
        codes = unpack_e2m1(self.data).long()
        signed = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
        both = self.scale[..., None].view(torch.bfloat16)  # [..., k / CHUNK, n, 2]
        scale = both.float().transpose(-3, -2).flatten(-2)
        return signed[codes] * scale.repeat_interleave(BLOCK, dim=-1)

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        for words in self.data:
            words.random_(-(1 << 15), 1 << 15, generator=generator)
        exponent = EXPONENT_BIAS + round(math.log2(std / _E2M1_STD))
        blocks = torch.full((self.scale.shape[2], 2 * self.scale.shape[1]), exponent)
        self.scale.copy_(packed_scales(blocks).to(self.scale.device))


def packed_scales(exponents: Tensor) -> Tensor:
    """The scales of Mxfp4Weights [..., k / CHUNK, n], from exponents [..., n, k / BLOCK] as they
    are stored: uint8, EXPONENT_BIAS more than those of the powers of two."""
    exponent = exponents.to(torch.int32) - EXPONENT_BIAS
    assert int(exponent.max()) <= LARGEST_EXPONENT
    power = torch.exp2(exponent.float()).to(torch.bfloat16)
    power = torch.where(exponent < LEAST_EXPONENT, 0.0, power)
    pairs = power.contiguous().view(torch.int32)
    return pairs.mT.contiguous()


class Mxfp4Experts(QuantizedExperts):
    """Experts whose matrices are in MXFP4, and their biases in the dtype of x."""

    gate_up: Mxfp4Weights
    down: Mxfp4Weights

    def __init__(
        self,
        gate_up: Mxfp4Weights,
        down: Mxfp4Weights,
        biases: ExpertBiases | None = None,
        clamped: Clamped | None = None,
    ) -> None:
        super().__init__(gate_up, down)
        self.biases = biases
        self.clamped = clamped

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {**super().weights, **({} if self.biases is None else self.biases.named)}

    def expert(self, index: int) -> Expert:
        def product(weights: Mxfp4Weights, bias: Tensor | None, x: Tensor) -> Tensor:
            matrix = weights.expert(index).dequantized().to(x.dtype).float()
            added = None if bias is None else bias[index].float()
            return F.linear(x.float(), matrix, added).to(x.dtype)

        up_bias, down_bias = self.biases or (None, None)
        return Expert(
            partial(product, self.gate_up, up_bias),
            partial(activated, clamped=self.clamped),
            partial(product, self.down, down_bias),
        )
