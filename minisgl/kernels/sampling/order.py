"""The order of a row's tokens: the larger logit first, of equals the lower id. In Triton.

A token's rank is one int64 in which its value and id can be read; ids have ID_BITS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ID_BITS = tl.constexpr(24)
_ID_MASK = tl.constexpr(2**24 - 1)
LOWEST = tl.constexpr(-(2**55))  # below the rank of any token


@triton.jit
def _key(value):
    """int32, ordered as float32 `value` is; -0 equals 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def rank_of(value, id):
    """int64, larger for what comes first."""
    return (_key(value).to(tl.int64) << ID_BITS) | (id.to(tl.int64) ^ _ID_MASK)


@triton.jit
def id_of(rank):
    return ((rank & _ID_MASK) ^ _ID_MASK).to(tl.int32)


def ids_of(ranks: Tensor) -> Tensor:
    """For torch: int64, of any shape."""
    mask: int = _ID_MASK.value
    return (ranks & mask) ^ mask


@triton.jit
def value_of(rank):
    key = (rank >> ID_BITS).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def least_rank(value):
    """The least that a token of this value could have."""
    return _key(value).to(tl.int64) << ID_BITS


@triton.jit
def least_of_value(rank):
    """The least that a token of the value of `rank` could have."""
    return (rank >> ID_BITS) << ID_BITS


@triton.jit
def above_ranks(value):
    """The least that no token of this value reaches."""
    return (_key(value).to(tl.int64) + 1) << ID_BITS


@triton.jit
def select(ranks, low, high, wanted, room):
    """A cut which from `wanted` to `room` of `ranks` reach, or the largest that `wanted` reach.

    At least `wanted` reach `low`, fewer reach `high`.
    """
    middle = (low + high) >> 1
    while middle > low:
        count = tl.sum((ranks >= middle).to(tl.int32))
        high = tl.where(count < wanted, middle, tl.where(count <= room, middle + 1, high))
        low = tl.where(count < wanted, low, middle)
        middle = (low + high) >> 1
    return low
