"""A mixture of experts with MXFP4 weights.

Many rows are computed as in fused_experts.py. Of few rows each GEMM has a program for each pair and
some outputs, which finds the pair's expert in the router's logits itself, unless it is given; a
last launch adds up the pairs of a row.

The GEMMs turn four bits and the power of two of their block into a number of x's dtype, in
registers: in bfloat16 that is exact, and so the scales cost nothing where sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.linear.weight_only.unpacking import half_of, joined_planes
from minisgl.kernels.moe.expert_tiles import choose_mxfp4_tiles
from minisgl.kernels.moe.many_rows import add_outputs, finished, list_pairs, store_outputs
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.reference import ByRouter, Choice, Chosen, Clamped, rows_held
from minisgl.kernels.moe.routing import (
    choose,
    clamp_options,
    expert_places,
    place_for_sum,
    weights_of,
)
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import ExpertTiles, ManyTiles, PairTiles, tuning_of


def fused_experts(
    x: Tensor,
    choice: Choice,
    experts: Mxfp4Experts,
    residual: Tensor | None = None,
    *,
    tiles: PairTiles | ManyTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As fused_experts of moe/fused_experts.py, for MXFP4 weights."""
    tensors = (x, *experts.weights.values(), *(() if residual is None else (residual,)))
    assert all(tensor.is_contiguous() for tensor in tensors)
    if len(x) == 0:
        return place_for_sum(x, residual, 1)
    if tiles is None:
        num_rows = rows_held(len(x), choice, len(experts.down.data))
        tiles = choose_mxfp4_tiles(num_rows, experts, choice.top_k, x.dtype, tuning_of(x.device))
    num_pairs = len(x) * choice.top_k
    inner = x.new_empty((num_pairs, experts.down.data.shape[2] * 4))
    outputs = x.new_empty((num_pairs, x.shape[1]))
    if isinstance(tiles, PairTiles):
        multiply = _of_each_pair(choice, len(experts.down.data), pdl=pdl)
    else:
        multiply = _of_listed_pairs(choice, len(experts.down.data), pdl=pdl)
    up_bias, down_bias = experts.biases or (None, None)
    multiply(_Gemm(x, experts.gate_up, up_bias, inner, experts.clamped), tiles.inner)
    multiply(_Gemm(inner, experts.down, down_bias, outputs), tiles.outer)
    return add_outputs(outputs, x, residual, choice, pdl=pdl)


class _Gemm(NamedTuple):
    """One of both products of the experts: the first, or the second and a weighting."""

    source: Tensor
    matrices: Mxfp4Weights
    bias: Tensor | None
    target: Tensor
    clamped: Clamped | None = None

    def numbers(self, tiles: ExpertTiles) -> dict[str, Any]:
        """The arguments of both kernels by their names."""
        num_pairs, num_outputs = self.target.shape
        return {
            "num_outputs": num_outputs,
            "num_inputs": self.source.shape[1],
            "shared": num_pairs // len(self.source),
            "gated": self.matrices.data.shape[1] != num_outputs,
            "block_n": tiles.block_n,
            "block_m": tiles.block_m,
            "block_k": CHUNK,
            "stages": tiles.num_stages,
            "packed": self.source.is_cuda and self.source.dtype == torch.bfloat16,
            "num_warps": tiles.num_warps,
            **clamp_options(self.clamped),
        }


Multiply = Callable[[_Gemm, ExpertTiles], None]


def _of_each_pair(choice: Choice, num_experts: int, *, pdl: bool) -> Multiply:
    assert all(part.is_contiguous() for part in choice if isinstance(part, Tensor))
    if isinstance(choice, ByRouter) and choice.scales is not None:
        choice = choose(choice, pdl=pdl)
    logits, normalize, chosen, weights = None, False, None, None
    if isinstance(choice, ByRouter):
        logits, normalize = choice.logits, choice.routing.normalize
    else:
        chosen, weights, _ = choice
    drops = choice.dropped is not None if isinstance(choice, Chosen) else False

    def multiply(gemm: _Gemm, tiles: ExpertTiles) -> None:
        num_pairs, num_outputs = gemm.target.shape
        _pair_product[(triton.cdiv(num_outputs, tiles.block_n), num_pairs)](
            gemm.source,
            gemm.matrices.data,
            gemm.matrices.scale,
            gemm.bias,
            gemm.target,
            logits,
            chosen,
            weights,
            num_experts=num_experts,
            top_k=choice.top_k,
            normalize=normalize,
            experts_block=triton.next_power_of_2(num_experts),
            drops=drops,
            **gemm.numbers(tiles),
            **pdl_options(gemm.target.device, pdl),
        )

    return multiply


