"""Reader of calls as Gemma 4 writes them:

    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,{KEY:true}]}<tool_call|>

Keys have no quotes, and texts have a token of their own for them, so that nothing is escaped.
"""

from __future__ import annotations

import json

from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.json_formats import TOOL_NAME
from minisgl.text.parsing.reader import Patterns, Reading
from minisgl.text.parsing.xml_format import escaped, value_json

CALL, END_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
PREFIX = "call:"
CLOSINGS = {"{": "}", "[": "]"}


def read_gemma(calls: CallContext, opening: str) -> Reading[bool]:
    """Read one call."""
    reader = calls.reader
    yield from reader.peek()
    if not (yield from reader.skip(PREFIX)):
        return False
    name = yield from reader.match(TOOL_NAME)
    if not name or (yield from reader.peek()) != "{":
        return False
    calls.start(name)
    yield from _Arguments(calls).read()
    calls.emitter.end_call()
    return True


class _Arguments:
    """Arguments that become JSON while they are read. The last of `_open` is the innermost."""

    def __init__(self, calls: CallContext) -> None:
        self._reader, self._put = calls.reader, calls.emitter.arguments
        self._end_call, self._quote = calls.markers[END_CALL], calls.markers[QUOTE]
        self._of_text = Patterns(self._quote, self._end_call)
        self._of_key = Patterns(":", "}", self._end_call)
        self._of_word = Patterns(",", "}", "]", self._end_call)
        self._open: list[str] = []  # the closings of the lists and objects around
        self._separator = ""

    def read(self) -> Reading[None]:
        reader = self._reader
        self._begin(reader.take(1))
        while self._open and (char := (yield from reader.peek())):
            if (yield from reader.starts(self._end_call)):
                break
            if char in "}],":
                reader.take(1)
                if char != ",":
                    self._put(self._open.pop())
                    self._separator = ", "
            elif self._open[-1] == "]" or (yield from self._key()):
                yield from self._value()
        reader_ended = reader.ended and not (yield from reader.peek())
        if self._open and not (reader_ended and not reader.natural):
            self._put("".join(reversed(self._open)))
        yield from reader.peek()
        yield from reader.skip(self._end_call)

    def _begin(self, bracket: str) -> None:
        self._put(bracket)
        self._open.append(CLOSINGS[bracket])
        self._separator = ""

    def _key(self) -> Reading[bool]:
        """Read a key and its colon; False where there is none."""
        reader, parts = self._reader, list[str]()
        if (yield from reader.skip(self._quote)):
            yield from reader.until(self._of_text, parts.append)
        found = yield from reader.until(self._of_key, parts.append)
        if found != ":":
            reader.unread(found)
            return False
        key = json.dumps("".join(parts).strip(), ensure_ascii=False)
        self._put(f"{self._separator}{key}: ")
        self._separator = ""
        return True

    def _value(self) -> Reading[None]:
        """Read a value, or the bracket with which it begins."""
        reader, put = self._reader, self._put
        char = yield from reader.peek()
        if char:
            put(self._separator)
        self._separator = ", "
        if (yield from reader.skip(self._quote)):
            put('"')
            found = yield from reader.until(self._of_text, lambda text: put(escaped(text)))
            if found or reader.natural:
                put('"')
            if found == self._end_call:
                reader.unread(found)
        elif char in CLOSINGS:
            self._begin(reader.take(1))
        else:
            parts: list[str] = []
            found = yield from reader.until(self._of_word, parts.append)
            reader.unread(found)
            if found or reader.natural:
                put(value_json("".join(parts).strip() or "null", frozenset()))
