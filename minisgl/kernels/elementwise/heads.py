"""Norm and RoPE of the heads of q and k, and the KV write, as one Triton kernel, with the rounding
of `qk_norm_rope_store_kv` in reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import UNSCALED, KVScales
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.inlined import apply_norm, rms_scale, to_stored
from minisgl.kernels.launch_options import pdl_options


def qk_norm_rope_store_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norm_rope: NormRope,
    scales: KVScales = UNSCALED,
    *,
    pdl: bool = True,
) -> Tensor:
    """See dispatch.py; the columns of qkv and the caches contiguous. `pdl`: see
    launch_options.py: positions and slot_mapping must be two launches old."""
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    table, q_weight, k_weight, eps, norms_v, v_is_k = norm_rope
    assert (q_weight is None) == (k_weight is None) and not (norms_v and q_weight is None)
    num_rows, (num_kv_heads, head_dim) = qkv.shape[0], k_cache.shape[2:]
    num_heads = norm_rope.num_heads(qkv.shape[1] // head_dim, num_kv_heads)
    total = num_heads + 2 * num_kv_heads
    q = qkv.new_empty((num_rows, num_heads, head_dim))
    half_block = triton.next_power_of_2(head_dim // 2)
    head_block = min(max(1024 // half_block, 16), triton.next_power_of_2(total))
    _heads_kernel[(num_rows * triton.cdiv(total, head_block),)](
        q,
        k_cache,
        v_cache,
        qkv,
        positions,
        slot_mapping,
        table,
        q_weight,
        k_weight,
        eps,
        *(scales.inverse if k_cache.dtype == torch.float8_e4m3fn else (None, None)),
        row_stride=qkv.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pairs=table.shape[1] // 2,
        norms_v=norms_v,
        v_is_k=v_is_k,
        head_block=head_block,
        half_block=half_block,
        # In half precision a thread holds 16 bytes of either half. With more threads than half a
        # head has elements, the compiler exchanges cos and sin without shared memory.
        num_warps=max(half_block // 16, 4),
        # Products and sums of the rotation are rounded one by one, as the reference's are.
        enable_fp_fusion=False,
        **pdl_options(qkv.device, pdl),
    )
    return q


# Slices of a step's tables have any alignment: do not compile a variant for each.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _heads_kernel(
    q,
    k_cache,
    v_cache,
    qkv,
    positions,
    slot_mapping,
    table,
    q_weight,
    k_weight,
    eps,
    k_inverse,
    v_inverse,
    row_stride: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    num_pairs: tl.constexpr,
    norms_v: tl.constexpr,
    v_is_k: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a row's heads a program, of q, k or v.

    All are normed and rotated alike; for heads of v the result is discarded, unless it is that of a
    norm without weights. A head is held as two
    halves, whose elements are rotated in pairs: its own, or where only its first elements are
    rotated these first, and the others behind them.
    """
    first_v: tl.constexpr = num_heads + num_kv_heads
    total: tl.constexpr = first_v + num_kv_heads
    half: tl.constexpr = head_dim // 2
    blocks = tl.cdiv(total, head_block)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    head = (program % blocks) * head_block + tl.arange(0, head_block)[:, None]
    column = tl.arange(0, half_block)[None, :]
    is_q, is_v = head < num_heads, head >= first_v
    one, other = column, column + half  # the places of a pair in its head
    if num_pairs < half:
        one = tl.where(column < num_pairs, column, column + num_pairs)
        other = tl.where(column < num_pairs, column + num_pairs, column + half)

    # Before the wait, load what is older than the previous kernel: the weights, which are far away,
    # and the position, on which the load of cos and sin depends.
    position, kv_slot = tl.load(positions + row), tl.load(slot_mapping + row)
    if q_weight is not None:
        first_q = tl.load(q_weight + one, mask=column < half, other=0.0)
        first_k = tl.load(k_weight + one, mask=column < half, other=0.0)
        second_q = tl.load(q_weight + other, mask=column < half, other=0.0)
        second_k = tl.load(k_weight + other, mask=column < half, other=0.0)
    if pdl:  # for qkv, and for the last reader of q's memory and of the cache
        tl.extra.cuda.gdc_wait()

    source = tl.where(is_v, head - num_kv_heads, head) if v_is_k else head
    place = row * row_stride + source * head_dim
    inside = (head < total) & (column < half)
    first = tl.load(qkv + place + one, mask=inside, other=0.0)
    second = tl.load(qkv + place + other, mask=inside, other=0.0)
    angles = table + position * (2 * num_pairs)
    cos = tl.load(angles + column, mask=column < num_pairs, other=1.0)
    sin = tl.load(angles + num_pairs + column, mask=column < num_pairs, other=0.0)
    if pdl:  # keeps all loads above it; the compiler would load cos and sin at their use
        tl.extra.cuda.gdc_launch_dependents()

    dtype = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    value, second_value = first, second
    if q_weight is not None:
        scale = rms_scale(tl.sum(x * x + y * y, axis=1, keep_dims=True), head_dim, eps)
        if norms_v:
            value, second_value = (x * scale).to(dtype), (y * scale).to(dtype)
        x = apply_norm(first, scale, tl.where(is_q, first_q, first_k)).to(tl.float32)
        y = apply_norm(second, scale, tl.where(is_q, second_q, second_k)).to(tl.float32)
    first = tl.where(is_v, value, (x * cos - y * sin).to(dtype))
    second = tl.where(is_v, second_value, (y * cos + x * sin).to(dtype))

    q_place = row * (num_heads * head_dim) + head * head_dim
    tl.store(q + q_place + one, first, mask=inside & is_q)
    tl.store(q + q_place + other, second, mask=inside & is_q)
    stored: tl.constexpr = k_cache.dtype.element_ty
    kv_place = kv_slot * (num_kv_heads * head_dim)
    k_place = kv_place + (head - num_heads) * head_dim
    is_k = (head >= num_heads) & (head < first_v)
    tl.store(k_cache + k_place + one, to_stored(first, k_inverse, stored), mask=inside & is_k)
    tl.store(k_cache + k_place + other, to_stored(second, k_inverse, stored), mask=inside & is_k)
    v_place = kv_place + (head - first_v) * head_dim
    tl.store(v_cache + v_place + one, to_stored(first, v_inverse, stored), mask=inside & is_v)
    tl.store(v_cache + v_place + other, to_stored(second, v_inverse, stored), mask=inside & is_v)
