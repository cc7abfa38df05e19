"""Paged attention with torch alone: the reference of every other backend, and the CPU's own.

Keys and values are gathered into dense tensors and handed to scaled_dot_product_attention. The
query heads that share a KV head become queries of one sequence (decode) or heads over one
broadcast KV head (prefill), so K and V are never repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import ChunkRows, DecodeRows, LayerKV

# Bounds of the dense tensors that one call of the kernel works on. On the CPU keys and values that
# stay in its caches are attended to four times as fast; a GPU wants few large launches.
_CPU_GATHERED_BYTES = 8 << 20
_GPU_GATHERED_BYTES = 256 << 20
_MAX_MASK_ELEMENTS = 16 << 20


class TorchAttention:
    """Implements AttentionBackend on any device and in any floating dtype. Never waits for it."""

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        out = torch.empty_like(q)
        limit = _CPU_GATHERED_BYTES if q.is_cpu else _GPU_GATHERED_BYTES
        group = max(1, limit // (2 * rows.longest * kv.k[0, 0].nbytes))
        for first in range(0, rows.num_rows, group):
            part = slice(first, first + group)
            table, lengths = rows.page_table[part], rows.lengths[part]
            out[part] = _decode(q[part], kv, table, lengths, rows.longest, scale)
        return out

    def prefill(self, q: Tensor, kv: LayerKV, rows: ChunkRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        out = torch.empty_like(q)
        first = 0
        for chunk, length in enumerate(rows.lengths):
            part = slice(first, first + length)
            _prefill(out[part], q[part], kv, rows.page_table[chunk], rows.starts[chunk], scale)
            first += length
        return out


def _decode(
    q: Tensor, kv: LayerKV, page_table: Tensor, lengths: Tensor, longest: int, scale: float
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    positions = torch.arange(longest, device=q.device)
    # Past its end a row reads its last token again: what the cache holds there may be another
    # request's, or not a number, and a mask does not keep NaN out.
    last = lengths.long().unsqueeze(1) - 1
    index = _kv_index(page_table, torch.minimum(positions, last), kv.page_size)
    k, v = _gather(kv.k, index), _gather(kv.v, index)  # [num_rows, longest, kv heads, head_dim]
    out = F.scaled_dot_product_attention(
        q.reshape(num_rows, num_kv_heads, -1, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=(positions <= last)[:, None, None],
        scale=scale,
    )
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(out: Tensor, q: Tensor, kv: LayerKV, pages: Tensor, start: int, scale: float) -> None:
    """Attend from one chunk at position `start` to itself and all before it, into `out`."""
    length, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    end = start + length
    positions = torch.arange(end, device=q.device)
    index = _kv_index(pages.unsqueeze(0), positions.unsqueeze(0), kv.page_size)[0]
    grouped = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    k = _gather(kv.k, index).transpose(0, 1).unsqueeze(1)  # [kv heads, 1, end, head_dim]
    v = _gather(kv.v, index).transpose(0, 1).unsqueeze(1)
    block = max(1, _MAX_MASK_ELEMENTS // end)
    for first in range(0, length, block):
        stop = min(first + block, length)
        visible = start + stop  # to the block's last query
        queries = q[first:stop].transpose(0, 1).reshape(grouped)
        attended = F.scaled_dot_product_attention(
            queries,
            k[:, :, :visible].expand(-1, grouped[1], -1, -1),
            v[:, :, :visible].expand(-1, grouped[1], -1, -1),
            attn_mask=positions[:visible] <= positions[start + first : visible].unsqueeze(1),
            scale=scale,
        )
        out[first:stop] = attended.reshape(num_heads, -1, head_dim).transpose(0, 1)


def _kv_index(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the cache keeps each position, as in StepInputs. Both arguments: [n, ...]."""
    pages = page_table.long().gather(1, positions // page_size)
    return pages * page_size + positions % page_size


def _gather(cache: Tensor, index: Tensor) -> Tensor:
    """cache: [pages, page_size, kv heads, head_dim]; returns [*index.shape, kv heads, head_dim]."""
    flat = cache.view(-1, *cache.shape[2:])
    return flat.index_select(0, index.flatten()).view(*index.shape, *cache.shape[2:])
