"""The gated delta rule over segments of rows in Triton, in chunks of 64 rows.

Within a chunk the rule is a triangular system of equations (the UT transform). With S the state
before the chunk, c the sum of the logarithms of decays up to a row, k and q of length 1, and i, j
rows of the chunk:

    changes = (1 + L)⁻¹ · strength · (v - exp(c) · k S)
    result  = exp(c) · q S + A · changes
    S       = exp(c_last) · S + Σ exp(c_last - c_i) · k_i changes_i

    L_ij = strength_i · exp(c_i - c_j) · k_i k_j for i > j
    A_ij = exp(c_i - c_j) · q_i k_j for i >= j

`_prepare` computes (1 + L)⁻¹ · strength, A and what follows from c for all chunks at once;
`_advance` goes through the chunks of a segment, and then through those of the segments that
continue it, with a part of S.

Products of half precision lose little of what stays in S: queries and keys are multiplied as they
are, with their lengths applied to the sums, and what is float32 is multiplied as a sum of two
numbers of the model's dtype, which for bfloat16 hold 16 of 24 bits. So the states of prompts that
are cut elsewhere, or decoded, differ by 1e-5, and not by the 4e-3 of bfloat16. The results, which
are rounded to the model's dtype anyway, take S and the changes rounded to it. float32 is multiplied
exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.gated_delta.delta_parts import (
    check_heads,
    decay_log,
    inverse_length,
    strength_of,
    tile_of_segment,
)
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.segments import Segments
from minisgl.kernels.tuning import DeltaPrefillTiles, tuning_of

CHUNK = 64
_DOUBLINGS = 6  # of a row that make a chunk
_FACTORS = 4  # of a row and head, see _prepare


def gated_delta_prefill(
    rows: DeltaRows,
    state: Tensor,
    segments: Segments,
    *,
    tiles: DeltaPrefillTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """See delta_net.py; sizes of heads are powers of two, at least 16. `pdl`: see
    launch_options.py."""
    q, k, v, gates = rows
    num_rows, v_heads, value_dim = v.shape
    k_heads, key_dim = k.shape[1:]
    check_heads(rows, state)
    tiles = tiles or tuning_of(v.device).delta_prefill
    block = min(tiles.block_v, value_dim)
    num_segments = len(segments.slots)
    out = v.new_empty(v.shape)
    if num_segments == 0:
        return out
    exact = v.dtype == torch.float32
    inverse = v.new_empty((1 if exact else 2, num_rows, v_heads, CHUNK))  # what it adds up to
    scores = v.new_empty((num_rows, v_heads, CHUNK))
    factors = v.new_empty((v_heads, _FACTORS, num_rows), dtype=torch.float32)
    numbers = {
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "v_heads": v_heads,
        "group": v_heads // k_heads,
        "key_dim": key_dim,
        "chunk": CHUNK,
        "exact": exact,
        **pdl_options(v.device, pdl),
    }
    _prepare[(num_rows // CHUNK + num_segments, v_heads)](
        inverse,
        scores,
        factors,
        q,
        k,
        *gates,
        segments.row_starts,
        num_segments,
        num_rows,
        gates.a.stride(0),
        gates.b.stride(0),
        segments_block=triton.next_power_of_2(num_segments),
        doublings=_DOUBLINGS,
        num_stages=1,
        num_warps=tiles.prepare_warps,
        **numbers,
    )
    _advance[(v_heads * (value_dim // block), num_segments)](
        out,
        q,
        k,
        v,
        inverse,
        scores,
        factors,
        state,
        *segments,
        num_segments,
        num_rows,
        v_stride=v.stride(0),
        value_dim=value_dim,
        block=block,
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
        **numbers,
    )
    return out


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def _prepare(
    inverse,
    scores,
    factors,
    q,
    k,
    a,
    b,
    a_log,
    dt_bias,
    row_starts,
    num_segments,
    num_rows,
    a_stride,
    b_stride,
    q_stride,
    k_stride,
    v_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    chunk: tl.constexpr,
    segments_block: tl.constexpr,
    doublings: tl.constexpr,
    exact: tl.constexpr,
    pdl: tl.constexpr,
):
    """A head of a chunk: the inverse times strengths, the scores A, and for each row factors of the
    keys that read S, of the queries that read S, of the keys that write to S, and of S."""
    index = tl.arange(0, segments_block)
    there = index < num_segments
    starts = tl.load(row_starts + index, mask=there, other=0)
    segment, first, number = tile_of_segment(starts, there, num_segments, index, chunk)
    end = tl.load(row_starts + segment + 1)
    first += number * chunk
    head = tl.program_id(1)
    rate, shift = tl.load(a_log + head), tl.load(dt_bias + head)
    wait_for_previous(pdl)  # before the end of a program without rows, too, as all must have waited
    if first >= end:
        return

    at = tl.arange(0, chunk)
    row = (first + at).to(tl.int64)
    inside = first + at < end
    place = head // group * key_dim + tl.arange(0, key_dim)[None, :]
    keys = tl.load(k + row[:, None] * k_stride + place, mask=inside[:, None], other=0.0)
    queries = tl.load(q + row[:, None] * q_stride + place, mask=inside[:, None], other=0.0)
    decay = decay_log(tl.load(a + row * a_stride + head, mask=inside, other=0.0), rate, shift)
    decay = tl.where(inside, decay, 0.0)
    strength = strength_of(tl.load(b + row * b_stride + head, mask=inside, other=0.0))
    strength = tl.where(inside, strength, 0.0)
    decay = tl.cumsum(decay, 0)
    whole = tl.sum(tl.where(at == chunk - 1, decay, 0.0), 0)
    is_past = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0))
    k_scale, q_scale = _inverse_lengths(keys), _inverse_lengths(queries) * (key_dim**-0.5)
    between = tl.where(is_past, between, 0.0) * k_scale[None, :]

    precision: tl.constexpr = "ieee" if exact else "tf32"
    place = (row[:, None] * v_heads + head) * chunk + at[None, :]
    attended = tl.dot(queries, tl.trans(keys), input_precision=precision)
    tl.store(scores + place, attended * between * q_scale[:, None], mask=inside[:, None])
    factors += head.to(tl.int64) * 4 * num_rows + row
    tl.store(factors, tl.exp(decay) * k_scale, mask=inside)
    tl.store(factors + num_rows, tl.exp(decay) * q_scale, mask=inside)
    tl.store(factors + 2 * num_rows, tl.exp(whole - decay) * k_scale, mask=inside)
    tl.store(factors + 3 * num_rows, tl.exp(whole) + tl.zeros_like(decay), mask=inside)
    lower = tl.dot(keys, tl.trans(keys), input_precision=precision)
    lower *= between * (strength * k_scale)[:, None]
    lower = tl.where(at[:, None] > at[None, :], lower, 0.0)
    solved = _inverted(lower, chunk, doublings, exact)
    solved *= strength[None, :]
    high = solved.to(keys.dtype)
    tl.store(inverse + place, high, mask=inside[:, None])
    if not exact:
        low = solved - high.to(tl.float32)
        inverse += num_rows.to(tl.int64) * (v_heads * chunk)
        tl.store(inverse + place, low, mask=inside[:, None])


@triton.jit
def _inverse_lengths(x):
    wide = x.to(tl.float32)
    return inverse_length(tl.sum(wide * wide, 1))


@triton.jit
def _inverted(lower, size: tl.constexpr, doublings: tl.constexpr, exact: tl.constexpr):
    """(1 + lower)⁻¹ of a strictly lower triangular [size, size]; size is 2**doublings.

    Of a block for each row, two neighbours become one twice as large, until one is left: the
    inverse of [[P, 0], [C, Q]] is [[P⁻¹, 0], [-Q⁻¹ C P⁻¹, Q⁻¹]].
    """
    at = tl.arange(0, size)
    own, other = at[:, None], at[None, :]
    solved = tl.where(own == other, 1.0, tl.where((own % 2 == 1) & (own == other + 1), -lower, 0.0))
    for doubling in range(1, doublings):
        block, before = own >> doubling, other >> doubling
        crossing = tl.where((block % 2 == 1) & (block == before + 1), lower, 0.0)
        solved -= _product(_product(solved, crossing, exact), solved, exact)
    return solved


@triton.jit
def _product(x, y, exact: tl.constexpr):
    """x y of float32 matrices, each multiplied as a sum of two numbers of float16, which is exact
    to 22 bits, or 2**-24: no number of an inverse here exceeds 1."""
    if exact:
        return tl.dot(x, y, input_precision="ieee")
    else:
        x_high, y_high = x.to(tl.float16), y.to(tl.float16)
        x_low = (x - x_high.to(tl.float32)).to(tl.float16)
        y_low = (y - y_high.to(tl.float32)).to(tl.float16)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def _advance(
    out,
    q,
    k,
    v,
    inverse,
    scores,
    factors,
    state,
    sources,
    slots,
    row_starts,
    num_segments,
    num_rows,
    q_stride,
    k_stride,
    v_stride,
    v_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    exact: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of the values of a head, over the rows of a segment and of those that continue it."""
    parts: tl.constexpr = value_dim // block
    head, segment = tl.program_id(0) // parts, tl.program_id(1)
    at, key = tl.arange(0, chunk), tl.arange(0, key_dim)
    value = tl.program_id(0) % parts * block + tl.arange(0, block)
    source, slot = tl.load(sources + segment), tl.load(slots + segment)
    continues = (segment > 0) & (source == tl.load(slots + segment - 1, segment > 0))
    size: tl.constexpr = key_dim * value_dim
    part = head * size + key[:, None] * value_dim + value[None, :]
    kept = tl.load(state + source * (v_heads * size) + part, mask=not continues, other=0.0)
    # Before the end of a program that has nothing to do, too, as all must have waited.
    wait_for_previous(pdl)
    if continues:  # another program comes to it
        return

    # Offsets within a chunk have 32 bits, and those of chunks 64.
    k_at = at[:, None] * k_stride + head // group * key_dim + key[None, :]
    q_at = at[:, None] * q_stride + head // group * key_dim + key[None, :]
    v_at = at[:, None] * v_stride + head * value_dim + value[None, :]
    out_at = (at[:, None] * v_heads + head) * value_dim + value[None, :]
    of_chunk = (at[:, None] * v_heads + head) * chunk + at[None, :]
    factors += head.to(tl.int64) * 4 * num_rows
    going = segment < num_segments
    while going:
        first = tl.load(row_starts + segment).to(tl.int64)
        end = tl.load(row_starts + segment + 1).to(tl.int64)
        for row in range(first, end, chunk):
            inside = row + at < end
            rows = inside[:, None]
            keys = tl.load(k + row * k_stride + k_at, mask=rows, other=0.0)
            queries = tl.load(q + row * q_stride + q_at, mask=rows, other=0.0)
            values = tl.load(v + row * v_stride + v_at, mask=rows, other=0.0)
            solved = inverse + row * (v_heads * chunk) + of_chunk
            high = tl.load(solved, mask=rows, other=0.0)
            attended = tl.load(scores + row * (v_heads * chunk) + of_chunk, mask=rows, other=0.0)
            of_row = factors + row + at
            k_reads = tl.load(of_row, mask=inside, other=0.0)
            q_reads = tl.load(of_row + num_rows, mask=inside, other=0.0)
            k_writes = tl.load(of_row + 2 * num_rows, mask=inside, other=0.0)
            decay = tl.load(factors + row + 3 * num_rows)

            none = tl.zeros([chunk, block], tl.float32)
            known = _multiply(keys, kept, none, exact)
            difference = values.to(tl.float32) - k_reads[:, None] * known
            changes = none
            if not exact:
                low = tl.load(solved + num_rows.to(tl.int64) * (v_heads * chunk), rows, other=0.0)
                changes = tl.dot(low, difference.to(keys.dtype))
            changes = _multiply(high, difference, changes, exact)
            result = q_reads[:, None] * _multiply_rounded(queries, kept, none, exact)
            result = _multiply_rounded(attended, changes, result, exact)
            tl.store(out + row * (v_heads * value_dim) + out_at, result, mask=rows)

            kept = _multiply(tl.trans(keys), k_writes[:, None] * changes, decay * kept, exact)
        if (end > first) | (source != slot):
            tl.store(state + slot * (v_heads * size) + part, kept)
        segment += 1
        before, more = slot, segment < num_segments
        source = tl.load(sources + segment, mask=more, other=0)
        slot = tl.load(slots + segment, mask=more, other=0)
        going = more & (source == before)


@triton.jit
def _multiply(x, y, sum, exact: tl.constexpr):
    """sum + x y; y: float32, multiplied as a sum of two numbers of x's dtype."""
    if exact:
        return tl.dot(x, y, sum, input_precision="ieee")
    else:
        high = y.to(x.dtype)
        low = (y - high.to(tl.float32)).to(x.dtype)
        return tl.dot(x, high, tl.dot(x, low, sum))


@triton.jit
def _multiply_rounded(x, y, sum, exact: tl.constexpr):
    """sum + x y; y: float32, rounded to x's dtype."""
    if exact:
        return tl.dot(x, y, sum, input_precision="ieee")
    else:
        return tl.dot(x, y.to(x.dtype), sum)
