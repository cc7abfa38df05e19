"""The model's vocabulary as llguidance sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from minisgl.errors import InvalidRequestError
from minisgl.matcher import MaskRows, forbid, mask_words

if TYPE_CHECKING:
    from minisgl.text.tokenizer import Tokenizer

# llguidance takes a token for a special one, which is no text, if it begins with this byte.
SPECIAL = b"\xff"
# llguidance knows the masks of these pieces of JSON beforehand, and follows only the rest of the
# vocabulary: blanks, and tokens within a string, whose length may be limited.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in (2, 4, 8, 16, 30)),
    f"{_CHARACTER}+",
)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a grammar can see of a vocabulary apart from its words."""

    size: int
    special: Mapping[int, str]  # tokens that are never text, by id
    eos_token_ids: Sequence[int]


class Vocabulary:
    """The tokens of a model: their bytes, and which of them end an answer or are no text."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Iterable[int]) -> None:
        """size: number of ids of the model, which may be more than the tokenizer's.

        Raises InvalidRequestError if no token ends an answer: a grammar could not, either.
        """
        eos = tuple(sorted(token_id for token_id in set(eos_token_ids) if token_id < size))
        if not eos:
            raise InvalidRequestError("structured", "the model has no token that ends an answer.")
        self._tokenizer = tokenizer
        special = {id: text for id, text in tokenizer.control_tokens().items() if id < size}
        self.outline = Outline(size, special, eos)
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Compute what is below, unless it has been; takes about a second."""
        with self._lock:
            _ = self.ll_tokenizer, self.unfinished, self.line_breaks

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token as text; b"" for one that is none."""
        table = self._tokenizer.byte_table(skip_special_tokens=False)
        special = self.outline.special
        return [b"" if id in special else table[id] for id in range(self.outline.size)]

    @cached_property
    def ll_tokenizer(self) -> LLTokenizer:
        return _make(self.outline, self.token_bytes)

    @cached_property
    def unfinished(self) -> MaskRows:
        """A mask that allows everything but the end of the answer."""
        words: MaskRows = np.full(mask_words(self.outline.size), 0xFFFFFFFF, np.uint32)
        for token_id in self.outline.eos_token_ids:
            forbid(words, token_id)
        return words

    @cached_property
    def line_breaks(self) -> Mapping[int, int]:
        """The tokens that are one or two line breaks, with their number."""
        found = {b"\n": 1, b"\n\n": 2}
        return {id: found[text] for id, text in enumerate(self.token_bytes) if text in found}

    def crossing(self, beginning: bytes) -> NDArray[np.int64]:
        """The tokens that begin so and go on with more than blanks."""
        ids = [
            token_id
            for token_id, text in enumerate(self.token_bytes)
            if text.startswith(beginning) and text[len(beginning) :].strip()
        ]
        return np.array(ids, np.int64)


def sketch(outline: Outline) -> LLTokenizer:
    """A tokenizer with the single bytes as words, made in a moment.

    It compiles the same grammars as the real one, and allows any text that a grammar does.
    """
    words = [b""] * outline.size
    for byte, token_id in enumerate(byte_ids(outline)):
        words[token_id] = bytes([byte])
    return _make(outline, words)


def byte_ids(outline: Outline) -> list[int]:
    """The tokens that are the single bytes in the `sketch` of a vocabulary."""
    free = (token_id for token_id in range(outline.size) if token_id not in outline.special)
    return [*islice(free, 256)]


def _make(outline: Outline, words: Sequence[bytes]) -> LLTokenizer:
    return LLTokenizer(
        _Words(outline, words),  # type: ignore[arg-type]
        n_vocab=outline.size,
        eos_token=list(outline.eos_token_ids),
        slices=list(SLICES),
    )


class _Words:
    """The attributes of llguidance's TokenizerWrapper, which knows no vocabulary of bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, outline: Outline, words: Sequence[bytes]) -> None:
        self.eos_token_id = outline.eos_token_ids[0]
        self.special_token_ids = sorted(outline.special)
        self.tokens = list(words)
        for token_id, text in outline.special.items():
            self.tokens[token_id] = SPECIAL + text.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text that is forced; no grammar here forces any."""
        raise NotImplementedError
