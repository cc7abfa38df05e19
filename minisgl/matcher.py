"""The engine's view of a grammar: which tokens may follow those that a request has so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32
# Seconds of processor time that a matcher may take for a token, and for the mask after it.
MASK_LIMIT_S = 0.010

# Rows of packed token masks, [rows, mask_words(vocab_size)]: token i is allowed if bit i % 32 of
# word i // 32 is 1. Bits past the vocabulary mean nothing.
MaskRows = NDArray[np.uint32]


class Matcher(Protocol):
    """Follows the output of one request. It is called by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by output tokens that are settled: they are never taken back."""

    def fill(self, words: MaskRows) -> None:
        """Write the mask of the next token: one row of MaskRows, [words]. Releases the GIL."""

    def heal(self) -> bool:
        """After an error: whether it was caused by another request, and is made good.

        What was accepted stays accepted; a mask has to be filled again.
        """

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; what it fills from then on means nothing."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete: nothing but EOS may follow."""


def allow(words: MaskRows, token_id: int) -> None:
    """Allow a token in the mask that one row is."""
    words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def forbid(words: MaskRows, token_id: int) -> None:
    """Forbid a token in the mask that one row is."""
    words[token_id // WORD_BITS] &= np.uint32(~(1 << token_id % WORD_BITS) & 0xFFFFFFFF)


def mask_words(vocab_size: int) -> int:
    """Words of a packed token mask."""
    return -(-vocab_size // WORD_BITS)
