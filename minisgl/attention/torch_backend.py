"""Paged attention in torch: the reference of all other backends, and the backend for CPUs.

Keys and values are gathered into dense tensors and, on a CPU, passed to
scaled_dot_product_attention. The query heads of a KV head become queries of one sequence (decode)
or heads over one broadcast KV head (prefill), so K and V are never repeated.

On a GPU the arithmetic is written out: torch's kernel for masks gives wrong results there over
broadcast keys whose number is one more than a multiple of 32 (pytorch issue 191937).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.declaration import Backend
from minisgl.attention.state import PagedKV
from minisgl.config import ATTENTION_EXTRAS, BackendFacts

# Maximum size of the dense tensors of one call. A CPU is four times as fast if keys and values fit
# into its caches; on a GPU, few large launches are faster.
_CPU_GATHERED_BYTES = 8 << 20
_GPU_GATHERED_BYTES = 256 << 20
# Maximum queries of one call: it computes the scores of them all with every key that the last sees.
_CPU_QUERIES = 256
_MAX_SCORES = 64 << 20


class TorchAttention:
    """Implements AttentionBackend on any device, for any floating dtype. Does not synchronize.

    With a window, keys before those that the batch sees are neither looked up nor read."""

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        q, kv = call.q, call.kv
        out = q.new_empty((*q.shape[:2], kv.v.shape[3]))
        limit = _CPU_GATHERED_BYTES if q.is_cpu else _GPU_GATHERED_BYTES
        key_bytes = (kv.k[0, 0].numel() + kv.v[0, 0].numel()) * q.itemsize
        group = max(1, limit // (call.spec.num_visible(batch.longest) * key_bytes))
        is_split_on_cpu = q.is_cpu and group < batch.num_rows
        for first in range(0, batch.num_rows, group):
            part = slice(first, first + group)
            table, lengths = batch.page_table[part], batch.lengths[part]
            # Only the parts with long rows need be so long; a GPU would be waited for to know it.
            longest = max(1, int(lengths.max())) if is_split_on_cpu else batch.longest
            out[part] = _decode(replace(call, q=q[part]), table, lengths, longest)
        return out

    def prefill(
        self, call: AttentionCall, batch: PrefillBatch, last_seen: Tensor | None = None
    ) -> Tensor:
        """last_seen: [num_rows], the position of the last key that each row sees, within its chunk,
        where that may be behind its own."""
        q = call.q
        out = q.new_empty((*q.shape[:2], call.kv.v.shape[3]))
        starts, lengths = batch.starts, batch.lengths
        if not lengths:  # the chunks are only in the tensors, as in a captured step
            lengths = tuple(batch.row_starts.diff().tolist())
            starts = tuple((batch.ends - batch.row_starts.diff()).tolist())
        first = 0
        for chunk, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            part = slice(first, first + length)
            if length:
                seen = None if last_seen is None else last_seen[part]
                pages = batch.page_table[chunk]
                _prefill(out[part], replace(call, q=q[part]), pages, start, seen)
            first += length
        return out


def _decode(call: AttentionCall, page_table: Tensor, lengths: Tensor, longest: int) -> Tensor:
    q, kv, sinks = call.q, call.kv, call.sinks
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    last = lengths.long().clamp(min=1).unsqueeze(1) - 1
    num_visible = call.spec.num_visible(longest)
    first = (last + 1 - num_visible).clamp(min=0)
    positions = first + torch.arange(num_visible, device=q.device)
    # Columns past the end of a row repeat its last token: the cache may contain NaN there, which a
    # mask does not exclude.
    index = _slot_mapping(page_table, torch.minimum(positions, last), kv.page_size)
    # [num_rows, num_visible, kv heads, width]
    k, v = _gather_kv(kv, index, q.dtype)
    out = _attend(
        call,
        q.reshape(num_rows, num_kv_heads, -1, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        (positions <= last)[:, None, None],
        None if sinks is None else sinks.view(1, num_kv_heads, -1, 1),
    )
    return out.reshape(num_rows, num_heads, -1)


def _prefill(
    out: Tensor, call: AttentionCall, pages: Tensor, start: int, last_seen: Tensor | None
) -> None:
    """Attend from the chunk at position `start` to itself and all earlier tokens, into `out`."""
    q, kv, spec = call.q, call.kv, call.spec
    length, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[2]
    first_seen = start + 1 - spec.num_visible(start + 1)
    positions = torch.arange(first_seen, start + length, device=q.device)
    index = _slot_mapping(pages.unsqueeze(0), positions.unsqueeze(0), kv.page_size)[0]
    grouped = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    # [kv heads, 1, keys, width]
    k, v = (kept.transpose(0, 1).unsqueeze(1) for kept in _gather_kv(kv, index, q.dtype))
    sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, -1, 1, 1)
    block = _CPU_QUERIES if q.is_cpu else max(1, _MAX_SCORES // (len(positions) * num_heads))
    for first in range(0, length, block):
        stop = min(first + block, length)
        # The keys that any of the block's queries sees.
        earliest = start + first + 1 - spec.num_visible(start + first + 1)
        last_stop = stop if last_seen is None else length
        seen = slice(earliest - first_seen, start + last_stop - first_seen)
        queries = q[first:stop].transpose(0, 1).reshape(grouped)
        own = torch.arange(start + first, start + stop, device=q.device).unsqueeze(1)
        last = own if last_seen is None else last_seen[first:stop].unsqueeze(1)
        mask = positions[seen] <= last
        if spec.window is not None:
            mask &= positions[seen] > own - spec.window
        attended = _attend(call, queries, k[:, :, seen], v[:, :, seen], mask, sinks)
        out[first:stop] = attended.reshape(num_heads, stop - first, -1).transpose(0, 1)


def _attend(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """q: [n, heads, queries, head_dim]; k and v: [n, heads or 1, keys, width], as they are stored;
    mask: bool, true where a query sees a key, broadcast to [n, heads, queries, keys]; sinks:
    broadcast to [n, heads, queries, 1]. Returns [n, heads, queries, width of v]."""
    spec, scales = call.spec, call.kv.scales
    assert spec.sinks == (sinks is not None)
    scale = spec.scale * scales.k
    if q.is_cpu and spec.softcap is None and sinks is None:
        out = _attend_fused(q, k, v, mask, scale)
    else:
        out = _attend_plainly(q, k, v, mask, scale, spec.softcap, sinks)
    return out if scales.v == 1 else out * scales.v


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute in float32 with plain operations, which is slower on a CPU."""
    shape = q.shape[:3]
    if k.shape[1] == 1:  # treat heads as queries, so that k and v are not repeated
        q = q.flatten(1, 2).unsqueeze(1)
    products = q.float() @ k.float().mT
    scores = products.view(*shape, -1).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~mask, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat((scores, sinks.expand(*shape, 1)), -1).softmax(-1)[..., :-1]
    out = weights.reshape(products.shape) @ v.float()
    return out.to(q.dtype).view(*shape, -1)


