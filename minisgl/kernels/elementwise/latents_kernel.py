"""What attention over latents does before and after it attends as Triton kernels, with the rounding
of latents.py.

Each head has a map to latents and one from them, which few rows make a matter of reading weights.
Programs with a part of a head's map hold it in registers before they wait for the rows, as the
burst kernel of linear/ does: cuBLAS starts when the launch before has ended. Other programs of the
first launch norm, rotate and store meanwhile. With many rows that is a launch of its own, and
cuBLAS maps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.elementwise import latents
from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.inlined import apply_norm, from_here, rms_scale, to_stored, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import LatentMapTiles, tuning_of

_HEADS = 16  # of queries, in a program that rotates


def store_latents(
    kv: Tensor,
    q: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    norm: LatentNorm,
    to_keys: Tensor,
    scale: float = 1.0,
    *,
    tiles: LatentMapTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """See dispatch.py; within a row, and within a head's map, all is contiguous. tiles: those of
    the kernel that maps, taken for any number of rows; None: by the device's tuning. `pdl`: see
    launch_options.py."""
    num_rows, num_heads, head_dim = q.shape
    rank, rope_dim = len(norm.weight), norm.table.shape[1]
    assert kv.stride(1) == 1 and q.stride()[1:] == (head_dim, 1) and cache.is_contiguous()
    assert norm.table.is_contiguous() and kv.shape[1] == rank + rope_dim == cache.shape[3]
    assert to_keys.shape == (num_heads, head_dim - rope_dim, rank)
    assert to_keys.stride()[1:] == (rank, 1)
    out = q.new_empty((num_rows, num_heads, rank + rope_dim))
    if num_rows == 0:
        return out
    tiles = tiles or _tiles_of(num_rows, q.device)
    maps, block_m, num_maps = tiles or LatentMapTiles(), 16, 0
    num_parts = 1 + triton.cdiv(num_heads, _HEADS)
    grid: tuple[int, ...] = num_rows, num_parts
    if tiles is not None:
        block_m = max(block_m, triton.next_power_of_2(num_rows))
        num_maps = num_heads * triton.cdiv(rank, tiles.to_latents)
        grid = (num_maps + num_rows * num_parts,)
    _store_and_map[grid](
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
        to_keys,
        to_keys.stride(0),
        num_rows,
        num_heads=num_heads,
        head_dim=head_dim,
        rank=rank,
        num_pairs=rope_dim // 2,
        heads_block=min(_HEADS, triton.next_power_of_2(num_heads)),
        rank_block=triton.next_power_of_2(rank),
        pairs_block=triton.next_power_of_2(rope_dim // 2),
        num_maps=num_maps,
        num_parts=num_parts,
        block_m=block_m,
        block_n=maps.to_latents,
        block_k=maps.nope_k,
        pieces=triton.cdiv(head_dim - rope_dim, maps.nope_k),
        num_warps=maps.num_warps,
        # Products and sums of the rotation are rounded one by one, as the reference's are.
        enable_fp_fusion=False,
        **pdl_options(q.device, pdl),
    )
    if tiles is None:
        latents.map_queries(q, to_keys, out)
    return out


def values_of_latents(
    attended: Tensor, to_values: Tensor, *, tiles: LatentMapTiles | None = None, pdl: bool = True
) -> Tensor:
    """See dispatch.py; attended is contiguous, and so is a head's map. tiles and pdl: as of
    store_latents."""
    num_rows, num_heads, rank = attended.shape
    value_dim = to_values.shape[1]
    assert attended.is_contiguous() and to_values.stride()[1:] == (rank, 1)
    assert to_values.shape == (num_heads, value_dim, rank)
    tiles = tiles or _tiles_of(num_rows, attended.device)
    if tiles is None or num_rows == 0:
        return latents.values_of_latents(attended, to_values)
    out = attended.new_empty((num_rows, num_heads, value_dim))
    _map_values[(num_heads * triton.cdiv(value_dim, tiles.to_values),)](
        out,
        attended,
        to_values,
        to_values.stride(0),
        num_rows,
        num_heads=num_heads,
        value_dim=value_dim,
        rank=rank,
        block_m=max(16, triton.next_power_of_2(num_rows)),
        block_n=tiles.to_values,
        block_k=tiles.rank_k,
        pieces=triton.cdiv(rank, tiles.rank_k),
        num_warps=tiles.num_warps,
        **pdl_options(attended.device, pdl),
    )
    return out


def _tiles_of(num_rows: int, device: torch.device) -> LatentMapTiles | None:
    """Those of the kernels that map so many rows, if they do."""
    tuning = tuning_of(device)
    return tuning.latent_maps if num_rows <= tuning.latent_map_rows else None


# Slices of a step's tables have any alignment: do not compile a variant for each.
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions", "slot_mapping"]
)
def _store_and_map(
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
    to_keys,
    map_stride,
    num_rows,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rank: tl.constexpr,
    num_pairs: tl.constexpr,
    heads_block: tl.constexpr,
    rank_block: tl.constexpr,
    pairs_block: tl.constexpr,
    num_maps: tl.constexpr,
    num_parts: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: a part of the queries of latents of a head, for all rows; or the latent of a row
    and what is behind it, or some heads of its queries. Without maps, each row has a line of the
    grid."""
    program = tl.program_id(0)
    if num_maps > 0 and program < num_maps:
        blocks: tl.constexpr = num_maps // num_heads
        head = program // blocks
        _map_head(
            out + head * (rank + 2 * num_pairs), num_heads * (rank + 2 * num_pairs),
            q + head * head_dim, q_stride,
            to_keys + head.to(tl.int64) * map_stride, rank, 1,
            program % blocks, num_rows, head_dim - 2 * num_pairs, rank,
            block_m, block_n, block_k, pieces, pdl,
        )  # fmt: skip
    else:
        place = program - num_maps
        row, part = place // num_parts, place % num_parts
        if num_maps == 0:
            row, part = program, tl.program_id(1)
        _store_part(
            out, cache, kv, q, positions, slot_mapping, table, weight, eps, inverse, kv_stride,
            q_stride, row.to(tl.int64), part, num_heads, head_dim,
            rank, num_pairs, heads_block, rank_block, pairs_block, pdl,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _map_values(
    out,
    attended,
    to_values,
    map_stride,
    num_rows,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    rank: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: some values of a head, for all rows."""
    blocks: tl.constexpr = (value_dim + block_n - 1) // block_n
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    _map_head(
        out + head * value_dim, num_heads * value_dim, attended + head * rank, num_heads * rank,
        to_values + head.to(tl.int64) * map_stride, 1, rank,
        block, num_rows, rank, value_dim, block_m, block_n, block_k, pieces, pdl,
    )  # fmt: skip


@triton.jit
def _map_head(
    out,
    out_stride,
    x,
    x_stride,
    weight,
    k_stride: tl.constexpr,
    n_stride: tl.constexpr,
    block,
    num_rows,
    k: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """x W for block `block` of the n columns of W [k, n], which has these strides: [num_rows, k] to
    [num_rows, n], with the strides of their rows."""
    row = tl.arange(0, block_m)
    column = block * block_n + tl.arange(0, block_n)
    w, rows = (), ()
    for i in tl.static_range(pieces):
        at = i * block_k + tl.arange(0, block_k)
        place = weight + at[:, None] * k_stride + column[None, :] * n_stride
        w += (tl.load(place, mask=(at < k)[:, None] & (column < n)[None, :], other=0.0),)
    wait_for_previous(pdl)  # for x, and for the last reader of `out`
    there = (row < num_rows)[:, None]
    x += row[:, None].to(tl.int64) * x_stride
    for i in tl.static_range(pieces):
        at = i * block_k + tl.arange(0, block_k)[None, :]
        rows += (tl.load(x + at, mask=there & (at < k), other=0.0),)
    tl.debug_barrier()  # all loads are issued
    acc = tl.zeros((block_m, block_n), tl.float32)
    for i in tl.static_range(pieces):
        acc = tl.dot(rows[i], from_here(w[i], pdl), acc, input_precision="ieee")
    out += row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=there & (column < n)[None, :])


@triton.jit
def _store_part(
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
    row,
    part,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rank: tl.constexpr,
    num_pairs: tl.constexpr,
    heads_block: tl.constexpr,
    rank_block: tl.constexpr,
    pairs_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Part 0 of a row is its latent and what is behind it, the others are heads of its queries."""
    width: tl.constexpr = rank + 2 * num_pairs
    pair, column = tl.arange(0, pairs_block), tl.arange(0, rank_block)
    # Before the wait, load what is older than the previous kernel.
    position, kv_slot = tl.load(positions + row), tl.load(slot_mapping + row)
    angles = table + position * (2 * num_pairs)
    cos = tl.load(angles + pair, mask=pair < num_pairs, other=1.0)
    sin = tl.load(angles + num_pairs + pair, mask=pair < num_pairs, other=0.0)
    factor = tl.load(weight + column, mask=column < rank, other=0.0)
    wait_for_previous(pdl)  # for kv and q, and for the last reader of `out` and of the cache
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
