"""Norm of latents, interleaved rope, and the write to the cache as one Triton kernel, with the
rounding of `store_latents` in latents.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.inlined import apply_norm, rms_scale, to_stored
from minisgl.kernels.launch_options import pdl_options

_HEADS = 16  # of queries, in a program


def store_latents(
    kv: Tensor,
    q: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    norm: LatentNorm,
    scale: float = 1.0,
    *,
    pdl: bool = True,
) -> Tensor:
    """As in dispatch.py; within a row all is contiguous. pdl: overlap launches where the device
    can, by the rule of launch_options.py."""
    num_rows, num_heads, head_dim = q.shape
    rank, rope_dim = len(norm.weight), norm.table.shape[1]
    assert kv.stride(1) == 1 and q.stride()[1:] == (head_dim, 1) and cache.is_contiguous()
    assert norm.table.is_contiguous() and kv.shape[1] == rank + rope_dim == cache.shape[3]
    out = q.new_empty((num_rows, num_heads, rank + rope_dim))
    if num_rows == 0:
        return out
    _store_row[(num_rows, 1 + triton.cdiv(num_heads, _HEADS))](
        out,
        cache,
        kv,
        q,
        positions,
        slot_mapping,
        norm.table,
        norm.weight,
        norm.eps,
        1 / scale if cache.dtype == torch.float8_e4m3fn else None,
        kv.stride(0),
        q.stride(0),
        num_heads=num_heads,
        head_dim=head_dim,
        rank=rank,
        num_pairs=rope_dim // 2,
        heads_block=min(_HEADS, triton.next_power_of_2(num_heads)),
        rank_block=triton.next_power_of_2(rank),
        pairs_block=triton.next_power_of_2(rope_dim // 2),
        num_warps=4,
        # Products and sums of the rotation are rounded one by one, as the reference's are.
        enable_fp_fusion=False,
        **pdl_options(q.device, pdl),
    )
    return out


# Slices of a step's tables have any alignment: do not compile a variant for each.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _store_row(
    out,
    cache,
    kv,
    q,
    positions,
    slot_mapping,
    table,
    weight,
    eps,
    inverse,
    kv_stride,
    q_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rank: tl.constexpr,
    num_pairs: tl.constexpr,
    heads_block: tl.constexpr,
    rank_block: tl.constexpr,
    pairs_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: the latent of a row and what is behind it, or some heads of its queries."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = rank + 2 * num_pairs
    pair, column = tl.arange(0, pairs_block), tl.arange(0, rank_block)
    # Before the wait, load what is older than the previous kernel.
    position, kv_slot = tl.load(positions + row), tl.load(slot_mapping + row)
    angles = table + position * (2 * num_pairs)
    cos = tl.load(angles + pair, mask=pair < num_pairs, other=1.0)
    sin = tl.load(angles + num_pairs + pair, mask=pair < num_pairs, other=0.0)
    factor = tl.load(weight + column, mask=column < rank, other=0.0)
    if pdl:  # for kv and q, and for the last reader of `out` and of the cache
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if part == 0:
        stored: tl.constexpr = cache.dtype.element_ty
        kv += row * kv_stride
        cache += kv_slot * width
        latent = tl.load(kv + column, mask=column < rank, other=0.0)
        wide = latent.to(tl.float32)
        latent = apply_norm(latent, rms_scale(tl.sum(wide * wide, 0), rank, eps), factor)
        tl.store(cache + column, to_stored(latent, inverse, stored), mask=column < rank)
        behind = rank + 2 * pair
        key = tl.load(kv + behind, mask=pair < num_pairs, other=0.0)
        key_partner = tl.load(kv + behind + 1, mask=pair < num_pairs, other=0.0)
        key, key_partner = _rotated(key, key_partner, cos, sin)
        tl.store(cache + behind, to_stored(key, inverse, stored), mask=pair < num_pairs)
        tl.store(cache + behind + 1, to_stored(key_partner, inverse, stored), mask=pair < num_pairs)
    else:
        head = (part - 1) * heads_block + tl.arange(0, heads_block)
        inside = (head < num_heads)[:, None] & (pair < num_pairs)[None, :]
        first = head[:, None] * head_dim + (head_dim - 2 * num_pairs) + 2 * pair[None, :]
        query = tl.load(q + row * q_stride + first, mask=inside, other=0.0)
        query_partner = tl.load(q + row * q_stride + first + 1, mask=inside, other=0.0)
        query, query_partner = _rotated(query, query_partner, cos[None, :], sin[None, :])
        place = (row * num_heads + head[:, None]) * width + rank + 2 * pair[None, :]
        tl.store(out + place, query, mask=inside)
        tl.store(out + place + 1, query_partner, mask=inside)


@triton.jit
def _rotated(x, y, cos, sin):
    """The two numbers of each pair, rotated; rounded to their dtype."""
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)
