"""Reads a text that arrives in pieces.

What reads is a generator: it yields where it needs more text, and is resumed when there is some.
So a format is written down as if the whole text were there. Nothing is looked at twice but the
beginning of a marker at the end of a piece, so the time is linear in the length of the text.

A marker that is a single token of the vocabulary arrives as one character, its *mark*: a lone
surrogate, which no decoded text contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Put: TypeAlias = Callable[[str], object]

MARKS = "\ud800-\udfff"
FIRST_MARK = 0xD800
BLANKS = " \t\r\n"
NOT_BLANK = re.compile(f"[^{BLANKS}]")
BLANK_RUN = re.compile(f"[{BLANKS}]+")


class Patterns:
    """Texts to look for."""

    def __init__(self, *texts: str) -> None:
        self._regex = re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first of them in `text` from `start` on."""
        return self._regex.search(text, start)

    def num_held(self, text: str, start: int) -> int:
        """How much of the end of `text`, `start` at most, may be the beginning of one of them."""
        if not self._longest:
            return 0
        lengths = range(min(len(text) - start, self._longest), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)


class Reader:
    """A text that arrives in pieces, and the place up to which it is read."""

    def __init__(self) -> None:
        self.ended = False
        self.natural = False  # the model has ended the answer; known when it has ended
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None

    def feed(self, piece: str) -> None:
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self, natural: bool) -> None:
        self.ended, self.natural = True, natural

    def record(self) -> None:
        """Keep what is read from here on, until `recorded` or `forget`."""
        self._record = []

    def recorded(self) -> str:
        """What has been read since `record`."""
        read, self._record = "".join(self._record or ()), None
        return read

    def forget(self) -> None:
        self._record = None

    def take(self, num_chars: int) -> str:
        """Read so many characters, which are there."""
        taken = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._record is not None:
            self._record.append(taken)
        return taken

    def unread(self, text: str) -> None:
        """Have what was read last come next again."""
        self._text = text + self._text[self._at :]
        self._at = 0
        if self._record:
            self._record = ["".join(self._record).removesuffix(text)]

    def ahead(self, reading: Reading[T]) -> Reading[T]:
        """What `reading` returns; all that it reads comes next again."""
        outer = self._record
        self.record()
        found = yield from reading
        self._text = self.recorded() + self._text[self._at :]
        self._at, self._record = 0, outer
        return found

    def more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        before = len(self._text) - self._at
        while len(self._text) - self._at == before and not self.ended:
            yield
        return len(self._text) - self._at > before

    def peek(self) -> Reading[str]:
        """Read blanks; returns the character after them, which is not read, or "" at the end."""
        while not (found := NOT_BLANK.search(self._text, self._at)):
            self.take(len(self._text) - self._at)
            if not (yield from self.more()):
                return ""
        if found.start() > self._at:
            self.take(found.start() - self._at)
        return found[0]

    def starts(self, *texts: str) -> Reading[str]:
        """Which of `texts` comes next, without reading it; "" for none."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return text
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if not any(text.startswith(rest) for text in texts):
                return ""
            if not (yield from self.more()):
                return ""

    def begins(self, *texts: str) -> Reading[bool]:
        """Whether one of `texts` comes next, or as much of it as the answer has."""
        found = yield from self.starts(*texts)
        rest = self._text[self._at :]
        return bool(found) or (self.ended and any(text.startswith(rest) for text in texts))

    def skip(self, *texts: str) -> Reading[str]:
        """Read one of `texts` if it comes next; returns it, or ""."""
        found = yield from self.starts(*texts)
        self.take(len(found))
        return found

    def skip_next(self, *texts: str) -> Reading[str]:
        """Read blanks, and one of `texts` if it comes after them; returns it, or ""."""
        yield from self.peek()
        return (yield from self.skip(*texts))

    def skip_all(self, text: str) -> Reading[bool]:
        """Read `text` as often as it comes next, with blanks between; returns whether it does."""
        found = False
        while True:
            blanks = yield from self.match(BLANK_RUN)
            if not (yield from self.skip(text)):
                self.unread(blanks)
                return found
            found = True

    def character(self) -> Reading[str]:
        """Read one character; "" at the end."""
        if self._at < len(self._text) or (yield from self.more()):
            return self.take(1)
        return ""

    def opens_object(self) -> Reading[bool]:
        """Read the `{` that comes next, and more; returns whether it may begin a JSON object."""
        self.take(1)
        yield from self.match(BLANK_RUN)
        return (yield from self.character()) in '"}'  # or nothing follows

    def match(self, regex: re.Pattern[str]) -> Reading[str]:
        """Read as many characters as `regex`, a class of characters with `+`, matches."""
        parts: list[str] = []
        while True:
            if found := regex.match(self._text, self._at):
                parts.append(self.take(len(found[0])))
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(parts)

    def until(self, patterns: Patterns, put: Put) -> Reading[str]:
        """Read up to and with the first of `patterns`; returns it, or "" at the end.

        What is before it goes to `put` as it comes.
        """
        while not (found := patterns.find(self._text, self._at)):
            num_held = patterns.num_held(self._text, self._at)
            self._pass_on(len(self._text) - num_held, put)
            if not (yield from self.more()):
                self._pass_on(len(self._text), put)
                return ""
        self._pass_on(found.start(), put)
        return self.take(len(found[0]))

    def value(self, put: Put, *, closes: bool = False, stop: str = "<") -> Reading[bool]:
        """Read a JSON value, to `put` as it comes; returns whether it has come to its end.

        closes: the brackets that are missing at the end of what is a value otherwise go to `put`,
        and control characters in strings as escapes.
        stop: a text that ends the value as it stands where it is in no string.
        """
        scanner, last, stops = ValueScanner(stop), "", Patterns(stop)
        while True:
            num_held = 0 if self.ended else stops.num_held(self._text, self._at)
            end = scanner.scan(self._text[: len(self._text) - num_held], self._at)
            place = len(self._text) - num_held if end is None else end
            last = self._text[self._at : place].rstrip()[-1:] or last
            for control in scanner.controls if closes else ():
                self._pass_on(control, put)
                put(json.dumps(self.take(1))[1:-1])
            self._pass_on(place, put)
            if end is not None or not (yield from self.more()):
                if closes and (end is not None or self.natural) and last not in (",", ":"):
                    put(scanner.missing)
                return scanner.complete if end is not None else scanner.is_scalar

    def string(self) -> Reading[str | None]:
        """Read a JSON string; None where there is none, or one that is broken or no text."""
        parts: list[str] = []
        if not (yield from self.starts('"')) or not (yield from self.value(parts.append)):
            return None
        try:
            text = str(json.loads("".join(parts), strict=False))
            text.encode()  # an escape may stand for a lone surrogate, as a mark does
        except ValueError:
            return None
        return text

    def _pass_on(self, end: int, put: Put) -> None:
        if end > self._at:
            put(self.take(end - self._at))


class ValueScanner:
    """Finds the end of one JSON value in a text that arrives in pieces.

    It knows strings, escapes and brackets, and judges nothing else. A mark, a `<`, a `>` or a
    backtick outside of a string, which no JSON has there, ends the value as it stands.
    """

    __slots__ = ("_escaped", "_in_string", "_open", "_outside", "complete", "controls", "is_scalar")

    _IN_STRING = re.compile(r'["\\\x00-\x1f]')
    _AFTER_SCALAR = re.compile(f"[,;}}\\]<{BLANKS}{MARKS}]")

    def __init__(self, stop: str = "<") -> None:
        """stop: a text that ends the value as well."""
        self._outside = re.compile(f'{re.escape(stop)}|["{{}}\\[\\]<>`{MARKS}]')
        self.complete = False
        self.controls: list[int] = []  # where the last piece has control characters in a string
        self.is_scalar = False  # a number or a word, which nothing closes
        self._open: list[str] = []  # the closings of the brackets
        self._in_string = False
        self._escaped = False  # the last character was a backslash

    @property
    def missing(self) -> str:
        """What closes the brackets that are open; "" inside of a string."""
        return "" if self._in_string else "".join(reversed(self._open))

    def scan(self, text: str, start: int) -> int | None:
        """Go over the next piece, which is `text` from `start` on.

        Returns the place in `text` where the value ends, None if that is not in it.
        """
        position, self.controls = start, []
        if start < len(text) and not self._open and not self._in_string and not self.is_scalar:
            self.is_scalar = text[start] not in '"{['
        if self.is_scalar:
            after = self._AFTER_SCALAR.search(text, start)
            self.complete = after is not None
            return after.start() if after else None
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (self._IN_STRING if self._in_string else self._outside).search(text, position)
            if found is None:
                return None
            position = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                    continue
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._open.append("}" if found[0] == "{" else "]")
                case "}" | "]":
                    self._open = self._open[:-1]
                case _ if self._in_string:
                    self.controls.append(found.start())
                case _:
                    return found.start()
            if not self._open and not self._in_string:
                self.complete = True
                return position
        return None
