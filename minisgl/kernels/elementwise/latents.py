"""What attention over latents (DeepSeek-V2, arXiv 2405.04434) does before and after it attends, in
torch: the norm of latents, interleaved rope, the write to the cache, and the maps of each head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.elementwise.reference import rms_norm, store


class LatentNorm(NamedTuple):
    """The RMS norm of latents, and the rotation of the numbers behind them."""

    # Of rotary_table: [max_seq_len, rope_dim] float32, contiguous.
    table: Tensor
    weight: Tensor  # [rank], as of rms_norm
    eps: float


def store_latents(
    kv: Tensor,
    q: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    norm: LatentNorm,
    to_keys: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """See dispatch.py, with the rounding of reference.py."""
    rank, rope_dim = len(norm.weight), norm.table.shape[1]
    row = kv.new_empty(kv.shape)
    cos, sin = norm.table[positions].chunk(2, dim=-1)
    row[:, :rank] = rms_norm(kv[:, :rank], norm.weight, norm.eps)
    row[:, rank:] = _rotate(kv[:, rank:], cos, sin)
    store(row.unsqueeze(1), slot_mapping, cache, scale)
    out = q.new_empty((*q.shape[:2], rank + rope_dim))
    out[..., rank:] = _rotate(q[..., -rope_dim:], cos.unsqueeze(1), sin.unsqueeze(1))
    map_queries(q, to_keys, out)
    return out


def map_queries(q: Tensor, to_keys: Tensor, out: Tensor) -> None:
    """Write the queries of latents to the first numbers of `out`; the arguments and the result are
    those of store_latents."""
    _, nope_dim, rank = to_keys.shape
    queries = q[..., :nope_dim].transpose(0, 1)
    torch.bmm(queries, to_keys, out=out[..., :rank].transpose(0, 1))


def values_of_latents(attended: Tensor, to_values: Tensor) -> Tensor:
    """See dispatch.py."""
    out = attended.new_empty((*attended.shape[:2], to_values.shape[1]))
    torch.bmm(attended.transpose(0, 1), to_values.mT, out=out.transpose(0, 1))
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., rope_dim]; cos and sin: of each pair of neighbours. Returns x's dtype and order."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    turned: Tensor = rotated[0].new_empty((*x.shape[:-1], cos.shape[-1], 2))
    turned[..., 0], turned[..., 1] = rotated
    return turned.flatten(-2).to(x.dtype)
