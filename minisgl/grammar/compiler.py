"""Compiles the constraints of requests, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from minisgl.errors import EngineStoppedError, InvalidRequestError
from minisgl.grammar.checking import CLOSED, LIMITS, Checker
from minisgl.grammar.matching import GrammarMatcher, SharedGrammar
from minisgl.grammar.reasoning import GatedMatcher, ReasoningGate
from minisgl.grammar.schema import tidy
from minisgl.grammar.source import Source, source_of
from minisgl.grammar.vocabulary import Vocabulary
from minisgl.request import StructuredOutput

if TYPE_CHECKING:
    from minisgl.text.tokenizer import Tokenizer

MAX_CACHED = 256
MAX_CACHED_BYTES = 16 << 20  # of their texts
# Processor time of a grammar; most take about a millisecond. One that needs more is slow, and holds
# up others no longer than this.
QUICK_SECONDS = 0.25
SLOW_SECONDS = 3.0
TOO_SLOW = "it takes too long to compile; simplify it."


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that answers can be held to."""

    ignored_keywords: tuple[str, ...]  # of its JSON schemas
    _grammar: SharedGrammar | None = field(repr=False)  # None: allows everything
    _vocabulary: Vocabulary = field(repr=False)

    def matcher(self, reasoning: ReasoningGate | None = None) -> GrammarMatcher | GatedMatcher:
        """A matcher for one answer, at its beginning. reasoning: may come before the answer."""
        if reasoning is None:
            if self._grammar is None:
                raise ValueError("without a constraint there must be reasoning")
            return self._grammar.matcher()
        inner = None if self._grammar is None else self._grammar.matcher()
        return GatedMatcher(reasoning, self._vocabulary, inner)

    @property
    def is_broken(self) -> bool:
        """Whether an answer has made it useless for later ones."""
        return self._grammar is not None and self._grammar.is_broken


class Grammars:
    """The grammars of one engine. Used by its event loop only.

    A grammar is first tried in a process of its own, and then compiled in a thread. One that is
    slow is tried again in a second line, so that others pass it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        observe: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        """observe: is told the seconds of each compilation; None for a grammar that was cached."""
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._observe = observe
        self._cache: OrderedDict[Source, asyncio.Future[Compiled | str]] = OrderedDict()
        self._quick = _Line(self._vocabulary, QUICK_SECONDS)
        self._slow = _Line(self._vocabulary, SLOW_SECONDS)

    async def compile(self, structured: StructuredOutput) -> Compiled:
        """Compile a constraint and compute its first mask.

        Raises InvalidRequestError, which names the field, and the place and keyword in a schema;
        EngineStoppedError.
        """
        source = source_of(structured)
        future = self._cache.get(source)
        if future is not None and not _is_broken(future):
            self._cache.move_to_end(source)
            self._observe(None)
        else:
            future = asyncio.ensure_future(self._compile(source))
            self._remember(source, future)
        result = await asyncio.shield(future)  # others may wait for it
        if isinstance(result, Compiled):
            return result
        if structured.tool_calls is not None:
            for part in structured.tool_calls.parts:
                await self.compile(part)  # raises for the tool that is wrong
        raise InvalidRequestError(structured.field, result)

    async def unconstrained(self) -> Compiled:
        """What allows every answer, for matchers with a ReasoningGate."""
        await asyncio.wrap_future(self._quick.threads.submit(self._vocabulary.prepare))
        return Compiled((), None, self._vocabulary)

    async def _compile(self, source: Source) -> Compiled | str:
        began = time.monotonic()
        result = await self._quick.compile(source)
        if result is None:
            result = await self._slow.compile(source)
        self._observe(time.monotonic() - began)
        return TOO_SLOW if result is None else result

    def _remember(self, source: Source, future: asyncio.Future[Compiled | str]) -> None:
        """Refusals are remembered, too: they may have taken seconds."""

        def forget(done: asyncio.Future[Compiled | str]) -> None:
            failed = done.cancelled() or done.exception() is not None
            if failed and self._cache.get(source) is done:
                del self._cache[source]

        self._cache[source] = future
        self._cache.move_to_end(source)
        future.add_done_callback(forget)
        num_bytes = sum(len(source.text) for source in self._cache)
        while len(self._cache) > MAX_CACHED or num_bytes > MAX_CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            num_bytes -= len(oldest.text)

    def close(self) -> None:
        """Refuse what is not compiled yet. Thread-safe, idempotent."""
        for line in (self._quick, self._slow):
            line.close()

    def join(self) -> None:
        """Block until threads and processes have ended, after `close`."""
        for line in (self._quick, self._slow):
            line.join()


class _Line:
    """A thread in which grammars are compiled one after the other."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self.threads = ThreadPoolExecutor(1, "minisgl-grammar")
        self._vocabulary = vocabulary
        self._checker = Checker(vocabulary.outline, seconds)

    async def compile(self, source: Source) -> Compiled | str | None:
        """Returns the reason against a grammar, or None if it took too long."""
        try:
            future = self.threads.submit(self._compile, source)
        except RuntimeError as error:  # shut down
            raise EngineStoppedError(CLOSED) from error
        return await asyncio.wrap_future(future)

    def _compile(self, source: Source) -> Compiled | str | None:
        checked = self._checker.check(source)
        if checked.is_slow:
            return None
        if checked.reason:
            return checked.reason
        self._vocabulary.prepare()
        grammar = SharedGrammar(
            partial(_matcher, self._vocabulary, checked.text),
            self._vocabulary.outline.eos_token_ids,
        )
        if grammar.compile_error:
            return f"{tidy(grammar.compile_error)}."
        return Compiled(checked.ignored_keywords, grammar, self._vocabulary)

    def close(self) -> None:
        self._checker.close()
        self.threads.shutdown(wait=False)  # what is queued finds the process closed

    def join(self) -> None:
        self.threads.shutdown()
        self._checker.wait()


def _matcher(vocabulary: Vocabulary, text: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary.ll_tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask, which takes longer than others
    return matcher


def _is_broken(future: asyncio.Future[Compiled | str]) -> bool:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return False
    result = future.result()
    return isinstance(result, Compiled) and result.is_broken
