"""Philox against published vectors and against plain integers."""

from __future__ import annotations

import random

import pytest
import torch
from support.sampling_oracle import philox as philox_of_ints
from support.sampling_oracle import uniform as uniform_of_ints

from minisgl.kernels.sampling import philox
from minisgl.kernels.sampling.philox import philox4x32, uniform

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, result):
    assert tuple(philox_of_ints(counter, key)) == result
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key)
    )
    assert tuple(word.item() for word in words) == result


@pytest.mark.parametrize("vocab_size", [1, 4, 31, 258])
def test_uniform_matches_plain_integers(vocab_size):
    draw = random.Random(vocab_size)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)] + [draw.randrange(-(2**63), 2**63) for _ in range(7)]
    indices = [0, 1, 2**31] + [draw.randrange(100_000) for _ in range(9)]
    numbers = uniform(torch.tensor(seeds), torch.tensor(indices), vocab_size)
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == [
        [uniform_of_ints(seed, index, token_id) for token_id in range(vocab_size)]
        for seed, index in zip(seeds, indices, strict=True)
    ]


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_uniform_never_reaches_0_or_1(word, monkeypatch):
    """At 1 the Gumbel noise is infinite, and the token wins whatever its probability."""
    words = (torch.full((1, 1), word),) * 4
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: words)
    numbers = uniform(torch.tensor([0]), torch.tensor([0]), 4)
    assert ((numbers > 0) & (numbers < 1)).all()


def test_a_row_depends_only_on_its_seed_and_index():
    seeds, indices = torch.arange(40) * 12_345_678_901, torch.arange(40) % 7
    together = uniform(seeds, indices, 101)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seeds[order], indices[order], 101), together[order])
    for row in range(40):
        assert torch.equal(uniform(seeds[row, None], indices[row, None], 101)[0], together[row])
    assert torch.equal(uniform(seeds, indices, 64), together[:, :64])


@pytest.mark.parametrize("axis", ["seed", "index"])
def test_uniform_passes_chi_square_and_correlation_tests(axis):
    steps, zeros = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    numbers = uniform(*((steps, zeros) if axis == "seed" else (zeros, steps)), 4096)
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    expected = numbers.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 104  # chi-square, 63 degrees: 0.1 %
    # Neighbours in the vocabulary, and neighbouring rows, know nothing of each other.
    centred = numbers - 0.5
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 4 / 12 / numbers.numel() ** 0.5
    assert (centred[1:] * centred[:-1]).mean().abs() < 4 / 12 / numbers.numel() ** 0.5
