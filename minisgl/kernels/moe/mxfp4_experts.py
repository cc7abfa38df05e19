"""The GEMMs of experts with MXFP4 and NVFP4 weights: of listed pairs, or with a program for each
pair and a part of its outputs, which finds the pair's expert in the router's logits, unless it is
given.

They turn four bits and the scale of their block into a number of x's dtype, in registers: in
bfloat16 that is exact, and so the scales cost nothing where sums are added up. The factors of
NVFP4's rows multiply the sums once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import from_here, wait_for_previous
from minisgl.kernels.linear import nvfp4
from minisgl.kernels.linear.gemm_parts import fetch
from minisgl.kernels.linear.nvfp4 import Nvfp4Weights
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.linear.weight_only.unpacking import joined_planes
from minisgl.kernels.linear.weight_only.unpacking_e2m1 import e2m1_planes, left_out
from minisgl.kernels.moe import mxfp4
from minisgl.kernels.moe.many_rows import Listed, PairGemm, finished, store_outputs
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts
from minisgl.kernels.moe.quantized_experts import Nvfp4Experts
from minisgl.kernels.moe.reference import ByRouter, Chosen
from minisgl.kernels.moe.routing import clamp_options, expert_places, weights_of

# Up to so many rows of x in a tile, each warp multiplies another chunk of k.
FEW_MEMBERS = 16
# From so many on, an expert's pairs that fill no more than half of a tile take one of half the size
# in the first product: what is multiplied beyond them costs as much as they do. The second product
# would have so many registers that fewer of its programs run at once.
HALVED_MEMBERS = 64

Experts = Mxfp4Experts | Nvfp4Experts


def multiply_e2m1(experts: Experts, choice: Chosen, pairs: Listed, gemm: PairGemm) -> None:
    _expert_product[gemm.grid(len(experts.down.data))](
        gemm.source,
        *_matrices(experts, gemm),
        gemm.target,
        *pairs,
        gemm.delta,
        places=gemm.tiles.places,
        halves=gemm.gated and gemm.tiles.block_m >= HALVED_MEMBERS,
        **_numbers_of(experts, gemm),
    )


def multiply_pairs(experts: Experts, choice: ByRouter | Chosen, gemm: PairGemm) -> None:
    num_experts, (num_pairs, num_outputs) = len(experts.down.data), gemm.target.shape
    logits, normalize, chosen, weights, drops = None, False, None, None, False
    if isinstance(choice, ByRouter):
        logits, normalize = choice.logits, choice.routing.normalize
    else:
        chosen, weights, _ = choice
        drops = choice.dropped is not None
    _pair_product[(triton.cdiv(num_outputs, gemm.tiles.block_n), num_pairs)](
        gemm.source,
        *_matrices(experts, gemm),
        gemm.target,
        logits,
        chosen,
        weights,
        num_experts=num_experts,
        top_k=choice.top_k,
        normalize=normalize,
        experts_block=triton.next_power_of_2(num_experts),
        drops=drops,
        **_numbers_of(experts, gemm),
    )


def _matrices(experts: Experts, gemm: PairGemm) -> tuple[Tensor | None, ...]:
    """Numbers, scales, factors and biases of one of both products."""
    weight = experts.gate_up if gemm.gated else experts.down
    factor = weight.factor if isinstance(weight, Nvfp4Weights) else None
    up, down = experts.biases or (None, None)
    return weight.data, weight.scale, factor, up if gemm.gated else down


def _numbers_of(experts: Experts, gemm: PairGemm) -> dict[str, Any]:
    """The arguments of both kernels by their names."""
    tiles = gemm.tiles
    lanes = tiles.num_warps if tiles.block_m <= FEW_MEMBERS else 1
    assert tiles.block_k % (CHUNK * lanes) == 0
    return gemm.numbers | {
        "shared": gemm.shared,
        "lanes": lanes,
        "stages": tiles.num_stages,
        "on_gpu": gemm.source.is_cuda,
        "group": mxfp4.BLOCK if isinstance(experts, Mxfp4Experts) else nvfp4.BLOCK,
        "gelu": gemm.gated and experts.gelu,
        **clamp_options(experts.clamped if gemm.gated else None),
    }


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    source,
    words,
    scales,
    factors,
    bias,
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
    halves: tl.constexpr,
    gated: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
    on_gpu: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs, for some of an expert's pairs, `shared` of which have one row of
    `source`. The outputs of the first product are activated if `gated`, those of the second
    weighted. halves: whether few pairs take half of block_m."""
    wait_for_previous(pdl)
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    tile = tl.program_id(0) % across
    if bias is not None:
        bias += expert * (2 * num_outputs if gated else num_outputs)
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    for first in range(place * block_m, count, places * block_m):
        if halves and count - first <= block_m // 2:
            _compute_pairs(
                source, words, scales, factors, bias, target, lists, weights, delta,
                expert, tile, first, count, num_outputs, num_inputs, shared, gated, limit, alpha,
                gelu, group, block_n, block_m // 2, block_k, lanes, stages, on_gpu,
            )  # fmt: skip
        else:
            _compute_pairs(
                source, words, scales, factors, bias, target, lists, weights, delta,
                expert, tile, first, count, num_outputs, num_inputs, shared, gated, limit, alpha,
                gelu, group, block_n, block_m, block_k, lanes, stages, on_gpu,
            )  # fmt: skip


