"""The norm of a block's result, its addition to the residual stream, and the norms of the stream
that follow, as one Triton kernel, with the rounding of `add_post_norm` in reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.elementwise.reference import PostNorm
from minisgl.kernels.inlined import rms_scale, wait_for_previous
from minisgl.kernels.launch_options import pdl_options, tile_of_rows
from minisgl.kernels.tuning import tuning_of

_MOST_NORMS = 3


def add_post_norm(
    summands: tuple[Tensor, ...],
    residual: Tensor,
    post: PostNorm,
    weights: tuple[Tensor, ...],
    *,
    pdl: bool = True,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See dispatch.py; all contiguous. Returns new tensors, and `residual`, which holds the sum.
    `pdl`: see launch_options.py."""
    tensors = (residual, *summands)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert 1 <= len(weights) <= _MOST_NORMS and len(summands) == (1 if post.inner is None else 2)
    num_rows, size = residual.shape
    normed = tuple(torch.empty_like(residual) for _ in weights)
    missing = (None,) * (_MOST_NORMS - len(weights))
    tile = tile_of_rows(num_rows, size, tuning_of(residual.device))
    _post_norm_rows[(triton.cdiv(num_rows, tile["rows"]),)](
        *normed,
        *missing,
        residual,
        *summands,
        *([None] if post.inner is None else []),
        *(post.inner or (None, None)),
        post.weight,
        post.scale,
        *weights,
        *missing,
        num_rows,
        post.eps,
        size=size,
        **tile,
        **pdl_options(residual.device, pdl),
    )
    return normed, residual


@triton.jit(do_not_specialize=["num_rows"])
def _post_norm_rows(
    out,
    second_out,
    third_out,
    residual,
    summand,
    second_summand,
    inner_weight,
    second_inner_weight,
    post_weight,
    post_scale,
    weight,
    second_weight,
    third_weight,
    num_rows,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    pdl: tl.constexpr,
):
    """`rows` whole rows a program, held in registers from load to store."""
    column = tl.arange(0, block)
    post_factor = tl.load(post_weight + column, mask=column < size, other=0.0)
    factor = tl.load(weight + column, mask=column < size, other=0.0)
    wait_for_previous(pdl)  # for the summands and the residual; the weights are old, and far away

    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * size + column[None, :]
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    x = tl.load(residual + place, mask=inside, other=0.0)
    added = tl.load(summand + place, mask=inside, other=0.0)
    if second_summand is not None:
        other = tl.load(second_summand + place, mask=inside, other=0.0)
        added = _normed(added, _scale(added, size, eps), inner_weight, column, size)
        other = _normed(other, _scale(other, size, eps), second_inner_weight, column, size)
        added = (added.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    added = _by(added, _scale(added, size, eps), post_factor)
    x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    if post_scale is not None:
        x = (x.to(tl.float32) * tl.load(post_scale).to(tl.float32)).to(x.dtype)
    tl.store(residual + place, x, mask=inside)

    scale = _scale(x, size, eps)
    tl.store(out + place, _by(x, scale, factor), mask=inside)
    if second_out is not None:
        tl.store(second_out + place, _normed(x, scale, second_weight, column, size), mask=inside)
    if third_out is not None:
        tl.store(third_out + place, _normed(x, scale, third_weight, column, size), mask=inside)


@triton.jit
def _scale(x, size: tl.constexpr, eps):
    """[rows, 1] float32: the factors of these rows in their norms, before the weight."""
    wide = x.to(tl.float32)
    return rms_scale(tl.sum(wide * wide, axis=1), size, eps)[:, None]


@triton.jit
def _normed(x, scale, weight, column, size: tl.constexpr):
    return _by(x, scale, tl.load(weight + column, mask=column < size, other=0.0))


@triton.jit
def _by(x, scale, factor):
    """The norm with the weights `factor`, rounded once."""
    return (x.to(tl.float32) * scale * factor.to(tl.float32)[None, :]).to(x.dtype)
