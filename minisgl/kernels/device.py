"""Triton helpers that several folders share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_here(x, pdl: tl.constexpr):
    """x; what is made of it stays behind this point. The compiler would make it as soon as x is
    asked for, and so wait for x, before it asks for anything else."""
    if pdl:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=pack
        )
    else:
        return x
