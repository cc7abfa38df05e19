"""Numbers of four bits: e2m1, of the OCP microscaling specification (v1.0), and how kernels hold
them."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.linear.quantized import CHUNK

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
E2M1_STD = (sum(number**2 for number in E2M1) / len(E2M1)) ** 0.5
GROUP = 16  # rows whose numbers lie together in memory where they are `tiled`

# Of each quarter of a chunk, the places of the four bits of a number in 32 bits, which have one in
# either half. They are where bfloat16 has them, the sign at its end and the others on both sides of
# the boundary of exponent and mantissa, turned by 0, 4, 10, or 6 and 14 places: so few operations
# take two numbers out at once.
_PLACES = tuple(
    tuple((place + turn) % 32 for place, turn in zip((6, 7, 8, 15), turns, strict=True))
    for turns in ((0, 0, 0, 0), (4, 4, 4, 4), (10, 10, 10, 10), (14, 14, 6, 14))
)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Four numbers in a word, so that few operations take them out.

    codes: [..., n, k] uint8, k a multiple of CHUNK; returns [..., n, k / 4] int16. Two words are 32
    bits with numbers of one row, those of columns 2 j and 2 j + 1 of each quarter of a chunk.
    """
    quarters = codes.unflatten(-1, (-1, 4, CHUNK // 8, 2)).long().unbind(-3)
    both = torch.zeros_like(quarters[0][..., 0])
    for quarter, places in zip(quarters, _PLACES, strict=True):
        for half in range(2):
            for bit, place in enumerate(places):
                both |= (quarter[..., half] >> bit & 1) << (place + 16 * half) % 32
    words = torch.stack((both, both >> 16), dim=-1).to(torch.int16)  # the low 16 bits of each
    return words.flatten(-3)


def unpack_e2m1(words: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`."""
    pairs = words.unflatten(-1, (-1, CHUNK // 8, 2)).long() & 0xFFFF
    both = pairs[..., 0] | pairs[..., 1] << 16
    quarters = [
        torch.stack([_number_at(both, places, half) for half in range(2)], dim=-1)
        for places in _PLACES
    ]
    return torch.stack(quarters, dim=-3).to(torch.uint8).flatten(-4)


def tiled(words: Tensor) -> Tensor:
    """The words of `pack_e2m1`, [..., n, k / 4], in the order in which tensor cores take them.

    n is a multiple of GROUP. The words of GROUP rows lie together, one chunk after the other, and
    in it eight for each thread of a warp: four of row g, then the same four of row g + 8.
    """
    threads = words.reshape(*words.shape[:-2], -1, 2, GROUP // 2, words.shape[-1] // 16, 4, 4)
    return _swapped(threads, (-6, -3, -4, -2, -5, -1)).reshape(words.shape)


def untiled(data: Tensor) -> Tensor:
    """The inverse of `tiled`."""
    *leading, n, num_words = data.shape
    threads = data.reshape(*leading, n // GROUP, num_words // 16, GROUP // 2, 4, 2, 4)
    return _swapped(threads, (-6, -2, -4, -5, -3, -1)).reshape(data.shape)


def numbers_of(words: Tensor) -> Tensor:
    """What the words of `pack_e2m1` stand for: [..., n, k] float32."""
    codes = unpack_e2m1(words).long()
    signed = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
    return signed[codes]


def _number_at(both: Tensor, places: tuple[int, ...], half: int) -> Tensor:
    bits = [(both >> (place + 16 * half) % 32 & 1) << bit for bit, place in enumerate(places)]
    return torch.stack(bits).sum(0)


def _swapped(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """With its last dimensions in this order."""
    return tensor.permute(*range(tensor.dim() - len(dims)), *dims)
