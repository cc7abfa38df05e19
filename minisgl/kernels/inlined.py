"""Triton helpers of several folders. They are inlined: a kernel compiles as if they were written
out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(pdl: tl.constexpr):
    """Wait for the previous kernel, and then let the next one start: see launch_options.py."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def from_here(x, pdl: tl.constexpr):
    """Returns x; computations with the result stay after this point. The compiler would place them
    right after the load of x, and so wait for x before it issues the other loads."""
    if pdl:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=pack
        )
    else:
        return x


@triton.jit
def finished_sums(acc, on_gpu: tl.constexpr):
    """Returns acc, float32, when tensor cores have added it up.

    A step of a loop whose weights lie in registers must end with it. Hopper's tensor cores read
    them there while the program goes on, and Triton 3.6 with a ptxas before 13.3 lets the next step
    write its own weights into registers that are still read (triton-lang/triton#9433).
    """
    if on_gpu:
        return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc


@triton.jit
def prefetch(address, num_bytes):
    """Fetches from each address so many bytes, a multiple of 16, into L2: Hopper and later."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rms_scale(sum_of_squares, size: tl.constexpr, eps):
    """float32: the factor of a row with this sum of squares in its RMS norm, before the weight."""
    return tl.rsqrt(sum_of_squares * (1.0 / size) + eps)


@triton.jit
def apply_norm(x, scale, weight):
    """weight · (x · scale), rounded to x's dtype after each product, as reference.rms_norm is."""
    quotient = (x.to(tl.float32) * scale).to(x.dtype)
    return (weight.to(tl.float32) * quotient.to(tl.float32)).to(x.dtype)


@triton.jit
def gated_mul(gate, up, gelu: tl.constexpr, dtype: tl.constexpr):
    """silu(gate) · up, or gelu(gate) · up, with gate, up, activation and the result rounded to
    `dtype`, as reference.gated_mul is."""
    gate = gate.to(dtype).to(tl.float32)
    turned = gate
    if gelu:  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
        turned = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    active = (gate / (1.0 + tl.exp(-turned))).to(dtype)
    return (active.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def clamped_mul(gate, up, limit: tl.constexpr, alpha: tl.constexpr, dtype: tl.constexpr):
    """The activation of experts that are clamped, with gate, up and the result rounded to `dtype`,
    as activated of moe/reference.py is."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return (gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)).to(dtype)


@triton.jit
def to_stored(x, inverse_scale, dtype: tl.constexpr):
    """A key or value as the cache stores it: x without a scale; with one, as reference.to_stored
    rounds it to e4m3."""
    if inverse_scale is None:
        return x
    else:
        quotient = x.to(tl.float32) * inverse_scale
        return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def arrive(semaphores, index):
    """Count a program that has stored its part of result `index`; return how many came before it.

    What the earlier programs stored can be read afterwards. The last program must store 0
    there, for the next launch.
    """
    # One thread does the atomic: the others' stores must come before it. It releases them, and
    # acquires those of the programs that came earlier.
    tl.debug_barrier()
    return tl.atomic_add(semaphores + index, 1, sem="acq_rel", scope="gpu")