@triton.jit
def _compute_pairs(
    source,
    words,
    scales,
    factors,
    bias,
    target,
    members,
    weights,
    delta,
    expert,
    tile,
    first,
    count,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    shared: tl.constexpr,
    gated: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
    on_gpu: tl.constexpr,
):
    """A tile of outputs of block_m of an expert's `count` pairs, from `first` on."""
    member = first + tl.arange(0, block_m)
    inside = member < count
    pair = tl.load(members + member, mask=inside, other=0)
    total, up_total = _multiply(
        words, scales, factors, source, expert, tile, pair // shared, inside, num_outputs,
        num_inputs, gated, group, block_n, block_m, block_k, lanes, stages, on_gpu,
    )  # fmt: skip
    store_outputs(
        target, weights, total, up_total, pair, inside, tile * block_n + tl.arange(0, block_n),
        num_outputs, gated, bias, limit, alpha, gelu, delta=delta, expert=expert,
    )  # fmt: skip


@triton.jit
def _pair_product(
    source,
    words,
    scales,
    factors,
    bias,
    target,
    logits,
    chosen,
    weights,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    normalize: tl.constexpr,
    experts_block: tl.constexpr,
    drops: tl.constexpr,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    shared: tl.constexpr,
    gated: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    gelu: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
    on_gpu: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs of one pair, by a product of which one row of x is that of the pair.
    drops: whether other ranks have some of the experts."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    if gated:  # the second product comes after the first, which has waited for the router
        wait_for_previous(pdl)
    output = tile * block_n + tl.arange(0, block_n)
    pair_weight = 0.0
    kind: tl.constexpr = target.dtype.element_ty
    if chosen is not None:
        expert = tl.load(chosen + pair)
        if not gated:
            pair_weight = tl.load(weights + pair).to(tl.float32)
    else:
        at = logits + pair // top_k * num_experts
        probability, order = expert_places(at, num_experts, experts_block)
        is_mine = order == pair % top_k
        expert = tl.sum(tl.where(is_mine, tl.arange(0, experts_block), 0))
        if not gated:
            share = weights_of(probability, order, None, num_experts, top_k, normalize)
            pair_weight = tl.sum(tl.where(is_mine, share, 0.0)).to(kind).to(tl.float32)
    if not gated:
        if pdl and num_outputs % block_n == 0:
            first = tl.maximum(expert, 0).to(tl.int64) * num_outputs + tile * block_n
            size: tl.constexpr = 4 * num_inputs  # words of GROUP rows
            fetch(words + first * (num_inputs // 4), size, size, size, block_n // 16, block_n)
        wait_for_previous(pdl)
    if drops:  # noqa: SIM102 - the compiler decides this one, the device the next
        if expert < 0:
            return
    if bias is not None:
        bias += expert * (2 * num_outputs if gated else num_outputs)
    row = pair // shared + tl.zeros([block_m], tl.int32)
    total, up_total = _multiply(
        words, scales, factors, source, expert, tile, row, tl.arange(0, block_m) == 0,
        num_outputs, num_inputs, gated, group, block_n, block_m, block_k, lanes, stages, on_gpu,
    )  # fmt: skip
    result = finished(
        total, up_total, pair_weight, output, num_outputs, gated, bias, limit, alpha, gelu, kind
    )
    target_at = target + pair.to(tl.int64) * num_outputs + output[:, None]
    first_row = tl.arange(0, block_m)[None, :] == 0
    mask = (output < num_outputs)[:, None] & first_row
    tl.store(target_at + tl.zeros([1, block_m], tl.int32), result, mask=mask)


@triton.jit
def _multiply(
    words,
    scales,
    factors,
    source,
    expert,
    tile,
    row,
    real,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    gated: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
    on_gpu: tl.constexpr,
):
    """Rows of one expert's W, a tile of them, times rows `row` of `source` where these are `real`.

    Returns [block_n, block_m] float32, and the same of W's second half, or zeros if not gated.
    `lanes` chunks of k are multiplied side by side, block_k columns in a step of the loop.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    packed: tl.constexpr = on_gpu & (dtype == tl.bfloat16)
    all_outputs: tl.constexpr = 2 * num_outputs if gated else num_outputs
    row_words: tl.constexpr = num_inputs // 4
    w_row, tile_row = tl.arange(0, block_n), tl.arange(0, block_n // 16)
    if num_outputs % block_n != 0:  # rows past the end repeat the last ones; they are not written
        w_row = tl.minimum(w_row, num_outputs - 1 - tile * block_n)
        tile_row = tl.minimum(tile_row, num_outputs // 16 - 1 - tile * (block_n // 16))
    first_row = expert.to(tl.int64) * all_outputs + tile * block_n
    lane = tl.arange(0, lanes)
    word = (tl.arange(0, 32) * 8)[:, None] + tl.arange(0, 8)[None, :]
    tiles = lane[:, None] * 256 + tile_row[None, :] * (16 * row_words)
    words += first_row * row_words
    w_at = words + tiles[:, :, None, None] + word[None, None, :, :]
    scales += expert.to(tl.int64) * (num_inputs // 64 * all_outputs) + tile * block_n
    scale_at = scales + lane[:, None] * all_outputs + w_row[None, :]
    factor, up_factor = w_row, w_row  # placeholders unless they are used
    if factors is not None:
        factor_at = factors + expert.to(tl.int64) * all_outputs + tile * block_n + w_row
        factor = tl.load(factor_at)
        if gated:
            up_factor = tl.load(factor_at + num_outputs)
    # A tile of x that all warps multiply by lies in shared memory as their instruction takes it.
    whole: tl.constexpr = lanes == 1 and block_n >= 64
    if whole:
        x_at = source + row.to(tl.int64)[:, None] * num_inputs + tl.arange(0, 64)[None, :]
        total = tl.zeros([block_n, block_m], tl.float32)
    else:
        column = lane[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
        x_at = source + row.to(tl.int64)[None, :, None] * num_inputs + column
        total = tl.zeros([lanes, block_n, block_m], tl.float32)
    up_total = tl.zeros_like(total)
    for begin in tl.range(0, num_inputs, block_k, num_stages=stages):
        for start in tl.static_range(0, block_k, 64 * lanes):
            chunk = begin // 64 + start // 64
            there = lane < num_inputs // 64 - chunk
            if whole:
                x_there = real[:, None] & (chunk < num_inputs // 64)
                x = tl.trans(tl.load(x_at + chunk * 64, mask=x_there, other=0.0))
            else:
                x_there = there[:, None, None] & real[None, :, None]
                x = tl.permute(tl.load(x_at + chunk * 64, mask=x_there, other=0.0), (0, 2, 1))
            at = scale_at + chunk * all_outputs
            w = _tile(w_at + chunk * 256, at, there, group, dtype, packed)
            total = _added(w, x, total)
            if gated:
                up_at = w_at + num_outputs * row_words + chunk * 256
                w = _tile(up_at, at + num_outputs, there, group, dtype, packed)
                up_total = _added(w, x, up_total)
        # The sums end here. A product that still ran in the next step would read registers of W
        # that this step has already filled with other numbers: the compiler reuses them too early.
        if whole:
            total = from_here(total, on_gpu)
            if gated:
                up_total = from_here(up_total, on_gpu)
    if not whole:
        total, up_total = tl.sum(total, 0), tl.sum(up_total, 0)
    if packed:
        total *= left_out(group, packed)
        up_total *= left_out(group, packed)
    if factors is not None:
        total *= factor[:, None]
        if gated:
            up_total *= up_factor[:, None]
    return total, up_total


@triton.jit
def _tile(words, scales, there, group: tl.constexpr, dtype: tl.constexpr, packed: tl.constexpr):
    """A chunk of k for each lane that is `there`, of a tile of W: [lanes, rows, 64] in `dtype`.

    words: pointers [lanes, rows / 16, 32, 8], to the words of a warp's threads (see `tiled` in
    linear/e2m1.py); scales: pointers [lanes, rows]."""
    lanes: tl.constexpr = words.shape[0]
    rows: tl.constexpr = scales.shape[1]
    found = tl.load(words, mask=there[:, None, None, None], other=0)
    found = tl.reshape(found, (lanes, rows // 16, 8, 4, 2, 4))
    found = tl.reshape(tl.permute(found, (0, 1, 4, 2, 3, 5)), (lanes * rows, 16))
    scale = tl.load(scales, mask=there[:, None], other=0)
    scale = tl.reshape(scale, (lanes * rows,))[:, None]
    w = joined_planes(e2m1_planes(found, scale, group, dtype, packed), 4)
    return tl.reshape(w, (lanes, rows, 64))


@triton.jit
def _added(w, x, total):
    """total + w x, of each lane; or of the only one, where x has no dimension of lanes."""
    if len(x.shape) == 2:
        w = tl.reshape(w, (w.shape[1], w.shape[2]))
    return tl.dot(w, x, total, input_precision="ieee")