def _of_listed_pairs(choice: Choice, num_experts: int, *, pdl: bool) -> Multiply:
    chosen, weights, _ = choose(choice, pdl=pdl)
    counts, lists = list_pairs(chosen, num_experts, pdl=pdl)

    def multiply(gemm: _Gemm, tiles: ExpertTiles) -> None:
        across = triton.cdiv(gemm.target.shape[1], tiles.block_n) * tiles.places
        _expert_product[(across, num_experts)](
            gemm.source,
            gemm.matrices.data,
            gemm.matrices.scale,
            gemm.bias,
            gemm.target,
            counts,
            lists,
            weights,
            len(chosen),
            places=tiles.places,
            **gemm.numbers(tiles),
            **pdl_options(gemm.target.device, pdl),
        )

    return multiply


class WeightOnlyExperts(Mxfp4Experts):
    """Experts whose MXFP4 weights a kernel dequantises in registers."""

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        return fused_experts(x, choice, self)[0]

    def add_to(self, x: Tensor, choice: Choice, rows: Tensor) -> Residual:
        rows, squares = fused_experts(x, choice, self, rows)
        return Residual(rows, squares=squares)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    source,
    words,
    scales,
    bias,
    target,
    counts,
    lists,
    weights,
    num_rows,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    shared: tl.constexpr,
    places: tl.constexpr,
    gated: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
):
    """As that of moe/many_rows.py. shared: pairs of a row of `source`."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    across: tl.constexpr = (num_outputs + block_n - 1) // block_n
    place, expert = tl.program_id(0) // across, tl.program_id(1)
    tile = tl.program_id(0) % across
    output = tile * block_n + tl.arange(0, block_n)
    if bias is not None:
        bias += expert * (2 * num_outputs if gated else num_outputs)
    count = tl.load(counts + expert)
    lists += expert.to(tl.int64) * num_rows
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        total, up_total = _multiply(
            words, scales, source, expert, tile, pair // shared, num_outputs, num_inputs, gated,
            block_n, block_m, block_k, stages, packed,
        )  # fmt: skip
        store_outputs(
            target, weights, total, up_total, pair, inside, output, num_outputs, gated,
            bias, limit, alpha,
        )  # fmt: skip


@triton.jit
def _pair_product(
    source,
    words,
    scales,
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
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
):
    """One block of outputs of one pair, by a product whose rows of x are all that of the pair.
    drops: as in moe/few_rows.py."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, pair = tl.program_id(0), tl.program_id(1)
    output = tile * block_n + tl.arange(0, block_n)
    pair_weight = 0.0
    kind: tl.constexpr = target.dtype.element_ty
    if chosen is not None:
        expert = tl.load(chosen + pair)
        if drops:  # noqa: SIM102 - the compiler decides this one, the device the next
            if expert < 0:
                return
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
    if bias is not None:
        bias += expert * (2 * num_outputs if gated else num_outputs)
    row = pair // shared + tl.zeros([block_m], tl.int32)
    total, up_total = _multiply(
        words, scales, source, expert, tile, row, num_outputs, num_inputs, gated,
        block_n, block_m, block_k, stages, packed,
    )  # fmt: skip
    result = finished(
        total, up_total, pair_weight, output, num_outputs, gated, bias, limit, alpha, False, kind
    )
    target_at = target + pair.to(tl.int64) * num_outputs + output[:, None]
    first = tl.arange(0, block_m)[None, :] == 0
    mask = (output < num_outputs)[:, None] & first
    tl.store(target_at + tl.zeros([1, block_m], tl.int32), result, mask=mask)


