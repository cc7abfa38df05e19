"""Follows answers through their grammars."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import LLExecutor, LLMatcher

from minisgl.matcher import MaskRows

REFUSED = "A token is not one that the grammar allows."
TOO_COMPLEX = "The grammar is too complex at this place of the answer."


class GrammarMatcher:
    """A `minisgl.matcher.Matcher` on llguidance's."""

    __slots__ = ("_ended", "_eos_token_ids", "_matcher", "error")

    def __init__(self, matcher: LLMatcher, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._ended = False  # by a token of these
        self.error: str | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        if self.error is not None or not token_ids:
            return
        text = [*token_ids]
        # llguidance allows each of these at the end, and takes the first only.
        ended = text[-1] in self._eos_token_ids
        if ended:
            text.pop()
        taken = not (self._ended and text) and self._matcher.consume_tokens(text)
        if not taken or (ended and not self._matcher.is_accepting()):
            self.error = REFUSED
        self._ended = ended

    def fill(self, words: MaskRows) -> None:
        """Raises ValueError for a row of another size."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.error is None and self._matcher.is_error():
            self.error = TOO_COMPLEX

    @property
    def finished(self) -> bool:
        return self.error is None and (self._ended or self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        return self.error is None and self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """A matcher in the same state, which goes its own way."""
        copied = GrammarMatcher(self._matcher.deep_copy(), self._eos_token_ids)
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
            if matcher.error or matcher._ended or token_id in matcher._eos_token_ids:
                matcher.accept([token_id])
            else:
                texts.append((matcher, token_id))
        taken = self._executor.consume_token_par([(m._matcher, id) for m, id in texts])
        for (matcher, _), was_taken in zip(texts, taken, strict=True):
            if not was_taken:
                matcher.error = REFUSED

    def fill(
        self, matchers: Sequence[GrammarMatcher], indices: Sequence[int], rows: MaskRows
    ) -> None:
        """Write the mask of each matcher to the row at its index. Raises ValueError as `fill`."""
        pairs = [(m._matcher, index) for m, index in zip(matchers, indices, strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, rows.ctypes.data, rows.strides[0], len(rows))
        for matcher in matchers:
            if matcher.error is None and matcher._matcher.is_error():
                matcher.error = TOO_COMPLEX
