"""Follows answers through their grammars."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from minisgl.matcher import MaskRows

REFUSED = "A token is not one that the grammar allows."
TOO_COMPLEX = "The grammar is too complex at this place of the answer."


class GrammarMatcher:
    """A `minisgl.matcher.Matcher` on llguidance's."""

    __slots__ = ("_matcher", "error")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error: str | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        if self.error is None and not self._matcher.consume_tokens(list(token_ids)):
            self.error = REFUSED

    def fill(self, words: MaskRows) -> None:
        """Raises ValueError for a row of another size."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.error is None and self._matcher.is_error():
            self.error = TOO_COMPLEX

    @property
    def finished(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        return self.error is None and self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """A matcher in the same state, which goes its own way."""
        copied = GrammarMatcher(self._matcher.deep_copy())
        copied.error = self.error
        return copied