@triton.jit
def _multiply(
    words,
    scales,
    source,
    expert,
    tile,
    row,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    gated: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
):
    """Rows of one expert's W, a tile of them, times rows `row` of `source`.

    Returns [block_n, block_m] float32, and the same of W's second half, or zeros if not gated. A
    step in k is a chunk of W's words, whose scales are two.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    w_row = tl.arange(0, block_n)
    if num_outputs % block_n != 0:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, num_outputs - 1 - tile * block_n)
    all_outputs: tl.constexpr = 2 * num_outputs if gated else num_outputs
    words += (expert.to(tl.int64) * all_outputs + tile * block_n) * (num_inputs // 4)
    w_place = w_row[:, None] * (num_inputs // 4) + tl.arange(0, block_k // 4)[None, :]
    up_words = words + num_outputs * (num_inputs // 4)
    scales += expert.to(tl.int64) * (num_inputs // block_k * all_outputs) + tile * block_n
    x_at = source + row.to(tl.int64)[:, None] * num_inputs + tl.arange(0, block_k)[None, :]
    total = tl.zeros([block_n, block_m], tl.float32)
    up_total = tl.zeros([block_n, block_m], tl.float32)
    for start in tl.range(0, num_inputs, block_k, num_stages=stages):
        x = tl.trans(tl.load(x_at + start))
        here = scales + start // block_k * all_outputs + w_row
        w = _numbers(tl.load(words + start // 4 + w_place), tl.load(here), dtype, packed)
        total = tl.dot(w, x, total, input_precision="ieee")
        if gated:
            found = tl.load(up_words + start // 4 + w_place)
            w = _numbers(found, tl.load(here + num_outputs), dtype, packed)
            up_total = tl.dot(w, x, up_total, input_precision="ieee")
    if packed:
        total *= 18446744073709551616.0  # 2 ** 64: see _numbers
        up_total *= 18446744073709551616.0
    return total, up_total


@triton.jit
def _numbers(words, scales, dtype: tl.constexpr, packed: tl.constexpr):
    """A tile of W in `dtype`, [rows, 64], from words [rows, 16] and both scales of a row.

    Where these are `packed`, the tile is times 2 ** -64. The bits of a number, moved to the end of
    the exponent and the beginning of the mantissa of a bfloat16 number, are that number times
    2 ** -126, also where it is subnormal; that factor and the scale are one, which without 2 ** -64
    would be too large.
    """
    scale = half_of(scales, 0, tl.bfloat16)[:, None]
    next_scale = half_of(scales, 1, tl.bfloat16)[:, None]
    if packed:
        up: tl.constexpr = 4.611686018427388e18  # 2 ** 62
        scale = (scale.to(tl.float32) * up).to(tl.bfloat16)
        next_scale = (next_scale.to(tl.float32) * up).to(tl.bfloat16)
        planes = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, nought;
            mov.b32 nought, 0x80008000;
            shl.b32 s, $4, 12;
            shl.b32 $0, $4, 6;
            and.b32 $0, $0, 0x01c001c0;
            lop3.b32 $0, s, 0x80008000, $0, 0xea;
            shl.b32 s, $4, 8;
            shl.b32 $1, $4, 2;
            and.b32 $1, $1, 0x01c001c0;
            lop3.b32 $1, s, 0x80008000, $1, 0xea;
            shl.b32 s, $4, 4;
            shr.u32 $2, $4, 2;
            and.b32 $2, $2, 0x01c001c0;
            lop3.b32 $2, s, 0x80008000, $2, 0xea;
            shr.u32 $3, $4, 6;
            and.b32 $3, $3, 0x01c001c0;
            lop3.b32 $3, $4, 0x80008000, $3, 0xea;
            fma.rn.bf16x2 $0, $0, $5, nought;
            fma.rn.bf16x2 $1, $1, $5, nought;
            fma.rn.bf16x2 $2, $2, $6, nought;
            fma.rn.bf16x2 $3, $3, $6, nought;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scale, next_scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        planes = (
            _number(words, scale, dtype),
            _number(words >> 4, scale, dtype),
            _number(words >> 8, next_scale, dtype),
            _number(words >> 12, next_scale, dtype),
        )
    return joined_planes(planes, 4)


@triton.jit
def _number(words, scale, dtype: tl.constexpr):
    """The number in the lowest four bits of each word, times the scale."""
    bits = words.to(tl.int32)
    bits = (bits & 8) << 28 | (bits & 7) << 22
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale.to(tl.float32)).to(
        dtype
    )  # 2 ** 126
