"""Rules on the tokens of a request that need no grammar: those allowed, and words that are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from minisgl.errors import InvalidRequestError
from minisgl.matcher import WORD_BITS, MaskRows, Matcher, forbid, mask_words
from minisgl.text.tokenizer import Tokenizer

ALL = 0xFFFFFFFF
TokenIds = tuple[int, ...]


def word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[TokenIds, ...]:
    """The sequences of tokens that each word is, at the beginning of a text and behind a space.

    The second is left out where the space is a token of its own, for then it has the first in it.
    """
    found: set[TokenIds] = set()
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if not bare:
            continue
        found.add(bare)
        if spaced[1:] != bare:
            found.add(spaced)
    return (*sorted(found),)


class TokenRules:
    """A Matcher that allows some tokens only, or all but the last ones of words.

    inner: the matcher of a grammar. Where nothing else could follow, a word is not held back.
    """

    def __init__(
        self,
        mask: MaskRows,
        forbidden: Iterable[TokenIds],
        inner: Matcher | None = None,
    ) -> None:
        """mask: of the tokens allowed. forbidden: sequences that the output must not contain.

        Raises InvalidRequestError if no token is left.
        """
        self._inner = inner
        self._mask = mask.copy()
        # The other sequences, by their last token but one.
        self._forbidden: defaultdict[int, list[TokenIds]] = defaultdict(list)
        self._longest = 0
        for sequence in forbidden:
            if len(sequence) == 1:
                forbid(self._mask, sequence[0])
            else:
                self._forbidden[sequence[-2]].append(sequence)
                self._longest = max(self._longest, len(sequence))
        if not self._mask.any():
            raise InvalidRequestError("bad_words", "leave none of allowed_token_ids.")
        self._tail: list[int] = []  # of the output, as long as the beginning of a sequence

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def accept(self, token_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)
        if self._longest:
            self._tail = [*self._tail, *token_ids][1 - self._longest :]

    def fill(self, words: MaskRows) -> None:
        if self._inner is None:
            self._fill_own(words)
            return
        self._inner.fill(words)
        own = np.empty_like(self._mask)
        self._fill_own(own)
        if (words & own).any():
            words &= own

    def heal(self) -> bool:
        return self._inner is not None and self._inner.heal()

    def _fill_own(self, words: MaskRows) -> None:
        words[:] = self._mask
        for sequence in self._forbidden.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[1 - len(sequence) :] == [*sequence[:-1]]:
                forbid(words, sequence[-1])
        if not words.any():
            words[:] = self._mask


def mask_of(vocab_size: int, allowed: Collection[int] | None) -> MaskRows:
    """A mask of these tokens; None: of all."""
    if allowed is None:
        return np.full(mask_words(vocab_size), ALL, np.uint32)
    bits = np.zeros(mask_words(vocab_size) * WORD_BITS, np.uint8)
    bits[np.fromiter(allowed, np.int64, len(allowed))] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