def _slot_mapping(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """The KV slot of each position. Both arguments: [n, ...]; returns the shape of positions."""
    pages = page_table.long().gather(1, positions // page_size)
    return pages * page_size + positions % page_size


def _gather_kv(kv: PagedKV, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as of `_gather`."""
    k = _gather(kv.k, index, dtype)
    return k, k[..., : kv.v.shape[3]] if kv.v_in_k else _gather(kv.v, index, dtype)


def _gather(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """cache: [pages, page_size, kv heads, head_dim]; returns [*index.shape, kv heads, head_dim] in
    `dtype`, which holds every e4m3 number."""
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype != torch.float8_e4m3fn:
        found = flat.index_select(0, index.flatten())
    else:  # which torch selects as bytes alone
        found = flat.view(torch.uint8).index_select(0, index.flatten()).view(cache.dtype).to(dtype)
    return found.view(*index.shape, *cache.shape[2:])


TORCH = Backend(
    # What auto falls back to, before backends that have not run on a GPU.
    facts=BackendFacts(
        name="torch",
        prefill_rank=8,
        decode_rank=8,
        fp8_rank=1,
        extras=ATTENTION_EXTRAS,
        runs_on_cpu=True,
        float32=True,
    ),
    make=lambda shape: TorchAttention(),
    why_missing=lambda capability, layers: None,
)
