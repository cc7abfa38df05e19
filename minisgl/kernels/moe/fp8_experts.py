"""The GEMMs of experts in FP8 or INT8, on tensor cores: their inputs are rounded to the same, in a
launch before each."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.elementwise.quantize import quantize, round_to_fp8
from minisgl.kernels.fp8_rows import Fp8Rows
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for
from minisgl.kernels.linear.fp8.fp8_gemm import exact_k
from minisgl.kernels.linear.fp8.fp8_kernel import add_product, down, no_sums, scale_row
from minisgl.kernels.linear.gemm_parts import load
from minisgl.kernels.moe.many_rows import Listed, PairGemm, store_outputs
from minisgl.kernels.moe.quantized_experts import Fp8Experts
from minisgl.kernels.moe.reference import Chosen


def _round_pairs(source: Tensor, chosen: Tensor, static: Tensor, *, pdl: bool) -> Fp8Rows:
    """Each pair's row of `source` with the scale of its expert. The rows of `source` are those of
    the pairs, or each is the row of several."""
    num_pairs, size = chosen.numel(), source.shape[1]
    out = torch.empty((num_pairs, size), dtype=torch.float8_e4m3fn, device=source.device)
    scales = torch.empty(num_pairs, dtype=torch.float32, device=source.device)
    block = min(triton.next_power_of_2(size), 1024)
    _round_pair[(num_pairs, triton.cdiv(size, block))](
        out,
        scales,
        source,
        chosen,
        static,
        size=size,
        shared=num_pairs // len(source),
        block=block,
        num_warps=warps_for(block, 8),
        **pdl_options(source.device, pdl),
    )
    return Fp8Rows(out, scales, source.dtype)


def multiply_fp8(experts: Fp8Experts, choice: Chosen, pairs: Listed, gemm: PairGemm) -> None:
    weight, scales = experts.gate_up if gemm.gated else experts.down, experts.input_scales
    if experts.activations == Activations.STATIC:
        assert scales is not None
        static = scales.gate_up if gemm.gated else scales.down
        rows = _round_pairs(gemm.source, choice.experts, static, pdl=gemm.pdl)
    else:
        group = weight.group if experts.activations == Activations.GROUP else None
        rows = quantize(gemm.source, group, dtype=weight.data.dtype, pdl=gemm.pdl)
    tiles, num_inputs = gemm.tiles, gemm.source.shape[1]
    if gemm.delta is not None and tiles.block_m >= 128:  # else registers are spilled
        tiles = replace(tiles, num_warps=8)
        gemm = gemm._replace(tiles=tiles)
    _expert_product[gemm.grid(len(weight.data))](
        rows.data,
        rows.scale,
        weight.data,
        weight.scale,
        gemm.target,
        *pairs,
        gemm.delta,
        # Where whole rows have scales, all groups have the same.
        rows.scale.stride(1) if rows.scale.dim() == 2 else 0,
        shared=len(gemm.target) // len(rows),
        places=tiles.places,
        gelu=gemm.gated and experts.gelu,
        scale_rows=0 if weight.block is None else weight.block[0],
        exact_k=exact_k(weight.data, tiles.block_k),
        whole_k=num_inputs % tiles.block_k == 0 and tiles.block_k >= 32,
        stages=tiles.num_stages,
        **gemm.numbers,
    )


@triton.jit
def _round_pair(
    out,
    scales,
    source,
    chosen,
    static,
    size: tl.constexpr,
    shared: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A part of a pair's row."""
    wait_for_previous(pdl)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    # A pair that is dropped is rounded, too, by any scale; no product reads it.
    scale = tl.load(static + tl.maximum(tl.load(chosen + pair), 0))
    x = tl.load(source + pair // shared * size + column, mask=column < size, other=0.0)
    tl.store(
        out + pair * size + column, round_to_fp8(x.to(tl.float32), scale, True), mask=column < size
    )
    if tl.program_id(1) == 0:
        tl.store(scales + pair, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    source,
    source_scale,
    weight,
    w_scale,
    target,
    counts,
    lists,
    weights,
    num_rows,
    delta,
    scale_stride,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    shared: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    scale_rows: tl.constexpr,
    exact_k: tl.constexpr,
    whole_k: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs, for some of an expert's pairs, `shared` of which have one row of
    `source`. The outputs of the first product are activated if `gated`, those of the second
    weighted. The other arguments are those of linear/fp8/fp8_kernel.py."""
    wait_for_previous(pdl)
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    tile = tl.program_id(0) % across
    output = tile * block_n + tl.arange(0, block_n)
    w_row = tl.arange(0, block_n)
    if num_outputs % block_n != 0:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, num_outputs - 1 - tile * block_n)
    halves: tl.constexpr = 2 if gated else 1
    columns = tl.arange(0, block_k if block_k > 32 else 32)[None, :]  # of fewer, the rest is masked
    weight += (expert.to(tl.int64) * (halves * num_outputs) + tile * block_n) * num_inputs
    w_place = w_row[:, None] * num_inputs + columns
    up_weight = weight + num_outputs * num_inputs
    if scale_rows > 0:
        across_k: tl.constexpr = (num_inputs + block_k - 1) // block_k
        num_scales: tl.constexpr = (halves * num_outputs + scale_rows - 1) // scale_rows * across_k
        w_scale += expert * num_scales + scale_row(tile, w_row, block_n, scale_rows) * across_k
        up_scale = w_scale + num_outputs // scale_rows * across_k
    else:
        w_scale += (expert * halves * num_outputs + tile * block_n) + w_row
        up_scale = w_scale + num_outputs
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        row = pair // shared
        x_place = row.to(tl.int64)[:, None] * num_inputs + columns
        total = no_sums(weight, block_n, block_m)
        up_total = no_sums(weight, block_n, block_m)
        if scale_rows > 0:
            by_w = tl.load(w_scale)
            by_up = tl.load(up_scale) if gated else by_w
        for start in tl.range(0, num_inputs, block_k, num_stages=stages):
            within = (columns < block_k) & (start + columns < num_inputs)
            w = load(weight + start + w_place, within, whole_k)
            x = tl.trans(load(source + start + x_place, within, whole_k))
            if gated:
                up = load(up_weight + start + w_place, within, whole_k)
            if scale_rows > 0:
                # The scales of W are loaded one tile ahead, those of x by the pipeline.
                ahead = tl.minimum(start + block_k, num_inputs - 1) // block_k
                by_x = tl.load(source_scale + start // block_k * scale_stride + row)[None, :]
                total += tl.dot(w, x) * (down(by_w) * by_x)
                by_w = tl.load(w_scale + ahead)
                if gated:
                    up_total += tl.dot(up, x) * (down(by_up) * by_x)
                    by_up = tl.load(up_scale + ahead)
            else:
                total = add_product(total, w, x, exact_k)
                if gated:
                    up_total = add_product(up_total, up, x, exact_k)
        if scale_rows == 0:
            by_x = tl.load(source_scale + row)[None, :]
            total = total.to(tl.float32) * (tl.load(w_scale)[:, None] * by_x)
            if gated:
                up_total = up_total.to(tl.float32) * (tl.load(up_scale)[:, None] * by_x)
        store_outputs(
            target, weights, total, up_total, pair, inside, output, num_outputs, gated,
            gelu=gelu, delta=delta, expert=expert,
        )  # fmt: skip
