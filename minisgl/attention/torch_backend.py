"""Paged attention in torch: the reference of all other backends, and the backend for CPUs.

Keys and values are gathered into dense tensors and, on a CPU, passed to
scaled_dot_product_attention. The query heads of a KV head become queries of one sequence (decode)
or heads over one broadcast KV head (prefill), so K and V are never repeated.

On a GPU the arithmetic is written out: torch's kernel for masks gives wrong results there over
broadcast keys whose number is one more than a multiple of 32 (pytorch issue 191937).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import DecodeBatch, LayerKV, PrefillBatch
from minisgl.config import AttentionSpec

# Maximum size of the dense tensors of one call. A CPU is four times as fast if keys and values fit
# into its caches; on a GPU, few large launches are faster.
_CPU_GATHERED_BYTES = 8 << 20
_GPU_GATHERED_BYTES = 256 << 20
# Maximum queries of one call: it computes the scores of them all with every key that the last sees.
_CPU_QUERIES = 256
_MAX_SCORES = 64 << 20


class TorchAttention:
    """Implements AttentionBackend on any device, for any floating dtype. Does not synchronize."""

    def decode(self, q: Tensor, kv: LayerKV, batch: DecodeBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        out = torch.empty_like(q)
        limit = _CPU_GATHERED_BYTES if q.is_cpu else _GPU_GATHERED_BYTES
        group = max(1, limit // (2 * batch.longest * kv.k[0, 0].numel() * q.itemsize))
        is_split_on_cpu = q.is_cpu and group < batch.num_rows
        for first in range(0, batch.num_rows, group):
            part = slice(first, first + group)
            table, lengths = batch.page_table[part], batch.lengths[part]
            # Only the parts with long rows need be so long; a GPU would be waited for to know it.
            longest = max(1, int(lengths.max())) if is_split_on_cpu else batch.longest
            out[part] = _decode(q[part], kv, table, lengths, longest, spec.scale)
        return out

    def prefill(self, q: Tensor, kv: LayerKV, batch: PrefillBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        out = torch.empty_like(q)
        starts, lengths = batch.starts, batch.lengths
        if not lengths:  # the chunks are only in the tensors, as in a captured step
            lengths = tuple(batch.row_starts.diff().tolist())
            starts = tuple((batch.ends - batch.row_starts.diff()).tolist())
        first = 0
        for chunk, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            part = slice(first, first + length)
            if length:
                _prefill(out[part], q[part], kv, batch.page_table[chunk], start, spec.scale)
            first += length
        return out


def _decode(
    q: Tensor, kv: LayerKV, page_table: Tensor, lengths: Tensor, longest: int, scale: float
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    positions = torch.arange(longest, device=q.device)
    # Columns past the end of a row repeat its last token: the cache may contain NaN there, which a
    # mask does not exclude.
    last = lengths.long().clamp(min=1).unsqueeze(1) - 1
    index = _slot_mapping(page_table, torch.minimum(positions, last), kv.page_size)
    # [num_rows, longest, kv heads, head_dim]
    k, v = _gather(kv.k, index, q.dtype), _gather(kv.v, index, q.dtype)
    attend = _attend_fused if q.is_cpu else _attend_plainly
    out = attend(
        q.reshape(num_rows, num_kv_heads, -1, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        (positions <= last)[:, None, None],
        scale * kv.scales.k,
    )
    return _scaled(out, kv.scales.v).reshape(num_rows, num_heads, head_dim)


def _prefill(out: Tensor, q: Tensor, kv: LayerKV, pages: Tensor, start: int, scale: float) -> None:
    """Attend from the chunk at position `start` to itself and all earlier tokens, into `out`."""
    length, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    end = start + length
    positions = torch.arange(end, device=q.device)
    index = _slot_mapping(pages.unsqueeze(0), positions.unsqueeze(0), kv.page_size)[0]
    grouped = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    # [kv heads, 1, end, head_dim]
    k = _gather(kv.k, index, q.dtype).transpose(0, 1).unsqueeze(1)
    v = _gather(kv.v, index, q.dtype).transpose(0, 1).unsqueeze(1)
    attend = _attend_fused if q.is_cpu else _attend_plainly
    block = _CPU_QUERIES if q.is_cpu else max(1, _MAX_SCORES // (end * num_heads))
    for first in range(0, length, block):
        stop = min(first + block, length)
        visible = start + stop  # keys of the block's last query
        queries = q[first:stop].transpose(0, 1).reshape(grouped)
        mask = positions[:visible] <= positions[start + first : visible].unsqueeze(1)
        attended = attend(queries, k[:, :, :visible], v[:, :, :visible], mask, scale * kv.scales.k)
        attended = _scaled(attended, kv.scales.v)
        out[first:stop] = attended.reshape(num_heads, -1, head_dim).transpose(0, 1)


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q: [n, heads, queries, head_dim]; k and v: [n, heads or 1, keys, head_dim]; mask: bool, true
    where a query sees a key, broadcast to [n, heads, queries, keys]. Returns the shape of q."""
    k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute `_attend_fused` in float32 with plain operations."""
    shape = q.shape
    if k.shape[1] == 1:  # treat heads as queries, so that k and v are not repeated
        mask = mask.expand(shape[:3] + mask.shape[-1:]).flatten(1, 2).unsqueeze(1)
        q = q.flatten(1, 2).unsqueeze(1)
    scores = (q.float() @ k.float().mT).mul_(scale).masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype).view(shape)


def _slot_mapping(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """The KV slot of each position. Both arguments: [n, ...]; returns the shape of positions."""
    pages = page_table.long().gather(1, positions // page_size)
    return pages * page_size + positions % page_size


def _gather(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """cache: [pages, page_size, kv heads, head_dim]; returns [*index.shape, kv heads, head_dim] in
    `dtype`, which holds every e4m3 number."""
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype != torch.float8_e4m3fn:
        found = flat.index_select(0, index.flatten())
    else:  # which torch selects as bytes alone
        found = flat.view(torch.uint8).index_select(0, index.flatten()).view(cache.dtype).to(dtype)
    return found.view(*index.shape, *cache.shape[2:])


def _scaled(out: Tensor, scale: float) -> Tensor:
    return out if scale == 1 else out * scale
