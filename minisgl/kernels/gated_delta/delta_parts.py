"""What the kernels of a gated delta net share: gates, lengths, and whose rows a program has."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.gated_delta.reference import DeltaRows


def check_heads(rows: DeltaRows, state: Tensor) -> None:
    """That the strides are those which the kernels take."""
    q, k, v, gates = rows
    for part in (q, k, v):
        assert part.stride(2) == 1 and part.stride(1) == part.shape[2]
    assert gates.a.stride(1) == gates.b.stride(1) == 1
    assert gates.a_log.is_contiguous() and gates.dt_bias.is_contiguous()
    assert state.is_contiguous() and state.shape[1:] == (v.shape[1], k.shape[2], v.shape[2])
    assert v.shape[1] % k.shape[1] == 0 and q.shape == k.shape


@triton.jit
def decay_log(a, a_log, dt_bias):
    """The logarithm of the decay of the state, in float32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    # log(1 + y) of a small y loses as much as 1 + y does: the quotient puts that right.
    y = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + y
    log = tl.where(sum == 1.0, y, tl.log(sum) * (y / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return -tl.exp(a_log.to(tl.float32)) * tl.where(x > 20.0, x, log)


@triton.jit
def strength_of(b):
    """How much of the difference a row writes to the state: float32, rounded to b's dtype."""
    return tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit
def inverse_length(squares):
    """Of a query or key with this sum of squares."""
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def tile_of_segment(starts, is_head, num_segments, index, tile: tl.constexpr):
    """The segment of this program, and the number of its tile in it, which may be past its end.

    starts, is_head, index: of the segments, in a vector; only heads have tiles. A head has those
    from starts // tile + index on, which are enough of them, whatever the lengths: so the grid
    depends on numbers of rows and segments only.
    """
    number = tl.program_id(0)
    segment = tl.max(tl.where(is_head & (starts // tile + index <= number), index, 0), 0)
    first = tl.sum(tl.where(index == segment, starts, 0), 0)
    return segment, first, number - first // tile - segment
