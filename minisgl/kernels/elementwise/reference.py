"""The operations of `dispatch.py` in plain torch: what a CPU runs, and what the Triton kernels are
tested against, to the rounding. That is the one of transformers, so that half precision models see
what they were made with."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class NormRope(NamedTuple):
    """How the heads of q and k are normed and turned: what turn_and_store takes of the model."""

    table: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


def embed(token_ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    places = token_ids - first
    there = (places >= 0) & (places < len(weight))
    return F.embedding(places.where(there, 0), weight) * there[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The quotient is computed in float32, and rounded to x's dtype before it meets the weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    residual = residual + delta
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def turn_and_store(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_rows, 1, head_dim / 2]
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_index, _turn(k, cos, sin))
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_index, v)
    return _turn(q, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of x, [num_rows, heads, head_dim], in float32; returns x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
