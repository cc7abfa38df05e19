"""The operations of a model between its GEMMs and attention, and whether Triton runs them.

On a GPU that Triton compiles for each is one kernel; elsewhere it is a function of
elementwise/reference.py, which also defines the rounding. Each Triton file states what it requires
beyond the contract here (contiguous inputs) and when its launches overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.config import UNSCALED, KVScales
from minisgl.kernels.elementwise import latents, reference
from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.elementwise.reference import NormRope, PostNorm

logger = logging.getLogger(__name__)

_OLDEST = (8, 0)  # the lowest compute capability that Triton supports


def embed(token_ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Row `id - first` of the weight for each id; zeros for ids outside of it.

    token_ids: [num_rows] int64; weight: [vocab, size]. Returns a new [num_rows, size].
    """
    return _kernels_for(weight.device).embed(token_ids, weight, first)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight of each row.

    x: [num_rows, size]; weight: [size], of x's dtype or float32. Returns a new tensor like x.
    """
    return _kernels_for(x.device).rms_norm(x, weight, eps)


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the RMS norm of residual + delta, and that sum, which may be written over `residual`.

    Both are [num_rows, size] and of one dtype; weight: as of rms_norm.
    """
    return _kernels_for(residual.device).add_rms_norm(delta, residual, weight, eps)


def add_post_norm(
    summands: tuple[Tensor, ...], residual: Tensor, post: PostNorm, weights: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Norm the result of a block, add it to the stream, and norm the stream.

    summands: what the result is the sum of, one, or two where `post` norms each; all, and the
    residual, [num_rows, size] and of one dtype. weights: of up to three norms of the new stream.
    Returns these norms, and the stream, which may be written over `residual`.
    """
    return _kernels_for(residual.device).add_post_norm(summands, residual, post, weights)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap), which may be written over x."""
    return _kernels_for(x.device).soft_cap(x, cap)


def gated_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """silu(gate) · up, or gelu(gate) · up with the approximation by tanh.

    gate_up: [num_rows, 2 · size], the gates first; returns [num_rows, size].
    """
    return _kernels_for(gate_up.device).gated_mul(gate_up, gelu)


def qk_norm_rope_store_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norm_rope: NormRope,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Norm the heads of q and k if there are weights, rotate them, and write k and v to the cache.

    qkv: [num_rows, (num_heads + 2 · num_kv_heads) · head_dim], q's heads first, then k's, then v's,
    unless these are k's; it may be columns of a wider tensor.
    positions and slot_mapping: [num_rows] int64, see ForwardBatch. The caches: [num_pages,
    page_size, num_kv_heads, head_dim]; two rows may share a slot on the scratch page only, which
    is never read. They are of qkv's dtype, or float8_e4m3fn: then k and v are divided by `scales`
    and rounded, as reference.to_stored does. Returns q, a new [num_rows, num_heads, head_dim].

    On Hopper and later, positions and slot_mapping must have been written at least two launches
    before.
    """
    return _kernels_for(qkv.device).qk_norm_rope_store_kv(
        qkv, positions, slot_mapping, k_cache, v_cache, norm_rope, scales
    )


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
    """Norm the latents, rotate what is behind them, and write both to the cache; make queries of
    latents.

    kv: [num_rows, rank + rope_dim]; q: [num_rows, num_heads, nope_dim + rope_dim]; rows of both may
    be parts of wider ones. The last rope_dim numbers of each are rotated, pair by pair of
    neighbours. to_keys: [num_heads, nope_dim, rank], of which the heads may be parts of larger
    ones: maps the other numbers of each head. positions, slot_mapping: as of
    qk_norm_rope_store_kv. cache: [num_pages, page_size, 1, rank + rope_dim], of kv's dtype, or
    float8_e4m3fn with this scale.

    Returns a new [num_rows, num_heads, rank + rope_dim]: what each query is mapped to, and behind
    it its rotated numbers.
    """
    return _kernels_for(kv.device).store_latents(
        kv, q, positions, slot_mapping, cache, norm, to_keys, scale
    )


def values_of_latents(attended: Tensor, to_values: Tensor) -> Tensor:
    """Map what each head has found among latents to its values.

    attended: [num_rows, num_heads, rank]; to_values: [num_heads, value_dim, rank], of which the
    heads may be parts of larger ones. Returns a new [num_rows, num_heads, value_dim].
    """
    return _kernels_for(attended.device).values_of_latents(attended, to_values)


class Kernels(NamedTuple):
    """One implementation of the functions above."""

    embed: Callable[[Tensor, Tensor, int], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_post_norm: Callable[
        [tuple[Tensor, ...], Tensor, PostNorm, tuple[Tensor, ...]],
        tuple[tuple[Tensor, ...], Tensor],
    ]
    soft_cap: Callable[[Tensor, float], Tensor]
    gated_mul: Callable[[Tensor, bool], Tensor]
    qk_norm_rope_store_kv: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, NormRope, KVScales], Tensor
    ]
    store_latents: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, LatentNorm, Tensor, float], Tensor
    ]
    values_of_latents: Callable[[Tensor, Tensor], Tensor]


REFERENCE = Kernels(
    reference.embed,
    reference.rms_norm,
    reference.add_rms_norm,
    reference.add_post_norm,
    reference.soft_cap,
    reference.gated_mul,
    reference.qk_norm_rope_store_kv,
    latents.store_latents,
    latents.values_of_latents,
)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`; the references do otherwise."""
    return _kernels_for(device) is not REFERENCE


def triton_kernels() -> Kernels:
    """Imports Triton, which takes a second. Raises ImportError where it is missing."""
    from minisgl.kernels.elementwise.activation import gated_mul
    from minisgl.kernels.elementwise.embedding import embed
    from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv
    from minisgl.kernels.elementwise.latents_kernel import store_latents, values_of_latents
    from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm
    from minisgl.kernels.elementwise.post_norm import add_post_norm
    from minisgl.kernels.elementwise.soft_cap import soft_cap

    return Kernels(
        embed,
        rms_norm,
        add_rms_norm,
        add_post_norm,
        soft_cap,
        gated_mul,
        qk_norm_rope_store_kv,
        store_latents,
        values_of_latents,
    )


@cache
def _kernels_for(device: torch.device) -> Kernels:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return REFERENCE
    try:
        kernels = triton_kernels()
        _start_triton()
    except Exception as error:  # an optional package that is broken must not stop the engine
        logger.warning("Triton does not run here; the layers run without it: %s", error)
        return REFERENCE
    return kernels


def _start_triton() -> None:
    """Builds the module that Triton launches kernels with, once a machine. Raises without a C
    compiler or the headers of Python."""
    import triton

    triton.runtime.driver.active.get_current_target()
