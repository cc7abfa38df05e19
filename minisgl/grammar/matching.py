"""Follows answers through their grammars."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import LLMatcher

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
