"""The operations of a gated delta net on runs of rows in Triton.

The state lacks the rows of the last run, if any are kept; they are few, so a program advances its
part by those that count, row by row, before it writes it once, and then computes the new rows from
registers.

The time of the delta rule is that of the state: 8 bytes for each number of it. A program has all
keys of a head for a part of its values, so that both sums over keys stay within it, and reads its
part of the state in one go: 16 KiB, with as many programs on an SM as registers allow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.gated_delta.causal_conv import check_convolution, convolved
from minisgl.kernels.gated_delta.delta_parts import (
    check_heads,
    decay_log,
    inverse_length,
    strength_of,
)
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.segments import Runs
from minisgl.kernels.tuning import DeltaDecodeTiles, tuning_of

_CHANNELS = 256  # of a program


def causal_conv_runs(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    kept: Tensor | None,
    runs: Runs,
    *,
    silu: bool = True,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """See delta_net.py. `pdl`: see launch_options.py; it holds for `kept` and num_kept, too."""
    num_runs, channels, most = len(runs.slots), len(weight), 0 if kept is None else kept.shape[1]
    width = check_convolution(x, weight, state)
    assert kept is None or (kept.is_contiguous() and kept.shape[1:] == (most, channels))
    assert runs.size <= max(most, 1) and (kept is None) == (runs.num_kept is None)
    older, newer = x.new_empty((num_runs * most, channels)), x.new_empty(x.shape)
    if num_runs == 0:
        return older, newer
    _convolve_runs[(triton.cdiv(channels, _CHANNELS), num_runs)](
        older,
        newer,
        x,
        weight,
        state,
        kept,
        runs.slots,
        runs.num_kept,
        x.stride(0),
        channels=channels,
        width=width,
        most=most,
        size=runs.size,
        silu=silu,
        block=_CHANNELS,
        num_warps=2,
        **pdl_options(x.device, pdl),
    )
    return older, newer


def gated_delta_runs(
    older: DeltaRows | None,
    newer: DeltaRows,
    state: Tensor,
    runs: Runs,
    *,
    tiles: DeltaDecodeTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """See delta_net.py; sizes of heads are powers of two, pdl as above."""
    q, k, v, gates = newer
    num_runs, (_, v_heads, value_dim), (k_heads, key_dim) = len(runs.slots), v.shape, k.shape[1:]
    check_heads(newer, state)
    most = 0
    kept: tuple[Tensor | None, ...] = (None, None, None, None)
    if older is not None:
        check_heads(older, state)
        most, kept = len(older.v) // max(num_runs, 1), (older.k, older.v, *older.gates[:2])
    tiles = tiles or tuning_of(v.device).delta_decode
    block = min(tiles.block_v, value_dim)
    out = v.new_empty(v.shape)
    if num_runs == 0:
        return out
    _advance_runs[(v_heads * (value_dim // block), num_runs)](
        out,
        *kept,
        q,
        k,
        v,
        *gates,
        state,
        runs.slots,
        runs.num_kept,
        *(part if part is None else part.stride(0) for part in kept),
        *(part.stride(0) for part in (q, k, v, gates.a, gates.b)),
        most=most,
        size=runs.size,
        v_heads=v_heads,
        group=v_heads // k_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block=block,
        num_warps=tiles.num_warps,
        **pdl_options(v.device, pdl),
    )
    return out


@triton.jit
def _convolve_runs(
    older,
    newer,
    x,
    weight,
    state,
    kept,
    slots,
    num_kept,
    x_stride,
    channels: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    size: tl.constexpr,
    silu: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of the channels of a run."""
    run = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    inside = channel < channels
    slot = tl.load(slots + run)
    past = state + (slot * channels + channel) * (width - 1)
    if kept is not None:
        count = tl.load(num_kept + run)
        rows = kept + slot * (most * channels) + channel
    seen, factors, results = (), (), ()
    for tap in tl.static_range(width - 1):
        seen += (tl.load(past + tap, mask=inside, other=0.0),)
    for tap in tl.static_range(width):
        factors += (tl.load(weight + channel * width + tap, mask=inside, other=0.0),)
    for place in tl.static_range(most):
        counts = place < count
        value = tl.load(rows + place * channels, mask=inside & counts, other=0.0)
        results += (convolved(seen, value, factors, width, silu, older.dtype.element_ty),)
        after = ()
        for tap in tl.static_range(width - 2):
            after += (tl.where(counts, seen[tap + 1], seen[tap]),)
        after += (tl.where(counts, value, seen[width - 2]),)
        seen = after
    wait_for_previous(pdl)  # for x, and for the last reader of older's memory

    for place in tl.static_range(most):
        at = older + (run * most + place) * channels + channel
        tl.store(at, results[place], mask=inside & (place < count))
    value = tl.load(x + run * size * x_stride + channel, mask=inside, other=0.0)
    tl.debug_barrier()  # every thread has what it needs of the state and of the rows
    if size > 1:
        for tap in tl.static_range(width - 1):
            tl.store(past + tap, seen[tap], mask=inside)
    for place in tl.static_range(size):
        row = run * size + place
        if place > 0:
            value = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
        if size > 1:
            tl.store(rows + place * channels, value, mask=inside)
        result = convolved(seen, value, factors, width, silu, newer.dtype.element_ty)
        after = ()
        for tap in tl.static_range(width - 2):
            after += (seen[tap + 1],)
        after += (value,)
        seen = after
        if size == 1:
            for tap in tl.static_range(width - 1):
                tl.store(past + tap, seen[tap], mask=inside)
        tl.store(newer + row * channels + channel, result, mask=inside)


