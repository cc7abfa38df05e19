"""Lets an answer begin with reasoning, which no grammar constrains."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from minisgl.grammar.matching import REFUSED, GrammarMatcher
from minisgl.grammar.vocabulary import Vocabulary
from minisgl.matcher import MaskRows, Matcher, allow, forbid
from minisgl.text.parsing.selection import AnswerFormat

MAX_LINE_BREAKS = 2  # between the end of the reasoning and the beginning of the answer
CROSSED = "The end of the reasoning and the beginning of the answer are one token."


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """How the reasoning of one answer begins and ends.

    The grammar is that of what follows it. With a budget, the closing marker is forced after so
    many tokens of reasoning.
    """

    closing: str  # the marker's text
    closing_ids: tuple[int, ...]  # its tokens
    opening_ids: tuple[int, ...] = ()  # of a model that opens the block itself
    is_open: bool = False  # by the prompt
    budget: int | None = None
    following_ids: tuple[int, ...] = ()  # the tokens that must follow the marker
    barred_ids: tuple[int, ...] = ()  # what reasoning cannot have, for it would end it


async def reasoning_gate(
    form: AnswerFormat,
    encode: Callable[..., Awaitable[list[int]]],
    *,
    is_open: bool,
    is_closed: bool,
    budget: int | None = None,
) -> ReasoningGate | None:
    """The gate of an answer in a model's format; None if the model does not reason.

    is_open, is_closed: see `opens_reasoning`, `closes_reasoning` of the format.
    encode: `AsyncEngine.encode`, for a marker that is not one token.
    """
    if form.reasoning is None:
        return None
    open, close = form.reasoning.open, form.reasoning.close

    async def ids_of(text: str) -> tuple[int, ...]:
        marker = form.marker_ids.get(text)
        if marker is not None or not text:
            return () if marker is None else (marker,)
        return tuple(await encode(text, add_special_tokens=False))

    # Otherwise text could begin like a marker, and go on in another way.
    has_opening = open in form.marker_ids or form.messages is not None
    may_open = has_opening and not is_closed
    return ReasoningGate(
        close,
        await ids_of(close),
        opening_ids=await ids_of(open) if may_open else (),
        is_open=is_open,
        budget=budget,
        following_ids=await ids_of(form.reasoning.after),
        barred_ids=tuple(
            token_id
            for text, token_id in form.marker_ids.items()
            if form.messages is not None and text != close
        ),
    )


class _Stage(enum.Enum):
    BEFORE = enum.auto()  # the first tokens decide whether there is any reasoning
    INSIDE = enum.auto()
    FOLLOWING = enum.auto()  # what must come next is forced
    BETWEEN = enum.auto()  # line breaks may follow
    AFTER = enum.auto()


class GatedMatcher:
    """A Matcher of reasoning and what follows it; `inner`: None constrains only the reasoning."""

    def __init__(
        self, gate: ReasoningGate, vocabulary: Vocabulary, inner: GrammarMatcher | None
    ) -> None:
        self._gate = gate
        self._vocabulary = vocabulary
        self._inner = inner
        self._stage = _Stage.INSIDE if gate.is_open else _Stage.BEFORE
        self._closing = gate.closing.encode()
        self._num_opened = 0  # tokens of the opening marker, with which the answer may begin too:
        self._ahead: GrammarMatcher | None = None  # `inner` after them
        self._num_tokens = 0  # of reasoning
        self._num_forced = 0  # tokens of the closing marker that the budget has forced
        self._tail = b""  # of the reasoning, as much as may begin the marker
        self._num_followed = 0
        self._num_line_breaks = 0
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error or (self._inner.error if self._inner is not None else None)

    @property
    def finished(self) -> bool:
        return self._error is None and self._inner is not None and self._inner.finished

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        after = self._stage in (_Stage.BETWEEN, _Stage.AFTER)
        return self._inner is None or (after and self._inner.may_end)

    @property
    def grammar(self) -> GrammarMatcher | None:
        """The matcher of the answer, once nothing else decides what may follow."""
        return self._inner if self._stage is _Stage.AFTER else None

    def copy(self) -> GatedMatcher:
        """A matcher in the same state, which goes its own way."""
        copied = GatedMatcher(self._gate, self._vocabulary, None)
        for name, value in vars(self).items():
            setattr(copied, name, value.copy() if isinstance(value, GrammarMatcher) else value)
        return copied

    # -- tokens ------------------------------------------------------------------------------------

    def accept(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self._stage is _Stage.AFTER:
                self._accept_after(token_ids[index:])
                return
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        if self._stage is _Stage.INSIDE:
            self._accept_reasoning(token_id)
        elif self._stage is _Stage.FOLLOWING:
            self._accept_following(token_id)
        elif self._stage is _Stage.BEFORE and token_id == self._next_opening:
            self._accept_opening(token_id)
        elif self._stage is _Stage.BETWEEN and self._is_line_break(token_id):
            self._num_line_breaks += self._vocabulary.line_breaks[token_id]
        else:
            self._stage = _Stage.AFTER
            self._inner, self._ahead = self._ahead or self._inner, None
            self._accept_after([token_id])

    def _accept_opening(self, token_id: int) -> None:
        self._num_opened += 1
        if self._num_opened == len(self._gate.opening_ids):
            self._stage, self._ahead = _Stage.INSIDE, None
        elif self._inner is not None:
            self._ahead = self._ahead or self._inner.copy()
            self._ahead.accept([token_id])

    def _accept_following(self, token_id: int) -> None:
        following = self._gate.following_ids
        if token_id != following[self._num_followed]:
            self._error = REFUSED
        self._num_followed += 1
        if self._num_followed == len(following):
            self._stage = _Stage.AFTER

    def _accept_after(self, token_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)

    def _accept_reasoning(self, token_id: int) -> None:
        gate = self._gate
        if self._is_forced:
            self._num_forced += 1
            closed = self._num_forced == len(gate.closing_ids)
        elif len(gate.closing_ids) == 1:
            closed = token_id == gate.closing_ids[0]
        else:
            closed = self._closes_as_text(token_id)
        self._num_tokens += 1
        if closed:
            self._stage = _Stage.FOLLOWING if gate.following_ids else _Stage.BETWEEN

    def _closes_as_text(self, token_id: int) -> bool:
        text = self._tail + self._vocabulary.token_bytes[token_id]
        _, found, rest = text.partition(self._closing)
        self._tail = text[-(len(self._closing) - 1) :]
        if found and rest.strip():
            self._error = CROSSED
        return bool(found)

    @property
    def _next_opening(self) -> int | None:
        return next(iter(self._gate.opening_ids[self._num_opened :]), None)

    @property
    def _is_forced(self) -> bool:
        return self._gate.budget is not None and self._num_tokens >= self._gate.budget

    def _is_line_break(self, token_id: int) -> bool:
        count = self._vocabulary.line_breaks.get(token_id, MAX_LINE_BREAKS + 1)
        return self._num_line_breaks + count <= MAX_LINE_BREAKS

    # -- masks -------------------------------------------------------------------------------------

    def fill(self, words: MaskRows) -> None:
        if self._stage is _Stage.INSIDE:
            self._fill_reasoning(words)
        elif self._stage is _Stage.FOLLOWING:
            words.fill(0)
            allow(words, self._gate.following_ids[self._num_followed])
        else:
            self._fill_answer(words)

    def _fill_answer(self, words: MaskRows) -> None:
        inner = self._ahead or self._inner
        if inner is None:
            words.fill(0xFFFFFFFF)
        elif inner.error is not None and inner is self._ahead:
            words.fill(0)  # the answer does not begin as the reasoning does
        else:
            inner.fill(words)
        if self._stage is _Stage.BEFORE and self._gate.budget != 0:
            if (token_id := self._next_opening) is not None:
                allow(words, token_id)
        elif self._stage is _Stage.BETWEEN and inner is not None:
            for token_id in self._vocabulary.line_breaks:
                if self._is_line_break(token_id):
                    allow(words, token_id)

    def _fill_reasoning(self, words: MaskRows) -> None:
        if self._is_forced:
            words.fill(0)
            allow(words, self._gate.closing_ids[self._num_forced])
            return
        if self._inner is None:
            words.fill(0xFFFFFFFF)
        else:
            words[:] = self._vocabulary.unfinished  # an answer must follow
        for token_id in self._gate.barred_ids:
            forbid(words, token_id)
        if len(self._gate.closing_ids) > 1 and (begun := self._begun()):
            for token_id in self._vocabulary.crossing(self._closing[begun:]):
                forbid(words, int(token_id))

    def heal(self) -> bool:
        return self._error is None and self._inner is not None and self._inner.heal()

    def _begun(self) -> int:
        """How much of the closing marker the reasoning ends with."""
        lengths = range(len(self._closing) - 1, 0, -1)
        return next((n for n in lengths if self._tail.endswith(self._closing[:n])), 0)


def sole_grammar(matcher: Matcher | None) -> GrammarMatcher | None:
    """The grammar that alone decides which tokens `matcher` allows next; None if there is more."""
    if isinstance(matcher, GatedMatcher):
        return matcher.grammar
    return matcher if isinstance(matcher, GrammarMatcher) else None
