"""The GEMMs of experts with INT4 weights.

They turn INT4 numbers less their zero points into numbers of x's dtype, which holds them exactly,
in registers; a group's scales multiply the float32 sum of its products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.moe.many_rows import Listed, PairGemm, store_outputs
from minisgl.kernels.moe.quantized_experts import Int4Experts
from minisgl.kernels.moe.reference import Chosen


def multiply_int4(experts: Int4Experts, choice: Chosen, pairs: Listed, gemm: PairGemm) -> None:
    weight = experts.gate_up if gemm.gated else experts.down
    _expert_product[gemm.grid(len(weight.data))](
        gemm.source,
        weight.data,
        weight.scale,
        weight.zero,
        gemm.target,
        *pairs,
        gemm.delta,
        shared=gemm.shared,
        places=gemm.tiles.places,
        gelu=gemm.gated and experts.gelu,
        group=weight.group_size,
        stages=gemm.tiles.num_stages,
        **gemm.numbers,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    source,
    words,
    scales,
    zeros,
    target,
    counts,
    lists,
    weights,
    num_rows,
    delta,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    shared: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs, for some of an expert's pairs, `shared` of which have one row of
    `source`. The outputs of the first product are activated if `gated`, those of the second
    weighted."""
    wait_for_previous(pdl)
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    tile = tl.program_id(0) % across
    output = tile * block_n + tl.arange(0, block_n)
    w_row = tl.arange(0, block_n)
    if num_outputs % block_n != 0:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, num_outputs - 1 - tile * block_n)
    all_outputs: tl.constexpr = 2 * num_outputs if gated else num_outputs
    first_row = expert.to(tl.int64) * all_outputs + tile * block_n
    word = tl.arange(0, block_k // 4)
    words += first_row * (num_inputs // 4)
    w_place = w_row[:, None] * (num_inputs // 4) + word[None, :]
    up_words = words + num_outputs * (num_inputs // 4)
    expert_scales = expert.to(tl.int64) * (num_inputs // group) * all_outputs + tile * block_n
    scale_at = expert_scales + w_row
    column = (word // 16 * 64 + word % 16)[:, None]  # of the lowest bits
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        x_at = source + (pair // shared).to(tl.int64)[None, :] * num_inputs + column
        total = tl.zeros([block_n, block_m], tl.float32)
        up_total = tl.zeros([block_n, block_m], tl.float32)
        for start in tl.range(0, num_inputs, block_k, num_stages=stages):
            x = (
                tl.load(x_at + start),
                tl.load(x_at + start + 16),
                tl.load(x_at + start + 32),
                tl.load(x_at + start + 48),
            )
            here = scale_at + start // group * all_outputs
            w = tl.load(words + start // 4 + w_place)
            total += _product(w, x, scales, zeros, here, all_outputs, block_k // group)
            if gated:
                w = tl.load(up_words + start // 4 + w_place)
                up_total += _product(
                    w, x, scales, zeros, here + num_outputs, all_outputs, block_k // group
                )
        store_outputs(
            target, weights, total, up_total, pair, inside, output, num_outputs, gated,
            gelu=gelu, delta=delta, expert=expert,
        )  # fmt: skip


@triton.jit
def _product(words, x, scales, zeros, at, stride, groups: tl.constexpr):
    """A tile of W times x, in float32. words: [n, any] int16 as from pack_int4; x: what its lowest
    to highest four bits multiply, each [any, m]; scales + at: those of the rows of W, with `stride`
    before the next group's."""
    total = tl.zeros([words.shape[0], x[0].shape[1]], tl.float32)
    for i in tl.static_range(groups):
        zero = tl.full([words.shape[0]], 8, tl.int32)
        if zeros is not None:
            zero = tl.load(zeros + at + i * stride).to(tl.int32)
        part = tl.zeros([words.shape[0], x[0].shape[1]], tl.float32)
        for j in tl.static_range(i * (4 // groups), (i + 1) * (4 // groups)):
            w = _numbers(words, zero[:, None], 4 * j, x[0].dtype)
            part = tl.dot(w, x[j], part, input_precision="ieee")
        total += part * tl.load(scales + at + i * stride).to(tl.float32)[:, None]
    return total


@triton.jit
def _numbers(words, zero, shift: tl.constexpr, dtype: tl.constexpr):
    """Four bits of each word less a zero point, in `dtype`.

    In the lowest bits of the mantissa of a power of two, with as many bits, an integer adds itself:
    128 in bfloat16 has 7 of them, 1024 in float16 has 10.
    """
    bits = (words >> shift) & 15
    if dtype == tl.bfloat16:
        return (bits | 0x4300).to(dtype, bitcast=True) - (zero + 128).to(dtype)
    elif dtype == tl.float16:
        return (bits | 0x6400).to(dtype, bitcast=True) - (zero + 1024).to(dtype)
    else:
        return (bits - zero).to(dtype)
