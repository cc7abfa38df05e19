"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011).

There is no state to carry or to lose: the number of a token is a pure function of the request's
seed, the index of the output token and the vocabulary id, on any device, in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over 32-bit words held in int64 tensors, whose shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps, but its 64 bits are those of the unsigned one, so that the mask
        # after the arithmetic shift leaves exactly the high word.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_WORD) ^ c1 ^ k0
        c2 = (first >> 32).bitwise_and_(_WORD) ^ c3 ^ k1
        c1, c3 = second.bitwise_and_(_WORD), first.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, index: Tensor, num_ids: int, first_id: int = 0) -> Tensor:
    """The random numbers of output token `index` [rows] int64 of requests with `seed` [rows] int64,
    for the vocabulary ids from `first_id` on, a multiple of 4.

    Returns [rows, num_ids] float32, strictly between 0 and 1. Key: the low and the high word of
    the seed. Counter: (vocab id // 4, index, 0, 0). Word `vocab id % 4` of the result becomes a
    number by its upper 23 bits: with 24, the half that keeps it off 0 would not fit into a float32
    any more, and the largest would be rounded to 1.
    """
    quads = first_id // 4 + torch.arange((num_ids + 3) // 4, device=seed.device)
    zero = torch.zeros_like(quads)
    key = (seed[:, None] & _WORD, (seed[:, None] >> 32) & _WORD)
    words = philox4x32((quads, index[:, None], zero, zero), key)
    numbers = [((word >> 9).float() + 0.5) * 2.0**-23 for word in words]
    return torch.stack(numbers, dim=-1).flatten(1)[:, :num_ids]