@triton.jit
def _advance_runs(
    out,
    older_k,
    older_v,
    older_a,
    older_b,
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    state,
    slots,
    num_kept,
    older_k_stride,
    older_v_stride,
    older_a_stride,
    older_b_stride,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    most: tl.constexpr,
    size: tl.constexpr,
    v_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of the values of a head of a run."""
    parts: tl.constexpr = value_dim // block
    head, run = tl.program_id(0) // parts, tl.program_id(1).to(tl.int64)
    key = tl.arange(0, key_dim)
    value = tl.program_id(0) % parts * block + tl.arange(0, block)
    place = state + (tl.load(slots + run) * v_heads + head) * (key_dim * value_dim)
    place += key[:, None] * value_dim + value[None, :]
    # Nothing of the state is read again before the next step.
    kept = tl.load(place, eviction_policy="evict_first")
    rate, shift = tl.load(a_log + head), tl.load(dt_bias + head)
    if num_kept is not None:
        count = tl.load(num_kept + run)
    wait_for_previous(pdl)  # for all but the state and the weights

    of_keys, of_values = head // group * key_dim + key, head * value_dim + value
    if num_kept is not None:
        for index in range(count):
            row = run * most + index
            k_row = tl.load(older_k + row * older_k_stride + of_keys).to(tl.float32)
            v_row = tl.load(older_v + row * older_v_stride + of_values).to(tl.float32)
            decay = tl.exp(decay_log(tl.load(older_a + row * older_a_stride + head), rate, shift))
            strength = strength_of(tl.load(older_b + row * older_b_stride + head))
            k_row *= inverse_length(tl.sum(k_row * k_row, 0))
            change = strength * (v_row - decay * tl.sum(kept * k_row[:, None], 0))
            kept = decay * kept + k_row[:, None] * change[None, :]
    if size > 1:
        tl.store(place, kept, eviction_policy="evict_first")
    for index in tl.static_range(size):
        row = run * size + index
        k_row = tl.load(k + row * k_stride + of_keys).to(tl.float32)
        q_row = tl.load(q + row * q_stride + of_keys).to(tl.float32)
        v_row = tl.load(v + row * v_stride + of_values).to(tl.float32)
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
        if size == 1:
            tl.store(place, kept, eviction_policy="evict_first")
        tl.store(out + (row * v_heads + head) * value_dim + value, result)
