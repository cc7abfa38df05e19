"""Token masks of the requests that have a matcher, computed between two steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np

from minisgl.errors import GrammarError
from minisgl.grammar.matching import GrammarMatcher, GrammarPool
from minisgl.grammar.reasoning import sole_grammar
from minisgl.matcher import MASK_LIMIT_S, WORD_BITS, MaskRows, Matcher
from minisgl.parts.masks.host import matcher_of
from minisgl.request import Request

# From this many rows on, grammars are driven together by several threads.
POOL_ROWS = 16
MAX_THREADS = 8

_ALL = np.uint32(0xFFFFFFFF)
_TOO_SLOW = (
    f"a token took over {MASK_LIMIT_S * 1000:g} ms to constrain, for there are too many ways to "
    "read what comes before it; make the schema or grammar smaller, or less ambiguous"
)
# Of tokens that the masks allowed, so that most often a limit of the grammar engine was reached.
_BROKEN = (
    "there are too many ways to read it; make the schema or grammar smaller, or less ambiguous"
)

FailedRequests = list[tuple[Request, GrammarError]]


class MaskFiller:
    """Drives the matchers of an engine's requests, and contains their failures.

    A step waits for its slowest matcher, so a request with one over MASK_LIMIT_S has to end. That
    is processor time, which a busy machine does not prolong. When many grammars that are driven
    together have taken longer, they are driven one by one the next time, which shows whose fault
    it is.

    A request's failure is returned, and its mask allows everything: nobody else notices. If it has
    broken what others share with it, those heal; the time for that counts for no request.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._wall_clock = wall_clock
        self._last_word = (1 << ((vocab_size - 1) % WORD_BITS + 1)) - 1  # bits of the vocabulary
        self._accept_alone = self._fill_alone = False  # next time

    def accept(self, requests: Sequence[Request]) -> FailedRequests:
        """Tell each matcher the last token of its request, which was just settled."""
        following = [request for request in requests if not request.finished]
        grammars = {} if self._accept_alone else self._together(following)
        self._accept_alone = False
        if grammars:
            pool, last = self._pool, [following[index].token_ids[-1] for index in grammars]
            self._accept_alone = self._is_slow(lambda: pool.accept([*grammars.values()], last))
        failed = [i for i, grammar in grammars.items() if grammar.error and not grammar.heal()]
        reasons = dict.fromkeys(failed, _BROKEN)
        for index, request in enumerate(following):
            if index not in grammars and (reason := self._accept(request)) is not None:
                reasons[index] = reason
        return [(following[index], GrammarError(reason)) for index, reason in reasons.items()]

    def fill(self, requests: Sequence[Request], rows: MaskRows) -> FailedRequests:
        """Write the mask of each request's next token: a row each. Those that have ended get ones.

        All tokens of the requests must have been accepted.
        """
        grammars = {} if self._fill_alone else self._together(requests)
        self._fill_alone = False
        if grammars:
            pool, indices = self._pool, [*grammars]
            self._fill_alone = self._is_slow(lambda: pool.fill([*grammars.values()], indices, rows))
        failed = {i for i, grammar in grammars.items() if grammar.error}
        reasons = {i: _BROKEN for i in failed if not grammars[i].heal()}
        again = failed - reasons.keys()
        for index, request in enumerate(requests):
            if index in grammars and index not in again:
                continue
            if request.finished:
                rows[index] = _ALL
            elif (reason := self._fill(request, rows[index])) is not None:
                reasons[index] = reason
        rows[:, -1] &= self._last_word
        for index in np.flatnonzero(rows.max(axis=1, initial=0) == 0).tolist():
            reasons.setdefault(index, _BROKEN)
        for index in reasons:
            rows[index] = _ALL
        for index, request in enumerate(requests):
            if index not in reasons and (held_back := self._held_back(request)):
                _clear(rows[index], held_back)
        return [(requests[index], GrammarError(reason)) for index, reason in reasons.items()]

    # -- many grammars together --------------------------------------------------------------------

    def _together(self, requests: Sequence[Request]) -> dict[int, GrammarMatcher]:
        """The grammars to drive together, by the index of their request."""
        if len(requests) < POOL_ROWS:
            return {}
        found = {
            index: sole_grammar(matcher_of(request))
            for index, request in enumerate(requests)
            if not request.finished
        }
        return {index: grammar for index, grammar in found.items() if grammar is not None}

    @cached_property
    def _pool(self) -> GrammarPool:
        return GrammarPool(min(MAX_THREADS, os.cpu_count() or 1))

    def _is_slow(self, drive: Callable[[], None]) -> bool:
        began = self._wall_clock()
        drive()
        return self._wall_clock() - began > MASK_LIMIT_S

    # -- one matcher -------------------------------------------------------------------------------

    def _accept(self, request: Request) -> str | None:
        """Returns why the request has to end; None if it need not."""
        matcher = matcher_of(request)
        reason = self._drive(matcher, lambda: matcher.accept(request.token_ids[-1:]))
        return None if reason == _BROKEN and matcher.heal() else reason

    def _fill(self, request: Request, words: MaskRows) -> str | None:
        matcher = matcher_of(request)
        reason = self._drive(matcher, lambda: matcher.fill(words))
        if reason == _BROKEN and matcher.heal():
            return self._drive(matcher, lambda: matcher.fill(words))
        return reason

    def _drive(self, matcher: Matcher, call: Callable[[], None]) -> str | None:
        began = self._clock()
        try:
            call()
            failed = matcher.error is not None
        except Exception:  # its words may hold a piece of the answer
            failed = True
        if self._clock() - began > MASK_LIMIT_S:
            return _TOO_SLOW
        return _BROKEN if failed else None

    def _held_back(self, request: Request) -> Collection[int]:
        """Tokens that the request must not sample yet, unless the grammar allows no other."""
        params = request.params
        is_short = request.num_output_tokens < params.min_tokens
        if not (is_short or params.ignore_eos) or request.finished:
            return ()
        held: set[int] = set()
        if is_short:
            held.update(request.stop_token_ids)
        if params.ignore_eos:
            held.update(self._eos_token_ids)
        return [token_id for token_id in held if token_id < self._vocab_size]


def _clear(words: MaskRows, token_ids: Collection[int]) -> None:
    """Take `token_ids` from a mask unless nothing is left without them."""
    before = {token_id // WORD_BITS: words[token_id // WORD_BITS] for token_id in token_ids}
    for token_id in token_ids:
        words[token_id // WORD_BITS] &= _ALL ^ np.uint32(1 << token_id % WORD_BITS)
    if not words.max():
        for word, bits in before.items():
            words[word] = bits
