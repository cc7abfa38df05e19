"""The noise of a token in Triton: that of philox.py and of the Gumbel step in sampling.py, bit for
bit, and a bound that costs no logarithm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_of_quads(seed, index, quads):
    """[quads, 4] uint32: Philox4x32-10 of counter (quad, index, 0, 0) under the seed's words.

    Written out with 64-bit products, which are one instruction each; `tl.philox` computes the same
    with two.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = quads.to(tl.uint32)
    c1 = c0 * 0 + index.to(tl.uint32)
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [quads.shape[0], 4])


@triton.jit
def _in_1_to_2(words):
    """1 + (word >> 9) / 2**23, by writing the mantissa."""
    return ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def gumbel(words):
    """-log(-log(u)) of u = ((word >> 9) + 0.5) / 2**23, which the subtraction gives exactly."""
    uniform = _in_1_to_2(words) - 0.999999940395355224609375
    return -tl.log(-tl.log(uniform))


@triton.jit
def most_gumbel(words):
    """No less than `gumbel`: -log(-log(u)) <= -log(1 - u), and log2 x >= bits(x) / 2**23 - 127.

    What is subtracted is 1 - u less 2**-24, so still exact; the last 1e-4 covers every rounding.
    """
    rest = 1.99999988079071044921875 - _in_1_to_2(words)
    bits = rest.to(tl.int32, bitcast=True).to(tl.float32)
    return tl.fma(bits, -8.262958e-08, 127 * 0.6931471805599453 + 1e-4)
