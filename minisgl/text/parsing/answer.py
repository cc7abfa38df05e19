"""The incremental parser of one answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minisgl.events import Event
from minisgl.text.parsing.call_format import CallFormat
from minisgl.text.parsing.calls import Arrivals, CallContext
from minisgl.text.parsing.emitter import Emitter
from minisgl.text.parsing.formats import MAX_HELD_IN_TEXT, MessageFormat, ReasoningFormat
from minisgl.text.parsing.harmony import AnswerSide
from minisgl.text.parsing.reader import FIRST_MARK, Patterns, Reader, Reading


class AnswerParser:
    """Turns the tokens of one answer into events, as early as they are certain.

    Give it the answer in pieces of any size, then end it: the events joined do not depend on the
    pieces. Nothing that was emitted is taken back. Reasoning blocks and calls may follow each
    other in any order. A call in a block that closes later is thought, so the text from its opening
    is held back until the block closes or the answer ends; in a block that never closes, the call
    ends the block. Without a call such a block goes on to the end of the answer. What is not a call
    after all is content.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        marker_ids: Mapping[str, int],
        hidden: Iterable[str] = (),
        in_reasoning: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        only_calls: bool = False,
        held_to: Iterable[str] = (),
        text_opening: str = "",
        messages: MessageFormat | None = None,
        in_text: bool = False,
    ) -> None:
        """`marker_ids`: the markers that are one token, which are found by it and never by text.

        `hidden` are markers without a text where they are no markup. `in_reasoning`: the prompt has
        opened a block. `tools`: the JSON Schemas of the arguments, by the names of the tools.
        `only_calls`: nothing but calls is written, so that what is left of one that was cut in
        front of its arguments is no content. `held_to`: the tools that a grammar holds calls
        to; calls without a marker are only what begins as the grammar spells these.
        `text_opening`: what an answer that begins with a text begins with, which is markup.
        `messages`: how an answer is a chain of them; `in_text`: the prompt has begun the one that
        the user sees.
        """
        self.num_reasoning_tokens = 0
        self._has_closed = False  # a block
        marks = {text: chr(FIRST_MARK + index) for index, text in enumerate(marker_ids)}
        self._mark_of = {marker_ids[text]: mark for text, mark in marks.items()}
        self.marker_ids = self._mark_of.keys()
        spellings = {mark: text for text, mark in marks.items()}
        spellings |= {marks[text]: "" for text in hidden if text in marks}
        self._calls = calls
        self._only_calls = only_calls
        self._text_opening = text_opening
        self._reader = Reader()
        self._emitter = Emitter(spellings)
        markers = Arrivals(marks)
        self._context = CallContext(self._reader, self._emitter, markers, tools or {})

        self._open = self._close = self._title = ""
        if reasoning is not None:
            self._title = reasoning.title
            self._open = marks.get(reasoning.open, reasoning.open)
            self._close = marks.get(reasoning.close, reasoning.close)
        blocks = [text for text in (self._open, self._close) if text]
        openings = [markers[text] for text in (calls.openings if calls else ())]
        self._in_text = calls.in_text if calls else ()
        # What begins as calls in a text do is told apart by the format itself.
        openings = [text for text in openings if not text.startswith(self._in_text)]
        self._spelled: tuple[str, ...] = ()  # what calls without a marker begin with
        if calls is not None and calls.bare:
            self._spelled = tuple(map(calls.spelling.first, held_to))
            if len(self._spelled) > MAX_HELD_IN_TEXT:
                self._in_text = ()
        if calls is not None and self._spelled and (mark := calls.spelling.after_text):
            self._spelled += (*(mark + text for text in self._spelled), mark + text_opening)
        if self._spelled:
            openings = [text for text in openings if text in marks.values()]
        self._closing = markers[calls.closing] if calls and calls.closing else ""
        in_content = [*blocks, *openings, *self._in_text, *filter(None, [self._closing])]
        self._in_content = Patterns(*in_content)
        self._in_reasoning = Patterns(*blocks, *openings)
        self._end_of_block = Patterns(self._close)
        self._reading: Reading[None] | None
        if messages is None:
            self._reading = self._answer(in_reasoning)
        else:
            side = AnswerSide(in_reasoning, in_text, calls is not None, reasoning is not None)
            self._reading = self._chain(messages, side)
        next(self._reading)

    @property
    def is_reasoning(self) -> bool:
        """Whether a block has been opened and not closed."""
        return self._emitter.is_reasoning

    def feed(self, pieces: Iterable[tuple[int, str]]) -> list[Event]:
        """Go on with the next tokens, each with the text that it completes.

        A marker's token comes with what its own spelling is not part of: the rest of a character
        that it has broken off, in general nothing.
        """
        for token_id, text in pieces:
            before = self._emitter.is_reasoning
            self._advance(text + self._mark_of.get(token_id, ""))
            self.num_reasoning_tokens += before or self._emitter.is_reasoning
        return self._emitter.take()

    def finish(self, natural: bool, rest: str = "") -> list[Event]:
        """End the answer, after the `rest` of its text, which no token has completed.

        `natural`: the model has ended it, so what is open is complete as it stands.
        """
        self._reader.end(natural)
        if self._only_calls and not natural:
            self._emitter.is_muted = True
        self._advance(rest)
        return self._emitter.take()

    def _advance(self, text: str) -> None:
        if self._reading is None or not (text or self._reader.ended):
            return
        self._reader.feed(text)
        try:
            next(self._reading)
        except StopIteration:
            self._reading = None

    def _answer(self, in_reasoning: bool) -> Reading[None]:
        yield
        if in_reasoning:
            yield from self._block()
        if not (yield from self._reader.skip(self._text_opening)):
            yield from self._bare_call()
        emitter = self._emitter
        while found := (yield from self._reader.until(self._in_content, emitter.text)):
            if found == self._close:
                if not emitter.begun:
                    emitter.close_reasoning()  # of a block that the prompt has closed
                elif self._has_closed or not emitter.at_line_start:
                    emitter.text(found)  # the answer speaks of the marker
            elif found == self._open:
                if emitter.at_line_start:
                    yield from self._reader.skip(self._title)
                    yield from self._block()
                    yield from self._bare_call()
                else:
                    emitter.text(found)
            elif found == self._closing:
                if not emitter.num_calls or not emitter.at_line_start:
                    emitter.text(found)
            else:
                yield from self._call(found)
        emitter.end()

    def _chain(self, messages: MessageFormat, side: AnswerSide) -> Reading[None]:
        """Read an answer that is a chain of messages."""
        yield
        yield from messages.read(self._context, side)
        self._emitter.end()

    def _block(self) -> Reading[None]:
        """Read a reasoning block whose opening has been read."""
        emitter = self._emitter
        emitter.open_reasoning()
        may_close = True
        while found := (yield from self._reader.until(self._in_reasoning, emitter.text)):
            if found == self._close:
                emitter.close_reasoning()
                self._has_closed = True
                return
            if found == self._open:
                if not emitter.at_line_start:
                    emitter.text(found)
                continue
            may_close = may_close and (yield from self._thought(found))
            if may_close or (yield from self._call(found)):
                return

    def _thought(self, opening: str) -> Reading[bool]:
        """Read to the end of the block: then the call of `opening` is thought. Returns whether the
        block has an end; if not, what follows the opening is still to be read."""
        parts: list[str] = []
        num_reasoning_tokens = self.num_reasoning_tokens
        if (yield from self._reader.until(self._end_of_block, parts.append)):
            self._emitter.text(opening + "".join(parts))
            self._emitter.close_reasoning()
            self._has_closed = True
            return True
        self.num_reasoning_tokens = num_reasoning_tokens
        self._reader.unread("".join(parts))
        return False

    def _call(self, opening: str) -> Reading[bool]:
        """Read calls after their opening; what turns out to be none is text."""
        assert self._calls is not None and self._calls.read is not None
        reader, text = self._reader, opening
        if opening in self._in_text:
            reader.unread(opening)
            if not (yield from self._is_spelled()):
                self._emitter.text(reader.take(len(opening)))
                return False
            text = ""
        reader.record()
        if text:
            yield from reader.skip_all(opening)  # which may be written twice
        found = yield from self._calls.read(self._context, opening)
        if not found:
            self._emitter.text(text + reader.recorded())
        return found

    def _bare_call(self) -> Reading[None]:
        """Read calls that nothing announces, where an answer begins."""
        if self._calls is None or self._calls.read is None or not self._calls.bare:
            return
        self._reader.record()
        yield from self._reader.peek()
        if not (yield from self._is_spelled()) or not (
            yield from self._calls.read(self._context, "")
        ):
            self._emitter.text(self._reader.recorded())

    def _is_spelled(self) -> Reading[bool]:
        """Whether what comes next may begin calls without a marker."""
        if not self._spelled:
            return True
        return bool((yield from self._reader.starts(*self._spelled)))
