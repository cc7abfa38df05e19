"""Experts in FP8 of few rows, of which two rarely share an expert; see launch.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.device import from_here, silu_mul
from minisgl.kernels.elementwise.quantize import round_to_fp8, scale_of
from minisgl.kernels.launch import pdl_options
from minisgl.kernels.linear.device import load
from minisgl.kernels.linear.fp8.kernel import down, scale_row
from minisgl.kernels.moe.fp8.many_rows import EXACT_K
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.moe.routing import expert_places, place_for_sum, weights_of
from minisgl.kernels.tuning import FewTiles


def few_rows_experts(
    x: Tensor,
    logits: Tensor,
    experts: Fp8Experts,
    routing: Routing,
    residual: Tensor | None,
    tiles: FewTiles,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:
    num_rows, hidden_size = x.shape
    gate_up, matrix_down, scales = experts.gate_up, experts.down, experts.input_scales
    num_experts, _, size = matrix_down.data.shape
    numbers = {
        "hidden_size": hidden_size,
        "size": size,
        "num_experts": num_experts,
        "top_k": routing.top_k,
        "experts_block": triton.next_power_of_2(num_experts),
        "by_group": experts.activations == Activations.GROUP,
        **pdl_options(x.device, pdl),
    }
    inner = x.new_empty((num_rows * routing.top_k, size))
    how = tiles.inner
    _few_inner[(triton.cdiv(size, how.block_n), len(inner))](
        inner,
        x,
        logits,
        gate_up.data,
        gate_up.scale,
        scales and scales.gate_up,
        scale_rows=0 if gate_up.block is None else gate_up.block[0],
        exact_k=min(EXACT_K, max(how.block_k, 32)),
        whole_k=hidden_size % how.block_k == 0 and how.block_k >= 32,
        row_block=triton.next_power_of_2(hidden_size),
        block_n=how.block_n,
        block_m=how.block_m,
        block_k=how.block_k,
        stages=how.num_stages,
        num_warps=how.num_warps,
        **numbers,
    )
    num_blocks = triton.cdiv(hidden_size, tiles.block_n)
    out, squares = place_for_sum(x, residual, num_blocks)
    block = matrix_down.block
    assert block is None or (block[0] % tiles.block_n == 0 and tiles.block_k % block[1] == 0)
    _few_outer[(num_blocks, num_rows)](
        out,
        squares,
        inner,
        logits,
        matrix_down.data,
        matrix_down.scale,
        scales and scales.down,
        scale_rows=0 if block is None else block[0],
        scale_columns=0 if block is None else block[1],
        normalize=routing.normalize,
        places=triton.next_power_of_2(routing.top_k),
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        pieces=triton.cdiv(size, tiles.block_k),
        num_warps=tiles.num_warps,
        **numbers,
    )
    return out, squares


@triton.jit
def _few_inner(
    inner,
    x,
    logits,
    weight,
    w_scale,
    static,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    experts_block: tl.constexpr,
    by_group: tl.constexpr,
    scale_rows: tl.constexpr,
    exact_k: tl.constexpr,
    whole_k: tl.constexpr,
    row_block: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a pair's activations. by_group: the columns of a tile of k have a scale of their
    own. static: [num_experts] float32, or None."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair, tile = tl.program_id(1), tl.program_id(0)
    row = pair // top_k
    x += row * hidden_size
    _, order = expert_places(logits + row * num_experts, num_experts, experts_block)
    is_mine = order == pair % top_k
    expert = tl.sum(tl.where(is_mine, tl.arange(0, experts_block), 0))
    by_x = 1.0
    if static is not None:
        by_x = tl.load(static + expert)
    elif not by_group:
        lane = tl.arange(0, row_block)
        whole = tl.load(x + lane, mask=lane < hidden_size, other=0.0).to(tl.float32)
        by_x = scale_of(tl.max(tl.abs(whole)))

    w_row = tl.arange(0, block_n)
    if size % block_n != 0:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, size - 1 - tile * block_n)
    columns = tl.arange(0, block_k if block_k > 32 else 32)  # of fewer, the rest is masked
    weight += (expert.to(tl.int64) * (2 * size) + tile * block_n) * hidden_size
    up_weight = weight + size * hidden_size
    w_place = w_row[:, None] * hidden_size + columns[None, :]
    if scale_rows > 0:
        across_k: tl.constexpr = (hidden_size + block_k - 1) // block_k
        num_scales: tl.constexpr = (2 * size + scale_rows - 1) // scale_rows * across_k
        w_scale += expert * num_scales + scale_row(tile, w_row, block_n, scale_rows) * across_k
        up_scale = w_scale + size // scale_rows * across_k
        by_gate, by_up = tl.load(w_scale), tl.load(up_scale)
    else:
        w_scale += expert * (2 * size) + tile * block_n + w_row
        up_scale = w_scale + size
    gate = tl.zeros([block_n, block_m], tl.float32)
    up = tl.zeros([block_n, block_m], tl.float32)
    for start in tl.range(0, hidden_size, block_k, num_stages=stages):
        within = (columns < block_k) & (start + columns < hidden_size)
        w = load(weight + start + w_place, within[None, :], whole_k)
        w_up = load(up_weight + start + w_place, within[None, :], whole_k)
        part = load(x + start + columns, within, whole_k).to(tl.float32)
        if by_group:
            by_x = scale_of(tl.max(tl.abs(part)))
        # All columns are alike; one is written.
        rounded = round_to_fp8(part, by_x, static is not None)[:, None].broadcast_to(
            w.shape[1], block_m
        )
        if scale_rows > 0:
            ahead = tl.minimum(start + block_k, hidden_size - 1) // block_k
            gate += tl.dot(w, rounded) * (down(by_gate) * by_x)
            up += tl.dot(w_up, rounded) * (down(by_up) * by_x)
            by_gate, by_up = tl.load(w_scale + ahead), tl.load(up_scale + ahead)
        else:
            gate = tl.dot(w, rounded, gate, max_num_imprecise_acc=exact_k)
            up = tl.dot(w_up, rounded, up, max_num_imprecise_acc=exact_k)
    if scale_rows == 0:
        gate *= tl.load(w_scale)[:, None] * by_x
        up *= tl.load(up_scale)[:, None] * by_x
    result = silu_mul(gate, up, inner.dtype.element_ty)
    output = tile * block_n + tl.arange(0, block_n)
    place = inner + pair * size + output[:, None] + tl.zeros([1, block_m], tl.int32)
    one = (tl.arange(0, block_m) == 0)[None, :]
    tl.store(place, result, mask=(output < size)[:, None] & one)


@triton.jit
def _few_outer(
    out,
    squares,
    inner,
    logits,
    weight,
    w_scale,
    static,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    experts_block: tl.constexpr,
    by_group: tl.constexpr,
    scale_rows: tl.constexpr,
    scale_columns: tl.constexpr,
    normalize: tl.constexpr,
    places: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of a row's sum over its experts; added to `out` if there are squares."""
    row = tl.program_id(1)
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    place = tl.arange(0, places)
    # The logits are older than the previous kernel, as the weights are.
    probability, order = expert_places(logits + row * num_experts, num_experts, experts_block)
    expert_weight = weights_of(probability, order, top_k, normalize)
    is_here = order[:, None] == place[None, :]
    expert = tl.sum(tl.where(is_here, tl.arange(0, experts_block)[:, None], 0), 0)
    expert_weight = tl.sum(tl.where(is_here, expert_weight[:, None], 0.0), 0)
    w_at = weight + expert.to(tl.int64)[:, None, None] * (hidden_size * size)
    w_at += output[None, :, None] * size
    is_place, is_output = place < top_k, output < hidden_size
    live = is_place[:, None, None] & is_output[None, :, None]
    w, rows, scales = (), (), ()
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, None, :]
        w += (tl.load(w_at + k, mask=live & (k < size), other=0.0),)
    by_x = tl.full([places], 1.0, tl.float32)
    if static is not None:
        by_x = tl.load(static + expert, mask=is_place, other=1.0)
    if scale_rows > 0:
        across_k: tl.constexpr = (size + scale_columns - 1) // scale_columns
        num_scales: tl.constexpr = (hidden_size + scale_rows - 1) // scale_rows * across_k
        at = w_scale + expert * num_scales
        at += tl.program_id(0) * block_n // scale_rows * across_k
        number: tl.constexpr = block_k // scale_columns
        for i in tl.static_range(pieces):
            column = i * number + tl.arange(0, number)[None, :]
            mask = is_place[:, None] & (column < across_k)
            scales += (tl.load(at[:, None] + column, mask=mask, other=0.0),)
    else:
        at = w_scale + (expert * hidden_size)[:, None] + output[None, :]
        by_output = tl.load(at, mask=is_place[:, None] & is_output[None, :], other=0.0)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inner += (row * top_k + place)[:, None] * size
    for i in tl.static_range(pieces):
        k = (i * block_k + tl.arange(0, block_k))[None, :]
        rows += (tl.load(inner + k, mask=is_place[:, None] & (k < size), other=0.0),)
    out += row * hidden_size + output
    if squares is not None:
        residual = tl.load(out, mask=is_output, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all loads are issued

    if static is None and not by_group:
        largest = tl.zeros([places], tl.float32)
        for i in tl.static_range(pieces):
            largest = tl.maximum(largest, tl.max(tl.abs(rows[i].to(tl.float32)), 1))
        by_x = scale_of(largest)
    product = tl.zeros([places, block_n, block_k], tl.float32)
    for i in tl.static_range(pieces):
        x = _rounded(
            rows[i], by_x, scales, i, by_group, static is not None, places, block_k, scale_columns
        )
        # Here x goes from the threads that rounded it to those that hold the weights.
        product += from_here(w[i], pdl).to(tl.float32) * from_here(x, pdl)[:, None, :]
    kind = out.dtype.element_ty
    total = tl.sum(product, 2)
    if scale_rows == 0:
        total *= by_output
    result = total.to(kind).to(tl.float32) * expert_weight.to(kind).to(tl.float32)[:, None]
    result = tl.sum(result.to(kind).to(tl.float32), 0).to(kind)
    if squares is not None:
        result = (residual + result.to(tl.float32)).to(kind)
        wide = tl.where(is_output, result.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide))
    tl.store(out, result, mask=is_output)


@triton.jit
def _rounded(
    x,
    by_x,
    by_w,
    piece: tl.constexpr,
    by_group: tl.constexpr,
    static: tl.constexpr,
    places: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
):
    """A piece of the rows x [places, columns], rounded: float32, times their scales, and those of
    the weights if each `width` columns have some, by_w[piece]. Without `by_group` the scales of x
    are by_x [places]."""
    wide = x.to(tl.float32)
    if width == 0:
        return round_to_fp8(wide, by_x[:, None], static).to(tl.float32) * by_x[:, None]
    else:
        wide = tl.reshape(wide, (places, columns // width, width))
        scale = scale_of(tl.max(tl.abs(wide), 2)) if by_group else by_x[:, None]
        x8 = round_to_fp8(wide, scale[:, :, None], static).to(tl.float32)
        return tl.reshape(x8 * (scale * by_w[piece])[:, :, None], (places, columns))
