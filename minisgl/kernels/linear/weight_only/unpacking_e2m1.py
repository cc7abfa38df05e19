"""Triton helpers that turn words of e2m1 numbers (linear/e2m1.py) and the scales of a chunk of them
into weights of the model's dtype, as unpacking.py does with those of INT4.

The bits of a number, where bfloat16 has the sign, the end of the exponent and the beginning of the
mantissa, are that number times 2 ** -126, also where it is subnormal. One product makes a weight of
it; its other factor has the scale, and would be too large without a power of two that is left for
the sums (`left_out`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def left_out(group: tl.constexpr, packed: tl.constexpr):
    """What the sums of products with `e2m1_planes` must be multiplied by."""
    if not packed:
        return 1.0
    elif group == 32:
        return 18446744073709551616.0  # 2 ** 64
    else:
        return 2.028240960365167e31  # 2 ** 104


@triton.jit
def e2m1_planes(words, scales, group: tl.constexpr, dtype: tl.constexpr, packed: tl.constexpr):
    """Four tensors like words, [rows, any] int16: those of the quarters of chunks, in `dtype`.

    scales: [rows, any] int32, each for as many words in a row as it takes. With a group of 32
    columns, two bfloat16 numbers (MXFP4); with one of 16, four bytes as from `pack_scales` (NVFP4).
    `packed`: for bfloat16 on a GPU, two words at a time, without the factor `left_out`.
    """
    if packed:
        first, last = _factors(scales, group)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, f0, f1, f2, f3, nought;
            .reg .b16 low, high;
            mov.b32 nought, 0x80008000;
            mov.b32 {low, high}, $5;
            mov.b32 f0, {low, low};
            mov.b32 f1, {high, high};
            mov.b32 {low, high}, $7;
            mov.b32 f2, {low, low};
            mov.b32 f3, {high, high};
            and.b32 $0, $4, 0x81c081c0;
            shf.r.wrap.b32 $1, $4, $4, 4;
            and.b32 $1, $1, 0x81c081c0;
            shf.r.wrap.b32 $2, $4, $4, 10;
            and.b32 $2, $2, 0x81c081c0;
            shf.r.wrap.b32 s, $4, $4, 6;
            shf.r.wrap.b32 $3, $4, $4, 14;
            and.b32 $3, $3, 0x80c080c0;
            lop3.b32 $3, s, 0x01000100, $3, 0xea;
            fma.rn.bf16x2 $0, $0, f0, nought;
            fma.rn.bf16x2 $1, $1, f1, nought;
            fma.rn.bf16x2 $2, $2, f2, nought;
            fma.rn.bf16x2 $3, $3, f3, nought;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, _spread(first, words), _spread(last, words)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
        both = low.to(tl.uint16, bitcast=True).to(tl.uint32)
        both |= high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return (
            _plane(both, 0, 0, _spread(_scale(scales, 0, group), words), dtype),
            _plane(both, 4, 4, _spread(_scale(scales, 1, group), words), dtype),
            _plane(both, 10, 10, _spread(_scale(scales, 2, group), words), dtype),
            _plane(both, 14, 6, _spread(_scale(scales, 3, group), words), dtype),
        )


@triton.jit
def _spread(scales, words):
    """One for each word."""
    rows: tl.constexpr = words.shape[0]
    of_each: tl.constexpr = words.shape[1] // scales.shape[1]
    spread = tl.broadcast_to(scales[:, :, None], (rows, scales.shape[1], of_each))
    return tl.reshape(spread, (rows, words.shape[1]))


@triton.jit
def _factors(scales, group: tl.constexpr):
    """What the numbers of the first two quarters and of the last two are multiplied by: two
    bfloat16 numbers in each int32. The multiplication takes either half at no cost."""
    if group == 32:  # times 2 ** 62
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, nought;
            mov.b32 nought, 0x80008000;
            mov.b32 t, 0x5e805e80;
            fma.rn.bf16x2 t, $2, t, nought;
            prmt.b32 $0, t, t, 0x1010;
            prmt.b32 $1, t, t, 0x3232;
            }""",
            "=&r,=&r,r",
            [scales],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:  # a byte moved to the exponent is the scale times 2 ** -105, and then times 2 ** 22
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 up, nought;
            mov.b32 nought, 0x80008000;
            mov.b32 up, 0x7f007f00;
            prmt.b32 $0, $2, nought, 0x4140;
            prmt.b32 $1, $2, nought, 0x4342;
            shl.b32 $0, $0, 4;
            shl.b32 $1, $1, 4;
            fma.rn.bf16x2 $0, $0, up, nought;
            fma.rn.bf16x2 $1, $1, up, nought;
            }""",
            "=&r,=&r,r",
            [scales],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _scale(scales, quarter: tl.constexpr, group: tl.constexpr):
    """float32."""
    if group == 32:
        half = (scales >> (16 * (quarter // 2))).to(tl.int16)
        return half.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        bits = ((scales >> (8 * quarter)) & 255) << 20
        return bits.to(tl.float32, bitcast=True) * 4.056481920730334e31  # 2 ** 105


@triton.jit
def _plane(both, turn: tl.constexpr, middle_turn: tl.constexpr, scale, dtype: tl.constexpr):
    """Two numbers of each 32 bits as in the instructions above, times the scale."""
    bits = (_turned(both, turn) & 0x80C080C0) | (_turned(both, middle_turn) & 0x01000100)
    pairs = tl.join(bits << 16, bits & 0xFFFF0000)
    pairs = tl.reshape(pairs, (bits.shape[0], 2 * bits.shape[1]))
    number = pairs.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    return (number * scale).to(dtype)


@triton.jit
def _turned(bits, places: tl.constexpr):
    """Rotated to the right."""
    if places == 0:
        return bits
    else:
        return (bits >> places) | (bits << (32 - places))
