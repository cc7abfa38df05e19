"""Token masks of the requests that have a matcher, computed between two steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from minisgl.errors import GrammarError
from minisgl.matcher import MASK_LIMIT_S, WORD_BITS, MaskRows
from minisgl.request import Request

# From this many rows on, several threads fill masks, which releases the GIL.
POOL_ROWS = 32
MAX_THREADS = 4

_ALL = np.uint32(0xFFFFFFFF)
_TOO_SLOW = (
    f"a token took over {MASK_LIMIT_S * 1000:g} ms to constrain, for there are too many ways to "
    "read what comes before it; make the schema or grammar smaller, or less ambiguous"
)
# Of tokens that the masks allowed, so that most often a limit of the grammar engine was reached.
_BROKEN = (
    "there are too many ways to read it; make the schema or grammar smaller, or less ambiguous"
)

Failures = list[tuple[Request, GrammarError]]


class MaskFiller:
    """Drives the matchers of an engine's requests, and contains their failures.

    A step waits for its slowest matcher, so a request with one over MASK_LIMIT_S has to end. That
    is processor time, which a busy machine does not prolong.

    A request's failure is returned, and its mask allows everything: nobody else notices.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._last_word = (1 << ((vocab_size - 1) % WORD_BITS + 1)) - 1  # bits of the vocabulary
        self._num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None  # made when it is needed

    def accept(self, requests: Sequence[Request]) -> Failures:
        """Tell each matcher the last token of its request, which was just settled."""
        failures: Failures = []
        now = self._clock()
        for request in requests:
            matcher = request.matcher
            if matcher is None or request.finished:
                continue
            try:
                matcher.accept(request.token_ids[-1:])
                failed = matcher.error is not None
            except Exception:  # its words may hold a piece of the answer
                failed = True
            began, now = now, self._clock()
            if now - began > MASK_LIMIT_S:
                failures.append((request, GrammarError(_TOO_SLOW)))
            elif failed:
                failures.append((request, GrammarError(_BROKEN)))
        return failures

    def fill(self, requests: Sequence[Request], rows: MaskRows) -> Failures:
        """Write the mask of each request's next token: a row each. Those that have ended get ones.

        All tokens of the requests must have been accepted.
        """
        num_parts = self._num_threads if len(requests) >= POOL_ROWS else 1
        if num_parts == 1:
            return self._fill_part(requests, rows)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_parts, "minisgl-masks")

        def fill(first: int) -> Failures:
            return self._fill_part(requests[first::num_parts], rows[first::num_parts])

        return [*chain.from_iterable(self._pool.map(fill, range(num_parts)))]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _fill_part(self, requests: Sequence[Request], rows: MaskRows) -> Failures:
        failures: Failures = []
        for request, words in zip(requests, rows, strict=True):
            if request.finished:
                words.fill(_ALL)
            elif (reason := self._fill_row(request, words)) is not None:
                failures.append((request, GrammarError(reason)))
                words.fill(_ALL)
        return failures

    def _fill_row(self, request: Request, words: MaskRows) -> str | None:
        """Returns why the request has to end; None if it need not."""
        matcher = request.matcher
        assert matcher is not None
        began = self._clock()
        try:
            matcher.fill(words)
            failed = matcher.error is not None
        except Exception:
            failed = True
        if self._clock() - began > MASK_LIMIT_S:
            return _TOO_SLOW
        words[-1] &= self._last_word
        if failed or not words.any():
            return _BROKEN
        held_back = self._held_back(request)
        if held_back:
            _clear(words, held_back)
        return None

    def _held_back(self, request: Request) -> Collection[int]:
        """Tokens that the request must not sample yet, unless the grammar allows no other."""
        held: set[int] = set()
        if request.num_output_tokens < request.params.min_tokens:
            held.update(request.stop_token_ids)
        if request.params.ignore_eos:
            held.update(self._eos_token_ids)
        return [token_id for token_id in held if token_id < self._vocab_size]


def _clear(words: MaskRows, token_ids: Collection[int]) -> None:
    """Take `token_ids` from a mask unless nothing is left without them."""
    before = words.copy()
    for token_id in token_ids:
        words[token_id // WORD_BITS] &= _ALL ^ np.uint32(1 << token_id % WORD_BITS)
    if not words.any():
        words[:] = before
