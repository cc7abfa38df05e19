"""Follows answers through their grammars."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from llguidance import LLExecutor, LLMatcher

from minisgl.matcher import MaskRows

REFUSED = "A token is not one that the grammar allows."
TOO_COMPLEX = "The grammar is too complex at this place of the answer."
# Processor time for which a step may be held up to compile a grammar once more. A grammar of 200
# tools takes half of it.
RENEWAL_SECONDS = 0.1


class SharedGrammar:
    """A compiled grammar, from which matchers are copied.

    Copies share one lexer. Where an answer leads it beyond a limit, llguidance marks the lexer as
    broken, and it then fails for every copy. So the grammar is compiled again, and each of the
    other answers goes on with a copy that works.
    """

    def __init__(self, compile: Callable[[], LLMatcher], eos_token_ids: Collection[int]) -> None:
        """compile: returns a matcher at the beginning, with its first mask computed."""
        self._compile = compile
        self.eos_token_ids = eos_token_ids
        began = time.thread_time()
        self._template = compile()
        self._seconds = time.thread_time() - began

    @property
    def compile_error(self) -> str:
        """What was wrong when the grammar was compiled; "" if nothing was."""
        return self._template.get_error()

    @property
    def is_broken(self) -> bool:
        """Whether the lexer has failed, for every matcher."""
        probe = self._template.deep_copy()
        probe.compute_bitmask()
        return probe.is_error()

    def matcher(self) -> GrammarMatcher:
        """A matcher for one answer, at its beginning."""
        return GrammarMatcher(self, self._template)

    def renewed(self, template: LLMatcher) -> LLMatcher | None:
        """Another template, for a matcher that has failed on this one.

        None if it would fail again, or if to compile the grammar takes too long.
        """
        if self.is_broken and self._seconds <= RENEWAL_SECONDS:
            self._template = self._compile()
        return None if self._template is template else self._template


class GrammarMatcher:
    """A `minisgl.matcher.Matcher` on llguidance's."""

    __slots__ = ("_ended", "_grammar", "_matcher", "_refused", "_taken", "_template", "error")

    def __init__(self, grammar: SharedGrammar, template: LLMatcher) -> None:
        self._grammar = grammar
        self._template = template
        self._matcher = template.deep_copy()
        self._taken: list[int] = []  # the tokens of the answer's text
        self._refused: Sequence[int] = ()  # the tokens at which the matcher failed
        self._ended = False  # by a token of `eos_token_ids`
        self.error: str | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        if self.error is not None or not token_ids:
            return
        text = [*token_ids]
        # llguidance allows each of these at the end, and takes the first only.
        ends = text[-1] in self._grammar.eos_token_ids
        if ends:
            text.pop()
        taken = not (self._ended and text) and self._matcher.consume_tokens(text)
        if taken and (not ends or self._matcher.is_accepting()):
            self._taken += text
            self._ended = ends
        else:
            self._refuse(token_ids)

    def _refuse(self, token_ids: Sequence[int]) -> None:
        self._refused = token_ids
        self.error = REFUSED

    def fill(self, words: MaskRows) -> None:
        """Raises ValueError for a row of another size."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.error is None and self._matcher.is_error():
            self.error = TOO_COMPLEX

    def heal(self) -> bool:
        template = self._grammar.renewed(self._template)
        if template is None:
            return False
        taken, refused, ended = self._taken, self._refused, self._ended
        self._template, self._matcher = template, template.deep_copy()
        self._taken, self._refused, self._ended, self.error = [], (), False, None
        self.accept(taken)
        self.accept(refused)
        self._ended = self._ended or ended
        return self.error is None

    @property
    def finished(self) -> bool:
        return self.error is None and (self._ended or self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        return self.error is None and self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """A matcher in the same state, which goes its own way."""
        copied = GrammarMatcher(self._grammar, self._template)
        copied._matcher = self._matcher.deep_copy()
        copied._taken, copied._refused = [*self._taken], self._refused
        copied._ended, copied.error = self._ended, self.error
        return copied


class GrammarPool:
    """Drives many grammars at once, on threads of llguidance's own and without the GIL.

    Python threads that call a matcher each gain nothing: a mask takes 10 microseconds, and so
    does waiting for the GIL after it.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def accept(self, matchers: Sequence[GrammarMatcher], token_ids: Sequence[int]) -> None:
        """Tell each matcher its next token, as `GrammarMatcher.accept` does."""
        texts: list[tuple[GrammarMatcher, int]] = []
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if matcher.error or matcher._ended or token_id in matcher._grammar.eos_token_ids:
                matcher.accept([token_id])
            else:
                texts.append((matcher, token_id))
        if not texts:  # llguidance takes at least one
            return
        taken = self._executor.consume_token_par([(m._matcher, id) for m, id in texts])
        for (matcher, token_id), was_taken in zip(texts, taken, strict=True):
            if was_taken:
                matcher._taken.append(token_id)
            else:
                matcher._refuse([token_id])

    def fill(
        self, matchers: Sequence[GrammarMatcher], indices: Sequence[int], rows: MaskRows
    ) -> None:
        """Write the mask of each matcher to the row at its index. Raises ValueError as `fill`."""
        pairs = [(m._matcher, index) for m, index in zip(matchers, indices, strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, rows.ctypes.data, rows.strides[0], len(rows))
        for matcher in matchers:
            if matcher.error is None and matcher._matcher.is_error():
                matcher.error = TOO_COMPLEX
