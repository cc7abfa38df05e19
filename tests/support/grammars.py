"""Grammars over small vocabularies, and walks under their masks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from support.toy_tokenizers import byte_level, spelled

import minisgl
from minisgl.grammar.checking import LIMITS
from minisgl.grammar.compiler import Compiled, Grammars
from minisgl.grammar.source import grammar_text, source_of
from minisgl.grammar.vocabulary import Outline, sketch
from minisgl.matcher import Matcher, mask_words
from minisgl.request import StructuredOutput
from minisgl.text.tokenizer import Tokenizer

NUM_PADDED = 7  # ids of the model beyond the tokenizer's
MAX_STEPS = 5000


@cache
def demo() -> Tokenizer:
    return Tokenizer.load(Path(minisgl.__file__).parent / "assets" / "demo")


VOCABULARIES = {"byte_level": byte_level, "spelled": spelled, "demo": demo}


class GrammarBench:
    """Compiles for one vocabulary, from synchronous tests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + NUM_PADDED
        assert tokenizer.eos_token_id is not None
        # Some models have several tokens that end an answer.
        self.eos = {tokenizer.eos_token_id, min(tokenizer.control_tokens())}
        self.seconds: list[float | None] = []
        self.grammars = Grammars(tokenizer, self.size, self.eos, observe=self.seconds.append)
        self.control = frozenset(tokenizer.control_tokens())

    def compile(self, structured: StructuredOutput) -> Compiled:
        return asyncio.run(self.grammars.compile(structured))

    def allowed(self, matcher: Matcher) -> set[int]:
        """The ids that the mask allows, those without a token as well."""
        words = np.zeros(mask_words(self.size), np.uint32)
        matcher.fill(words)
        assert matcher.error is None
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return {int(token_id) for token_id in np.flatnonzero(bits[: self.size])}

    def bytes_of(self, token_ids: list[int]) -> bytes:
        return b"".join(self.tokenizer.token_bytes(token_id) for token_id in token_ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def walk(self, matcher: Matcher, rng: random.Random) -> Iterator[tuple[list[int], set[int]]]:
        """Random tokens under masks: what has been taken, and the ids allowed next."""
        taken: list[int] = []
        while True:
            allowed = self.allowed(matcher)
            yield taken, allowed
            token_id = rng.choice(sorted(allowed))
            if token_id in self.eos:
                return
            taken = [*taken, token_id]
            matcher.accept([token_id])
            assert matcher.error is None
            assert len(taken) < MAX_STEPS, "the answer does not end"

    def random_answer(self, structured: StructuredOutput, seed: int) -> str:
        """What a model with random weights answers; fails if it does not end."""
        *_, (taken, _) = self.walk(self.compile(structured).matcher(), random.Random(seed))
        return self.bytes_of(taken).decode()


@contextmanager
def open_bench(name: str) -> Iterator[GrammarBench]:
    bench = GrammarBench(VOCABULARIES[name]())
    try:
        yield bench
    finally:
        bench.grammars.close()
        bench.grammars.join()


EOS = 300
OUTLINE = Outline(600, {EOS: "</s>"}, (EOS,))


@cache
def _byte_tokenizer(markers: tuple[tuple[str, int], ...]) -> object:
    special = {EOS: "</s>", **{token_id: text for text, token_id in markers}}
    return sketch(Outline(600, special, (EOS,)))


class ByteMatcher:
    """Follows a text byte by byte: the meaning of a grammar apart from any vocabulary."""

    def __init__(self, structured: StructuredOutput, markers: dict[str, int] | None = None) -> None:
        self._markers = markers or {}
        tokenizer = _byte_tokenizer(tuple(self._markers.items()))
        text = grammar_text(source_of(structured))
        self._matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)  # type: ignore[arg-type]
        assert not self._matcher.is_error(), self._matcher.get_error()

    def copy(self) -> ByteMatcher:
        copied = ByteMatcher.__new__(ByteMatcher)
        copied._markers, copied._matcher = self._markers, self._matcher.deep_copy()
        return copied

    def goes_on_with(self, data: bytes) -> bool:
        """Whether it accepts all of `data`, and takes it."""
        return self._matcher.try_consume_tokens(list(data)) == len(data)

    def accepts(self, text: str) -> bool:
        """Whether `text`, with its markers as single tokens, is a whole answer."""
        matcher = self._matcher.deep_copy()
        token_ids: list[int] = []
        while text:
            marker = next((mark for mark in self._markers if text.startswith(mark)), None)
            taken = marker or text[0]
            token_ids += [self._markers[marker]] if marker else taken.encode()
            text = text[len(taken) :]
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def random_answer(self, rng: random.Random, likely: Collection[int]) -> str:
        """An answer of `likely` bytes and markers where these are allowed; it ends when it can."""
        matcher, texts = self._matcher.deep_copy(), {id: text for text, id in self._markers.items()}
        answer = b""
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            allowed = [id for id in range(OUTLINE.size) if mask[id >> 3] >> (id & 7) & 1]
            markers = [id for id in allowed if id in texts]
            others = [id for id in allowed if id in likely] or allowed
            token_id = rng.choice(markers if markers and rng.random() < 0.5 else others)
            matcher.consume_token(token_id)
            answer += texts[token_id].encode() if token_id in texts else bytes([token_id])
        return answer.decode()

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()
