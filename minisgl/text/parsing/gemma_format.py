"""Reader of calls as Gemma 4 writes them:

    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,{KEY:true}]}<tool_call|>

Keys have no quotes, and texts have a token of their own for them, so that nothing is escaped. A
model that slips writes JSON or Python instead, or a text without quotes, which then goes as far as
something that may follow a value. What has not only one meaning is content behind the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.text.parsing.alternatives import alternatives, known_types, properties_of
from minisgl.text.parsing.call_format import ArgumentStyle, CallFormat, CallSpelling
from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.json_formats import TOOL_NAME
from minisgl.text.parsing.plain_values import escaped, value_json
from minisgl.text.parsing.python_format import python_as_json
from minisgl.text.parsing.reader import BLANK_RUN, Patterns, Put, Reading

CALL, END_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
PREFIX = "call:"
CLOSINGS = {"{": "}", "[": "]"}
TYPES = {"{": "object", "[": "array"}
QUOTES = ('"', "'")
PLAIN_KEY = re.compile(r"[\w.$\-]+")
WORD = re.compile(r"[\w.+\-]+")
SCALAR = re.compile(r"-?\d[\d.eE+\-]*|true|false|null|True|False|None")
WORDS = {"None": "null", "True": "true", "False": "false"}


def read_gemma(calls: CallContext, opening: str) -> Reading[bool]:
    """Read one call."""
    reader = calls.reader
    if not (yield from reader.skip_next(PREFIX)):
        return False
    name = yield from reader.match(TOOL_NAME)
    if not name or (yield from reader.peek()) != "{":
        return False
    calls.start(name)
    arguments = _Arguments(calls, calls.schema(name))
    yield from arguments.read()
    calls.emitter.end_call()
    calls.emitter.text(" ".join(arguments.unread))
    return True


@dataclass(slots=True)
class _Level:
    """A list or an object that is open, with its schemas, any of which it may satisfy."""

    closing: str
    schemas: list[Mapping[str, Any]]
    keys: set[str] = field(default_factory=set)  # that it has already
    separator: str = ""

    def declares(self, key: str) -> bool:
        return any(key in properties_of(schema) for schema in self.schemas)

    @property
    def is_free(self) -> bool:
        """Whether no schema names its keys."""
        return not any(properties_of(schema) for schema in self.schemas)

    def inner(self, key: str) -> list[object]:
        """The schemas of an item, or of the value of `key`."""
        if self.closing == "]":
            return [schema.get("items", True) for schema in self.schemas]
        found = (properties_of(schema).get(key) for schema in self.schemas)
        return [each for each in found if each is not None]


class _Arguments:
    """Arguments that become JSON while they are read. The last of `_levels` is the innermost."""

    def __init__(self, calls: CallContext, root: Mapping[str, Any]) -> None:
        self.unread: list[str] = []  # what could not be read
        self._reader, self._put, self._root = calls.reader, calls.emitter.arguments, root
        self._call, self._end_call = calls.markers[CALL], calls.markers[END_CALL]
        self._quote = calls.markers[QUOTE]
        self._of_key = Patterns(*":=,{}[]\n", self._quote, self._end_call)
        self._of_word = Patterns(",", ";", "}", "]", self._end_call)
        self._levels: list[_Level] = []

    def read(self) -> Reading[None]:
        reader = self._reader
        self._open(reader.take(1), alternatives(self._root, self._root))
        while self._levels and (char := (yield from reader.peek())):
            if (yield from reader.starts(self._end_call)):
                break
            if char in "}],;":
                self._close(reader.take(1))
            elif self._levels[-1].closing == "]":
                yield from self._value("")
            else:
                yield from self._member()
        reader_ended = reader.ended and not (yield from reader.peek())
        if not (reader_ended and not reader.natural):
            while self._levels:
                self._put(self._levels.pop().closing)
        while (char := (yield from reader.peek())) and char in "}]":  # one too many
            reader.take(1)
        yield from reader.skip(self._end_call)

    def _open(self, bracket: str, schemas: list[Mapping[str, Any]]) -> None:
        self._put(bracket)
        self._levels.append(_Level(CLOSINGS[bracket], schemas))

    def _close(self, char: str) -> None:
        """Close what `char` closes, and all inside of it."""
        while any(level.closing == char for level in self._levels):
            level = self._levels.pop()
            self._put(level.closing)
            if level.closing == char:
                break

    def _member(self) -> Reading[None]:
        """Read a key and its value, or the bracket with which that begins."""
        level, reader = self._levels[-1], self._reader
        reader.record()
        key, found = yield from self._key()
        read = reader.recorded()
        if found not in (":", "="):
            reader.unread(found)
            text = read.removesuffix(found)
            if not text:  # a bracket, or a quote
                text = yield from reader.character()
            self._leave(text)
        elif key in level.keys:
            parts = [read]
            yield from reader.peek()
            yield from self._bare(parts.append)
            self._leave("".join(parts))
        else:
            level.keys.add(key)
            self._put(f"{level.separator}{json.dumps(key, ensure_ascii=False)}: ")
            level.separator = ""
            yield from self._value(key)

    def _leave(self, text: str) -> None:
        self.unread.append(text.replace(self._quote, '"').strip())

    def _key(self) -> Reading[tuple[str, str]]:
        """Read a key, and what is behind it."""
        reader, parts = self._reader, list[str]()
        found = yield from reader.until(self._of_key, parts.append)
        if found == self._quote and not parts:
            found = yield from reader.until(self._of_key, parts.append)
            if found == self._quote:
                found = yield from reader.skip_next(":", "=")
        key = "".join(parts).strip()
        if key[:1] in QUOTES and key[:1] == key[-1:]:
            key = key[1:-1]
        return key, found

    def _value(self, key: str) -> Reading[None]:
        """Read a value, or the bracket with which it begins."""
        reader, put, level = self._reader, self._put, self._levels[-1]
        char = yield from reader.peek()
        if char:
            put(level.separator)
        level.separator = ", "
        schemas = [each for schema in level.inner(key) for each in alternatives(self._root, schema)]
        types = known_types(schemas)
        is_text = not types or "string" in types
        if (yield from reader.skip(self._quote)):
            if is_text:
                put('"')
                found = yield from self._text(lambda text: put(escaped(text)))
                if found or reader.natural:
                    put('"')
                return
            parts: list[str] = []
            if (yield from self._text(parts.append)) or reader.natural:
                put(value_json("".join(parts), types))
        elif char in CLOSINGS and not (types and is_text and TYPES[char] not in types):
            self._open(reader.take(1), schemas)
        else:
            words: list[str] = []
            if (yield from self._bare(words.append)) or reader.natural:
                put(_as_json("".join(words).replace(self._quote, '"').strip(), types))

    def _text(self, put: Put) -> Reading[str]:
        """Read a text behind its quote; returns what has ended it, "" for the end of the answer.

        A quote that nothing follows which may follow a value is one of the text.
        """
        reader = self._reader
        closings = "".join(level.closing for level in reversed(self._levels))
        patterns = Patterns(self._quote, closings + self._end_call, self._end_call)
        while found := (yield from reader.until(patterns, put)):
            if found != self._quote:
                reader.unread(found)
                return found
            if (yield from self._ends_value(is_quoted=True)):
                return found
            put('"')
        return ""

    def _bare(self, put: Put) -> Reading[bool]:
        """Read a value that has no quotes of Gemma's; returns whether it has an end."""
        reader = self._reader
        char = yield from reader.peek()
        if char in CLOSINGS:
            yield from reader.value(put)
        elif char in QUOTES:
            put(reader.take(1))
            syntax = Patterns(char, "\\", self._end_call)
            while (found := (yield from reader.until(syntax, put))) == "\\":
                put(found + (yield from reader.character()))
            if found == self._end_call:
                reader.unread(found)
            else:
                put(found)
        while not (yield from self._ends_value()):
            found = yield from reader.until(self._of_word, put)
            reader.unread(found)
            if not found or found == self._end_call or (yield from self._ends_value()):
                return bool(found)
            put(reader.take(1))
        return not (reader.ended and not (yield from reader.peek()))

    def _ends_value(self, *, is_quoted: bool = False) -> Reading[bool]:
        """Whether what comes next may follow a value; nothing is read."""
        return self._reader.ahead(self._follows_value(is_quoted))

    def _follows_value(self, is_quoted: bool) -> Reading[bool]:
        reader, depth, fits = self._reader, len(self._levels), True
        while (char := (yield from reader.peek())) and char in "}]":
            reader.take(1)
            fits = fits and depth > 0 and self._levels[depth - 1].closing == char
            depth -= 1
        if not char or (yield from reader.starts(self._end_call, self._call)):
            return True
        if not fits or depth < 1:
            return False
        if char != ",":
            return depth == len(self._levels) and (yield from self._is_other_key(is_quoted))
        reader.take(1)
        blanks = yield from reader.match(BLANK_RUN)
        if not (char := (yield from reader.peek())) or (yield from reader.starts(self._end_call)):
            return True
        level = self._levels[depth - 1]
        if level.closing == "]":
            if not is_quoted or char in (self._quote[0], *CLOSINGS, *QUOTES, "]"):
                return True
            word = yield from reader.match(WORD)
            behind = yield from reader.peek()
            return bool(SCALAR.fullmatch(word)) and (not behind or behind in ",]")
        if char == "}":
            return True
        key, found = yield from self._key()
        if found not in (":", "="):
            return False
        if level.is_free or (level.declares(key) and key not in level.keys):
            return True
        return found == ":" and not blanks and bool(PLAIN_KEY.fullmatch(key))

    def _is_other_key(self, is_quoted: bool) -> Reading[bool]:
        """Whether a key comes next that another separator than a comma is before, or none."""
        level, separator = self._levels[-1], (yield from self._reader.skip(";"))
        if level.closing == "]" or not (separator or is_quoted):
            return False
        key, found = yield from self._key()
        key = key.strip()
        if found not in (":", "=") or key in level.keys:
            return False
        if level.declares(key):
            return True
        yield from self._reader.match(BLANK_RUN)
        is_text = yield from self._reader.starts(self._quote)
        return level.is_free and bool(PLAIN_KEY.fullmatch(key)) and bool(is_text)


def _as_json(word: str, types: frozenset[str]) -> str:
    """The JSON of a value without Gemma's quotes, which may have those of JSON or Python."""
    if word[:1] in QUOTES and (found := python_as_json(word)) and found.startswith('"'):
        text = json.loads(found)
        return found if not types or "string" in types else value_json(text, types)
    if not types:
        word = WORDS.get(word, word)
    if not word and "string" not in types:
        return "null"
    return value_json(word, types)


GEMMA4 = CallFormat(
    "gemma4",
    CallSpelling(
        head=f"{CALL}{PREFIX}",
        middle="{",
        tail="}" + END_CALL,
        between="",
        arguments=ArgumentStyle.QUOTED,
    ),
    markers=(CALL, END_CALL, QUOTE),
    openings=(CALL,),
    read=read_gemma,
    closing=END_CALL,
)
