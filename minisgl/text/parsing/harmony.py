"""Reader of answers in OpenAI's harmony format, in which an answer is a chain of messages:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

Each has a header. The prompt ends with the role of the first one, `<|start|>assistant`. A call is a
message to `functions.NAME`; a header names it after the role or after the channel:

    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
     to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minisgl.text.parsing.calls import CallContext, plain_arguments, read_arguments
from minisgl.text.parsing.reader import Patterns, Reading

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END = "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"  # end the answer as well
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ROLE = "assistant"
NEXT = f"{END}{START}{ROLE}"  # the end of a message that another one follows
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
# Recipients that mean no tool.
EVERYONE = ("", "all", "assistant", "user")
RECIPIENT = re.compile(r"to=([\w.:\-]+)")
TO_BEGUN = re.compile(r"\s*(?:\w+\s+)?t(?:o=|o?$)")
MAX_HEADER_CHARS = 256


def opening(channel: str) -> str:
    """The header of a message in a channel, after its role."""
    return f"{CHANNEL}{channel}{MESSAGE}"


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str = ""


@dataclass(frozen=True, slots=True)
class AnswerSide:
    """What of an answer is told apart, and where the prompt has left it."""

    in_reasoning: bool  # in a message of the analysis
    in_text: bool  # in one of the final channel
    parses_calls: bool
    separates_reasoning: bool


def read_harmony(calls: CallContext, side: AnswerSide) -> Reading[None]:
    """Read an answer."""
    yield from _Answer(calls, side).read()


class _Answer:
    """An answer that is being read."""

    def __init__(self, calls: CallContext, side: AnswerSide) -> None:
        self._calls = calls
        self._reader, self._emitter = calls.reader, calls.emitter
        self._side = side
        markers = (calls.markers[marker] for marker in MARKERS)
        self._start, self._channel, constrain, self._message, end, call, done = markers
        message = self._message
        self._beginnings = (self._start, self._channel, message, constrain, " to=", "to=")
        self._next = Patterns(self._start, self._channel)
        self._of_header = Patterns(message, self._start, end, call, done)
        # A message without an end goes as far as the next header.
        self._of_body = Patterns(end, call, done, self._start, self._channel)
        self._named = re.compile(rf"{re.escape(self._channel)}\s*(\w+)")

    def read(self) -> Reading[None]:
        side, found = self._side, self._start
        if side.in_reasoning:
            found = yield from self._body(_Header(ANALYSIS))
        elif side.in_text:
            found = yield from self._body(_Header(FINAL))
        elif not (yield from self._reader.starts(*self._beginnings)):
            found = yield from self._body(_Header(FINAL))  # of a model that writes no headers
        while found:
            if found not in (self._start, self._channel):
                found = yield from self._reader.until(self._next, self._emitter.text)
            elif isinstance(header := (yield from self._header(found)), _Header):
                found = yield from self._body(header)
            else:
                found = header

    def _header(self, opening: str) -> Reading[_Header | str]:
        """Read a header whose `opening` has been read; what has ended it where it is broken."""
        parts = [opening] if opening == self._channel else []
        found = yield from self._reader.until(self._of_header, parts.append)
        text = "".join(parts)
        if found == self._message:
            channel, recipient = self._named.search(text), RECIPIENT.search(text)
            default = COMMENTARY if recipient else FINAL
            return _Header(
                channel[1] if channel else default, recipient[1].rstrip(".:") if recipient else ""
            )
        begun = self._channel in text or TO_BEGUN.match(text) or ROLE.startswith(text.strip())
        if not begun or len(text) > MAX_HEADER_CHARS:  # it is no beginning of a header
            self._emitter.next_message()
            self._emitter.text(text)
        return found

    def _body(self, header: _Header) -> Reading[str]:
        """Read a message; returns the marker that has ended it, "" at the end of the answer."""
        reader, emitter = self._reader, self._emitter
        name = self._tool(header.recipient)
        if name and self._side.parses_calls:
            return (yield from self._call(name))
        # What goes to a tool that is no function of the request's is not for the user.
        to_tool = not name and header.recipient not in EVERYONE
        is_thought = header.channel == ANALYSIS or to_tool
        if not (is_thought and self._side.separates_reasoning):
            emitter.next_message()
            return (yield from reader.until(self._of_body, emitter.text))
        emitter.open_reasoning()
        emitter.next_message()
        if found := (yield from reader.until(self._of_body, emitter.text)):
            emitter.close_reasoning()
        return found

    def _call(self, name: str) -> Reading[str]:
        """Read the arguments of a call; what follows them in the message is content."""
        reader, put = self._reader, self._emitter.arguments
        self._calls.start(name)
        parts: list[str] = []
        is_object = (yield from reader.peek()) == "{"
        if is_object:
            yield from read_arguments(reader, put)
        found = yield from reader.until(self._of_body, parts.append)
        rest = "".join(parts).strip()
        if not is_object and (found or reader.natural or parts):
            put(plain_arguments(rest or "null"))
        self._emitter.end_call()
        if is_object:
            self._emitter.text(rest.lstrip("} \n"))  # brackets too many, as small models write them
        return found

    def _tool(self, recipient: str) -> str:
        """The function that a recipient is; "" for none. Its namespace may be forgotten."""
        if recipient.startswith(FUNCTIONS):
            return recipient.removeprefix(FUNCTIONS)
        return recipient if recipient in self._calls.tools else ""
