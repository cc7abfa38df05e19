"""Rotary frequencies: plain RoPE, and the methods that extend its context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.layers.rope import rotary_table
from minisgl.models.config import NativeConfig, RopeConfig


def rotary_tables(
    config: NativeConfig, layers: range, max_seq_len: int, device: torch.device
) -> dict[int, Tensor]:
    """The table of each of these layers, by its number; layers that rotate alike share one."""
    made: dict[tuple[RopeConfig, int], Tensor] = {}
    for rotation in map(config.rotation, layers):
        if rotation not in made:
            rope, rotary_dim = rotation
            frequencies = inverse_frequencies(rope, rotary_dim).to(device)
            made[rotation] = rotary_table(frequencies, max_seq_len, scale=rope.attention_factor)
    return {layer: made[config.rotation(layer)] for layer in layers}


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] float32, on the CPU.

    Computed in float32 as transformers does: at position 100,000 the last bits are visible angles.
    Pairs past `rope.share` have 0, and so stand still. 'dynamic' equals 'default', because the
    engine limits sequences to the original context.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    frequencies[int(rope.share * head_dim // 2) :] = 0
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, others interpolated."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # within the old context
    band = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / band).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): the same idea, interpolated linearly over the index of the pair."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_max_position / (2 * math.pi * times)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
