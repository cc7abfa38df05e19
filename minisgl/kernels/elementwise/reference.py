"""The operations of dispatch.py in torch: what a CPU runs, and what the Triton kernels are tested
against. The rounding is that of transformers, with which half-precision models were trained."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.config import UNSCALED, KVScales

E4M3_MAX = 448.0
_GELU = 2 * (2 / math.pi) ** 0.5


class NormRope(NamedTuple):
    """The RMS norm and the rotary embedding of the heads of q and k; values may be normed, too."""

    # Of rotary_table: [max_seq_len, head_dim] float32, contiguous; or narrower, where only so
    # many of the first numbers of a head are rotated.
    table: Tensor
    q_weight: Tensor | None = None  # [head_dim], as of rms_norm; None: no norm, and no k_weight
    k_weight: Tensor | None = None
    eps: float = 0.0
    norms_v: bool = False  # v has a norm without weights; requires those of q and k
    v_is_k: bool = False  # v is k as it comes, before its norm and rotation

    def num_heads(self, num_all: int, num_kv_heads: int) -> int:
        """The number of q's heads among all heads of a row of qkv."""
        return num_all - (1 if self.v_is_k else 2) * num_kv_heads


class PostNorm(NamedTuple):
    """A norm of the result of a block, before the residual stream gets it."""

    weight: Tensor  # [size], of the dtype of the rows or float32
    eps: float  # of all norms here
    # Weights of norms of the two summands of the result; None: it is one.
    inner: tuple[Tensor, Tensor] | None = None
    scale: Tensor | None = None  # [1]: multiplies the stream after the addition


def embed(token_ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    rows = token_ids - first
    held = (rows >= 0) & (rows < len(weight))
    return F.embedding(rows.where(held, 0), weight) * held[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The quotient is computed in float32, and rounded to x's dtype before the weight multiplies
    it."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype)).to(x.dtype)


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    residual = residual + delta
    return rms_norm(residual, weight, eps), residual


def add_post_norm(
    summands: tuple[Tensor, ...], residual: Tensor, post: PostNorm, weights: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Unlike in rms_norm, only the product with the weight is rounded."""
    if post.inner is None:
        [added] = summands
    else:
        one, other = (
            _wide_norm(summand, weight, post.eps)
            for summand, weight in zip(summands, post.inner, strict=True)
        )
        added = one + other
    residual = residual + _wide_norm(added, post.weight, post.eps)
    if post.scale is not None:
        residual = residual * post.scale
    return tuple(_wide_norm(residual, weight, post.eps) for weight in weights), residual


def _wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def gated_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (_gelu(gate) if gelu else F.silu(gate)) * up


def _gelu(x: Tensor) -> Tensor:
    """gelu by tanh, whose sum 1 + tanh(y) is twice the sigmoid of 2 y: far below 0 torch's own
    loses digits."""
    wide = x.float()
    return (wide * torch.sigmoid(wide * (_GELU + _GELU * 0.044715 * wide * wide))).to(x.dtype)


def qk_norm_rope_store_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norm_rope: NormRope,
    scales: KVScales = UNSCALED,
) -> Tensor:
    table, q_weight, k_weight, eps, norms_v, _ = norm_rope
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = norm_rope.num_heads(heads.shape[1], num_kv_heads)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], heads[:, -num_kv_heads:]
    if norms_v:
        v = rms_norm(v, v.new_ones(head_dim), eps)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_rows, 1, head_dim / 2]
    store(_rotate(k, cos, sin), slot_mapping, k_cache, scales.k)
    store(v, slot_mapping, v_cache, scales.v)
    return _rotate(q, cos, sin)


def to_stored(x: Tensor, scale: float) -> Tensor:
    """x · (1 / scale) in float8_e4m3fn, rounded to nearest, even; what exceeds the range becomes
    its end, ±448, and NaN stays."""
    return (x.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def store(x: Tensor, slot_mapping: Tensor, cache: Tensor, scale: float) -> None:
    slots = cache.view(-1, *x.shape[1:])
    if cache.dtype == torch.float8_e4m3fn:  # for which torch copies by index as bytes alone
        x, slots = to_stored(x, scale).view(torch.uint8), slots.view(torch.uint8)
    slots.index_copy_(0, slot_mapping, x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the heads of x, [num_rows, heads, head_dim], in float32; returns x's dtype."""
    num_pairs = cos.shape[-1]
    first, second, rest = x.float().split((num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs), -1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)
