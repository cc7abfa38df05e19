"""The order keys of tokens (order.py) in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.sampling import order

ID_BITS = tl.constexpr(order.ID_BITS)
_ID_MASK = tl.constexpr(order.ID_MASK)
LOWEST = tl.constexpr(-(2**55))  # below the key of any token


@triton.jit
def _key(value):
    """int32, ordered as float32 `value` is; -0 equals 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def order_key(value, id):
    """int64, larger for what comes first."""
    return (_key(value).to(tl.int64) << ID_BITS) | (id.to(tl.int64) ^ _ID_MASK)


@triton.jit
def id_of(key):
    return ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)


@triton.jit
def value_of(key):
    value = (key >> ID_BITS).to(tl.int32)
    return tl.where(value < 0, value ^ 0x7FFFFFFF, value).to(tl.float32, bitcast=True)


@triton.jit
def least_key(value):
    """The least that a token of this value could have."""
    return _key(value).to(tl.int64) << ID_BITS


@triton.jit
def least_of_value(key):
    """The least that a token of the value of `key` could have."""
    return (key >> ID_BITS) << ID_BITS


@triton.jit
def key_above(value):
    """The least that no token of this value reaches."""
    return (_key(value).to(tl.int64) + 1) << ID_BITS


@triton.jit
def select(keys, low, high, wanted, room):
    """A cut which from `wanted` to `room` of `keys` reach, or the largest that `wanted` reach.

    At least `wanted` reach `low`, fewer reach `high`.
    """
    middle = (low + high) >> 1
    while middle > low:
        count = tl.sum((keys >= middle).to(tl.int32))
        high = tl.where(count < wanted, middle, tl.where(count <= room, middle + 1, high))
        low = tl.where(count < wanted, low, middle)
        middle = (low + high) >> 1
    return low
