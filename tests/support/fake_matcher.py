"""A matcher without a grammar: a rule says which tokens may follow an output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from minisgl.matcher import MaskRows, Matcher
from minisgl.parts.masks.host import Constraint

Rule = Callable[[Sequence[int]], Collection[int]]


class FakeMatcher:
    """Allows what `rule` says of the output so far, which it compares with what it is told.

    It is finished where nothing may follow. fails_at: the number of tokens at which it reports an
    error; raises_at: at which `fill` raises; stalls_at: at which `fill` calls `stall`.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        fails_at: int = -1,
        raises_at: int = -1,
        stalls_at: int = -1,
        stall: Callable[[], None] = lambda: None,
    ) -> None:
        self.rule = rule
        self.output: list[int] = []
        self.error: str | None = None
        self._fails_at = fails_at
        self._raises_at = raises_at
        self._stalls_at = stalls_at
        self._stall = stall

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id in self.rule(self.output), "a token was sampled against the mask"
            self.output.append(token_id)
        if len(self.output) == self._fails_at:
            self.error = "as told"

    def fill(self, words: MaskRows) -> None:
        if len(self.output) == self._raises_at:
            raise RuntimeError("as told")
        if len(self.output) == self._stalls_at:
            self._stall()
        words.fill(0)
        for token_id in self.rule(self.output):
            words[token_id // 32] |= 1 << token_id % 32

    def heal(self) -> bool:
        return False

    @property
    def finished(self) -> bool:
        return not self.rule(self.output)


def held_to(matcher: Matcher | None) -> tuple[Constraint, ...]:
    """What a request asks whose output this matcher constrains; None: nothing."""
    return () if matcher is None else (Constraint(matcher),)


def tokens_after(vocab_size: int, num_allowed: int = 5) -> Rule:
    """A few tokens, others after each output."""

    def rule(output: Sequence[int]) -> set[int]:
        first = sum(output) * 7 + len(output) * 3
        return {(first + 11 * step) % vocab_size for step in range(num_allowed)}

    return rule


def ending_at(length: int, rule: Rule) -> Rule:
    """The rule's tokens up to `length` tokens, then nothing."""
    return lambda output: rule(output) if len(output) < length else ()


def without(token_id: int, rule: Rule) -> Rule:
    return lambda output: {token for token in rule(output) if token != token_id}
