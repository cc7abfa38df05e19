"""The gated delta rule of one row of each slot in Triton.

The time is that of the state, which is read and written once: 8 bytes for each number of it. A
program has all keys of a head for a part of its values, so that both sums over keys stay within it,
and reads its part of the state in one go: 16 KiB, with as many programs on an SM as registers
allow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.gated_delta.delta_parts import decay_log, inverse_length, strength_of
from minisgl.kernels.gated_delta.reference import Gates
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import DeltaDecodeTiles, tuning_of


def gated_delta_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: Tensor,
    slots: Tensor,
    *,
    tiles: DeltaDecodeTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """As in delta_net.py; sizes of heads are powers of two. `pdl`: overlap launches where the
    device can, by the rule of launch_options.py."""
    num_rows, v_heads, value_dim = v.shape
    k_heads, key_dim = k.shape[1:]
    a, b, a_log, dt_bias = gates
    check_heads(q, k, v, gates, state)
    tiles = tiles or tuning_of(v.device).delta_decode
    block = min(tiles.block_v, value_dim)
    out = v.new_empty(v.shape)
    if num_rows == 0:
        return out
    _decode_head[(v_heads * (value_dim // block), num_rows)](
        out,
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        state,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        v_heads=v_heads,
        group=v_heads // k_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block=block,
        num_warps=tiles.num_warps,
        **pdl_options(v.device, pdl),
    )
    return out


def check_heads(q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Tensor) -> None:
    """That the strides are those which the kernels take."""
    for part in (q, k, v):
        assert part.stride(2) == 1 and part.stride(1) == part.shape[2]
    assert gates.a.stride(1) == gates.b.stride(1) == 1
    assert gates.a_log.is_contiguous() and gates.dt_bias.is_contiguous()
    assert state.is_contiguous() and state.shape[1:] == (v.shape[1], k.shape[2], v.shape[2])
    assert v.shape[1] % k.shape[1] == 0 and q.shape == k.shape


@triton.jit
def _decode_head(
    out,
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    state,
    slots,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    v_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of the values of a head of a row."""
    parts: tl.constexpr = value_dim // block
    head, row = tl.program_id(0) // parts, tl.program_id(1).to(tl.int64)
    key = tl.arange(0, key_dim)
    value = tl.program_id(0) % parts * block + tl.arange(0, block)
    place = state + (tl.load(slots + row) * v_heads + head) * (key_dim * value_dim)
    place += key[:, None] * value_dim + value[None, :]
    # Nothing of the state is read again before the next step.
    kept = tl.load(place, eviction_policy="evict_first")
    rate, shift = tl.load(a_log + head), tl.load(dt_bias + head)
    wait_for_previous(pdl)  # for all but the state and the weights

    key_place = head // group * key_dim + key
    k_row = tl.load(k + row * k_stride + key_place).to(tl.float32)
    q_row = tl.load(q + row * q_stride + key_place).to(tl.float32)
    v_row = tl.load(v + row * v_stride + head * value_dim + value).to(tl.float32)
    decay = tl.exp(decay_log(tl.load(a + row * a_stride + head), rate, shift))
    strength = strength_of(tl.load(b + row * b_stride + head))
    k_row *= inverse_length(tl.sum(k_row * k_row, 0))
    q_row *= inverse_length(tl.sum(q_row * q_row, 0)) * (key_dim**-0.5)

    # What the query reads of the new state is what it reads of the old one, and of the change.
    known = decay * tl.sum(kept * k_row[:, None], 0)
    result = decay * tl.sum(kept * q_row[:, None], 0)
    change = strength * (v_row - known)
    result += tl.sum(q_row * k_row, 0) * change
    kept = decay * kept + k_row[:, None] * change[None, :]
    tl.store(place, kept, eviction_policy="evict_first")
    tl.store(out + (row * v_heads + head) * value_dim + value, result)
