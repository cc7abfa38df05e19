"""Triton helpers that turn words of quantised weights into weights of the model's dtype.

W is held in int16 words: of INT4 in the order of `pack_int4`, of e4m3 two neighbours each. A tile
of words has 16 / bits *planes* of the same shape, each a part of the columns of k. Two neighbouring
words are a 32-bit register, out of which bit operations take a pair of weights for each plane, and
this is an operand of the tensor cores as it stands: no weight has to change its thread, and joining
the planes to a tile of W costs nothing. So a span of k is one product, which the compiler
interleaves with the work of dequantising and leaves running while the next one begins.

Both the scale and the product q · scale are rounded to the model's dtype, whatever kernel computes
them: see weights.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.linear.weight_only.unpacking_e2m1 import e2m1_planes


@triton.jit
def half_of(word, half: tl.constexpr, dtype: tl.constexpr):
    """The lower (0) or the upper (1) half of int32 words, which are numbers of `dtype`."""
    return (word >> (16 * half)).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def int4_planes(
    words,
    scale,
    offset,
    next_scale,
    next_offset,
    dtype: tl.constexpr,
    packed: tl.constexpr,
    centred: tl.constexpr,
):
    """Four tensors like words, [rows, any] int16: (q - zero) · scale in `dtype`, if centred times
    2 ** -16.

    scale and offset [rows, 1] in `dtype` are those of the first two planes, the others of the last
    two; an offset is -(bias + zero), or if centred -8 · scale: see weights.py. `packed`: for half
    precision on a GPU, two words at a time.
    """
    if centred:
        return _centred_int4_planes(words, scale, offset, next_scale, next_offset, packed)
    elif packed:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t1, t2, t3, one, nought;
                mov.b32 one, 0x3f803f80;
                mov.b32 nought, 0x80008000;
                shr.u32 t1, $4, 4;
                shr.u32 t2, $4, 8;
                shr.u32 t3, $4, 12;
                lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 $1, t1, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 $2, t2, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 $3, t3, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $0, $0, one, $6;
                fma.rn.bf16x2 $1, $1, one, $6;
                fma.rn.bf16x2 $2, $2, one, $8;
                fma.rn.bf16x2 $3, $3, one, $8;
                fma.rn.bf16x2 $0, $0, $5, nought;
                fma.rn.bf16x2 $1, $1, $5, nought;
                fma.rn.bf16x2 $2, $2, $7, nought;
                fma.rn.bf16x2 $3, $3, $7, nought;
                }""",
                "=&r,=&r,=&r,=&r,r,r,r,r,r",
                [words, scale, offset, next_scale, next_offset],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t1, t2, t3;
                shr.u32 t1, $4, 4;
                shr.u32 t2, $4, 8;
                shr.u32 t3, $4, 12;
                lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 $1, t1, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 $2, t2, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 $3, t3, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $0, $0, $6;
                add.rn.f16x2 $1, $1, $6;
                add.rn.f16x2 $2, $2, $8;
                add.rn.f16x2 $3, $3, $8;
                mul.rn.f16x2 $0, $0, $5;
                mul.rn.f16x2 $1, $1, $5;
                mul.rn.f16x2 $2, $2, $7;
                mul.rn.f16x2 $3, $3, $7;
                }""",
                "=&r,=&r,=&r,=&r,r,r,r,r,r",
                [words, scale, offset, next_scale, next_offset],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        return (
            _scaled_int4(words & 15, scale, offset, dtype),
            _scaled_int4(words >> 4 & 15, scale, offset, dtype),
            _scaled_int4(words >> 8 & 15, next_scale, next_offset, dtype),
            _scaled_int4(words >> 12 & 15, next_scale, next_offset, dtype),
        )


@triton.jit
def _centred_int4_planes(
    words,
    scale,
    offset,
    next_scale,
    next_offset,
    packed: tl.constexpr,
):
    """In bfloat16 the bits of q are the number q · 2 ** -133, and 8 · scale is exact: one operation
    does it all, and rounds once."""
    if packed:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t1, t2, t3;
            shr.u32 t1, $4, 4;
            shr.u32 t2, $4, 8;
            shr.u32 t3, $4, 12;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, t1, 0x000f000f;
            and.b32 $2, t2, 0x000f000f;
            and.b32 $3, t3, 0x000f000f;
            fma.rn.bf16x2 $0, $0, $5, $6;
            fma.rn.bf16x2 $1, $1, $5, $6;
            fma.rn.bf16x2 $2, $2, $7, $8;
            fma.rn.bf16x2 $3, $3, $7, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, scale, offset, next_scale, next_offset],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _centred_int4(words & 15, offset),
            _centred_int4(words >> 4 & 15, offset),
            _centred_int4(words >> 8 & 15, next_offset),
            _centred_int4(words >> 12 & 15, next_offset),
        )


@triton.jit
def _centred_int4(q, offset):
    return ((q.to(tl.float32) - 8) * (offset.to(tl.float32) * -0.125)).to(tl.bfloat16)


@triton.jit
def _scaled_int4(q, scale, offset, dtype: tl.constexpr):
    biased = q.to(tl.float32) + int4_bias(dtype)
    return ((biased + offset.to(tl.float32)) * scale.to(tl.float32)).to(dtype)


@triton.jit
def int4_bias(dtype: tl.constexpr):
    """The power of two whose mantissa ends in the bits of an integer: with q there, it is bias + q.
    bfloat16 has 7 bits of it, float16 10."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def e4m3_planes(words, scale, dtype: tl.constexpr, packed: tl.constexpr):
    """Two tensors e4m3 · scale in `dtype`, like words: [rows, any] int16; the first has the even
    columns of k. Without NaN: its bits count as 480. See int4_planes.

    Bits alone make a number with e4m3's exponent in the place of dtype's, whose bias is larger by
    120, in float16 by 8. A factor puts this right, of subnormal numbers, too; in float16 it is in
    the scale.
    """
    if packed:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t0, t1, s, shift, nought;
                mov.b32 shift, 0x7b807b80;
                mov.b32 nought, 0x80008000;
                shl.b32 t0, $2, 4;
                shr.u32 t1, $2, 4;
                shl.b32 s, $2, 8;
                and.b32 t0, t0, 0x07f007f0;
                and.b32 t1, t1, 0x07f007f0;
                lop3.b32 $0, s, 0x80008000, t0, 0xea;
                lop3.b32 $1, $2, 0x80008000, t1, 0xea;
                fma.rn.bf16x2 $0, $0, shift, nought;
                fma.rn.bf16x2 $1, $1, shift, nought;
                fma.rn.bf16x2 $0, $0, $3, nought;
                fma.rn.bf16x2 $1, $1, $3, nought;
                }""",
                "=&r,=&r,r,r",
                [words, scale],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t0, t1, s;
                shl.b32 t0, $2, 7;
                shr.u32 t1, $2, 1;
                shl.b32 s, $2, 8;
                and.b32 t0, t0, 0x3f803f80;
                and.b32 t1, t1, 0x3f803f80;
                lop3.b32 $0, s, 0x80008000, t0, 0xea;
                lop3.b32 $1, $2, 0x80008000, t1, 0xea;
                mul.rn.f16x2 $0, $0, $3;
                mul.rn.f16x2 $1, $1, $3;
                }""",
                "=&r,=&r,r,r",
                [words, scale],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        scale = scale.to(tl.float32)
        if dtype == tl.float16:
            scale = scale / 256
        low, high = _e4m3(words), _e4m3(words >> 8)
        return (low * scale).to(dtype), (high * scale).to(dtype)


