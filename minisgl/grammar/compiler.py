"""Compiles the constraints of requests, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLMatcher

from minisgl.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from minisgl.grammar.checking import CLOSED, LIMITS, Checker
from minisgl.grammar.matching import GrammarMatcher, SharedGrammar
from minisgl.grammar.reasoning import GatedMatcher, ReasoningGate
from minisgl.grammar.schema import tidy
from minisgl.grammar.source import Source, source_of
from minisgl.grammar.vocabulary import Vocabulary
from minisgl.places import Places, Shares
from minisgl.request import StructuredOutput, Tenant
from minisgl.text.tokenizer import Tokenizer

MAX_CACHED = 256
MAX_CACHED_BYTES = 128 << 20  # of the memory that they take
MAX_WAITING = 64  # grammars in a line; clients share these places equally once they are taken
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
    num_bytes: int = 0  # of memory

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


@dataclass(eq=False, slots=True)
class _Entry:
    """A grammar in the cache, compiled or about to be."""

    future: asyncio.Future[Compiled | str]
    num_waiting: int = 0  # requests
    num_bytes: int = 0  # once it is compiled

    @property
    def is_broken(self) -> bool:
        done = self.future.done() and not self.future.cancelled() and not self.future.exception()
        return done and isinstance(found := self.future.result(), Compiled) and found.is_broken


class Grammars:
    """The grammars of one engine. Used by its event loop only.

    A grammar is first tried in a process of its own, and then compiled in a thread. One that is
    slow is tried again in a second line, so that others pass it. Clients take turns in each line,
    and what no request waits for any more is not compiled.
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
        self._cache: OrderedDict[Source, _Entry] = OrderedDict()  # least recently used first
        self._quick = _Line(self._vocabulary, QUICK_SECONDS)
        self._slow = _Line(self._vocabulary, SLOW_SECONDS)

    async def compile(self, structured: StructuredOutput, client: str = "") -> Compiled:
        """Compile a constraint and compute its first mask.

        Raises InvalidRequestError, which names the field, and the place and keyword in a schema;
        QueueFullError; EngineStoppedError.
        """
        source = source_of(structured)
        entry = self._cache.get(source)
        if entry is not None and not entry.is_broken:
            self._cache.move_to_end(source)
            self._observe(None)
        else:
            entry = self._begin(source, client)
        result = await self._wait(source, entry)
        if isinstance(result, Compiled):
            return result
        if structured.tool_calls is not None:
            for part in structured.tool_calls.parts:
                await self.compile(part, client)  # raises for the tool that is wrong
        raise InvalidRequestError(structured.field, result)

    async def unconstrained(self) -> Compiled:
        """What allows every answer, for matchers with a ReasoningGate."""
        await asyncio.wrap_future(self._quick.threads.submit(self._vocabulary.prepare))
        return Compiled((), None, self._vocabulary)

    async def _wait(self, source: Source, entry: _Entry) -> Compiled | str:
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.future)  # others may wait for it
        finally:
            entry.num_waiting -= 1
            if not entry.num_waiting and not entry.future.done():
                self._forget(source, entry)
                entry.future.cancel()

    async def _compile(self, source: Source, client: str) -> Compiled | str:
        began = time.monotonic()
        result = await self._quick.compile(source, client)
        if result is None:
            result = await self._slow.compile(source, client)
        self._observe(time.monotonic() - began)
        return TOO_SLOW if result is None else result

    # -- the cache ---------------------------------------------------------------------------------

    def _begin(self, source: Source, client: str) -> _Entry:
        entry = _Entry(asyncio.ensure_future(self._compile(source, client)))
        self._cache[source] = entry
        self._cache.move_to_end(source)
        entry.future.add_done_callback(partial(self._done, source, entry))
        self._evict()
        return entry

    def _done(self, source: Source, entry: _Entry, future: asyncio.Future[Compiled | str]) -> None:
        """Refusals are remembered, too: they may have taken seconds."""
        if future.cancelled() or future.exception() is not None:
            self._forget(source, entry)
            return
        result = future.result()
        entry.num_bytes = len(source.text)
        if isinstance(result, Compiled):
            entry.num_bytes += result.num_bytes
        self._evict()

    def _forget(self, source: Source, entry: _Entry) -> None:
        if self._cache.get(source) is entry:
            del self._cache[source]

    def _evict(self) -> None:
        num_bytes = sum(entry.num_bytes for entry in self._cache.values())
        while len(self._cache) > MAX_CACHED or num_bytes > MAX_CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            num_bytes -= oldest.num_bytes

    def close(self) -> None:
        """Refuse what is not compiled yet. Thread-safe, idempotent."""
        for line in (self._quick, self._slow):
            line.close()

    def join(self) -> None:
        """Block until threads and processes have ended, after `close`."""
        for line in (self._quick, self._slow):
            line.join()


class _Line:
    """A thread in which grammars are compiled one after the other; clients take turns."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self.threads = ThreadPoolExecutor(1, "minisgl-grammar")
        self._vocabulary = vocabulary
        self._checker = Checker(vocabulary.outline, seconds)
        self._place = Places(1)
        self._waiting = Shares(MAX_WAITING)

    async def compile(self, source: Source, client: str) -> Compiled | str | None:
        """Returns the reason against a grammar, or None if it took too long.

        Raises QueueFullError, EngineStoppedError.
        """
        if not self._waiting.take(client):
            raise QueueFullError("Many grammars wait to be compiled; try again later.")
        try:
            await self._place.take(Tenant(client))
        finally:
            self._waiting.give_back(client)
        try:
            future = self.threads.submit(self._compile, source)
        except RuntimeError as error:  # shut down
            self._place.give_back()
            raise EngineStoppedError(CLOSED) from error
        future.add_done_callback(partial(self._end, asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    def _end(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        """Called by the thread, also for what nobody waits for any more."""
        try:
            loop.call_soon_threadsafe(self._place.give_back)
        except RuntimeError:  # the loop was closed
            self._place.give_back()

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
        return Compiled(
            checked.ignored_keywords, grammar, self._vocabulary, num_bytes=checked.num_bytes
        )

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
