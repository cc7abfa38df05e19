"""Makes events of what has been read, and decides which blanks are a part of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from minisgl.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
)
from minisgl.text.parsing.reader import BLANKS, MARKS

MAX_HELD_CHARS = 1000
GAP = "\n\n"
GAP_TEXT = ContentText(GAP)  # told by its identity, as the model has not written it
ANY_MARK = re.compile(f"[{MARKS}]")


class Emitter:
    """Collects the events of one answer.

    Line breaks after the opening of a block and on both sides of its closing are markup, and so
    are blanks around calls. Texts of one kind that markup comes between have GAP between them.
    The last MAX_HELD_CHARS blanks at the end of a text are held back until it is known what
    follows; at the end of the answer they are text.
    """

    def __init__(self, spellings: Mapping[str, str]) -> None:
        """`spellings`: the text of each mark."""
        self.num_calls = 0
        self.is_reasoning = False
        self._spellings = spellings
        self._events: list[Event] = []
        self._arguments: list[str] = []  # of the call
        self._dropped = ""  # the characters that are no text until another one comes
        self._held = ""
        self.begun = False  # text has been emitted since the last markup
        # Of reasoning and content: it has a text, and markup has come since.
        self._has_spoken = {True: False, False: False}
        self._is_apart = {True: False, False: False}
        self.is_muted = False  # all content from here on is left out

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def at_line_start(self) -> bool:
        """Whether nothing but blanks has been written in this line."""
        return not self.begun or "\n" in self._held

    def text(self, text: str) -> None:
        """Go on with the reasoning or the content."""
        text = self.spelled(text).lstrip(self._dropped)
        if not text:
            return
        self._dropped = ""
        end = len(text.rstrip("\n" if self.is_reasoning else BLANKS))
        if end:
            self._put(self._held + text[:end])
            self._held = ""
        self._held += text[end:]
        if len(self._held) > MAX_HELD_CHARS:
            self._put(self._held[:-MAX_HELD_CHARS])
            self._held = self._held[-MAX_HELD_CHARS:]

    def open_reasoning(self) -> None:
        self._drop("\n")
        self.is_reasoning = True

    def close_reasoning(self) -> None:
        self._drop("\n")
        self.is_reasoning = False

    def next_message(self) -> None:
        """Begin another message of the same answer."""
        self._drop("\n")

    def start_call(self, name: str) -> None:
        self._drop(BLANKS)
        self.is_reasoning = False  # a call ends a block that was left open
        self._events.append(CallStart(self.num_calls, self.spelled(name)))

    def arguments(self, text: str) -> None:
        """Go on with the arguments of the call, which are text already or JSON."""
        if text := self.spelled(text):
            self._events.append(CallArguments(self.num_calls, text))
            self._arguments.append(text)

    def end_call(self) -> None:
        self._events.append(CallEnd(self.num_calls, _is_object("".join(self._arguments))))
        self._arguments = []
        self.num_calls += 1

    def end(self) -> None:
        """End the answer: what is held back is text."""
        if self._held:
            self._put(self._held)
            self._held = ""

    def _drop(self, characters: str) -> None:
        """Leave out what is held back, and `characters` until there is another one."""
        self._held = ""
        self._dropped = characters
        self.begun = False
        self._is_apart = {**self._has_spoken}

    def _put(self, text: str) -> None:
        kind = self.is_reasoning
        is_apart, self._is_apart[kind] = self._is_apart[kind], False
        self.begun = self._has_spoken[kind] = True
        if self.is_reasoning:
            self._events.append(ReasoningText(GAP + text if is_apart else text))
        elif not self.is_muted:
            self._events += (GAP_TEXT, ContentText(text)) if is_apart else (ContentText(text),)

    def spelled(self, text: str) -> str:
        """A text with the spellings of its marks."""
        if not self._spellings or text.isascii():
            return text
        return ANY_MARK.sub(lambda mark: self._spellings[mark[0]], text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(constant: str) -> None:
    """Raise ValueError for NaN and the infinities, which Python takes for JSON."""
    raise ValueError(constant)