@triton.jit
def _e4m3(word):
    """float32, from the bits in the lower byte of integers."""
    byte = word.to(tl.int32)
    bits = (byte & 128) << 24 | (byte & 127) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def planes_of(
    words,
    scales,
    at,
    stride,
    span: tl.constexpr,
    group: tl.constexpr,
    bits: tl.constexpr,
    dtype: tl.constexpr,
    packed: tl.constexpr,
    centred: tl.constexpr,
    e2m1: tl.constexpr,
):
    """The planes of the words [rows, any] of a span that starts at column `at` of k. scales: [rows]
    addresses of those of the first group, `stride` before the next ones."""
    place = scales + at // group * stride
    if e2m1:
        chunk = tl.arange(0, span // group)[None, :]
        return e2m1_planes(words, tl.load(place[:, None] + chunk * stride), 16, dtype, packed)
    found = tl.load(place)
    scale = half_of(found, 0, dtype)[:, None]
    if bits == 8:
        return e4m3_planes(words, scale, dtype, packed)
    else:
        offset = half_of(found, 1, dtype)[:, None]
        next_scale, next_offset = scale, offset
        if group < span:  # two groups in a span
            found = tl.load(place + stride)
            next_scale = half_of(found, 0, dtype)[:, None]
            next_offset = half_of(found, 1, dtype)[:, None]
        return int4_planes(words, scale, offset, next_scale, next_offset, dtype, packed, centred)


@triton.jit
def joined_planes(planes, bits: tl.constexpr):
    """A tile of W [rows, span] from its planes."""
    n: tl.constexpr = planes[0].shape[0]
    words: tl.constexpr = planes[0].shape[1]
    if bits == 4:
        w = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        w = tl.reshape(w, (n, words // 16, 16, 2, 2))
        w = tl.permute(w, (0, 1, 4, 3, 2))
        return tl.reshape(w, (n, words * 4))
    else:
        return tl.reshape(tl.join(planes[0], planes[1]), (n, words * 2))
