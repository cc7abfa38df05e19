"""Reads GBNF, the grammars of llama.cpp."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""
    (?P<blank>   \s+ | \#[^\n]* )
  | (?P<name>    [\w-]+ )
  | (?P<literal> " (?: [^"\\] | \\. )* " )
  | (?P<chars>   \[ (?: [^\]\\] | \\. )* \] )
  | (?P<repeat>  [*+?] | \{ \s* (?P<least>\d+) \s* (?P<comma> , \s* (?P<most>\d*) )? \s* \} )
  | (?P<sign>    ::= | [|().] )
    """,
    re.X | re.S,
)
CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<sign>.?))|(?P<plain>.)",
    re.S,
)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '\\"[]'}}
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
ROOT = "root"
ANY = ((0, sys.maxunicode),)
SURROGATES = range(0xD800, 0xE000)

Ranges = tuple[tuple[int, int], ...]  # of characters, first and last


@dataclass(slots=True)
class Part:
    """A part of a rule, whose kind says which of the other fields it has."""

    kind: str  # chars, sequence, choice, repeat, rule
    parts: list[Part] = field(default_factory=list)
    ranges: Ranges = ()
    least: int = 0
    most: int | None = None
    name: str = ""
    place: int = 0  # in the text


def read(text: str) -> dict[str, Part]:
    """The rules of a grammar by name. Raises ValueError, which names the line; RecursionError."""
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise ValueError(f"it has no rule `{ROOT}`")
    return rules


class _Reader:
    """Reads the rules of a grammar. A name with `::=` behind it begins the next one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*self._scan()]
        self._next = 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        while self._kind():
            if not self._begins_rule():
                raise self._wrong("expected a rule, `name ::= ...`")
            name = self._take()
            self._take()
            if name in rules:
                raise self._wrong(f"the rule `{name}` stands there twice", -2)
            rules[name] = self._choice()
        for part in (part for rule in rules.values() for part in walk(rule)):
            if part.kind == "rule" and part.name not in rules:
                raise ValueError(f"{self._line(part.place)}there is no rule `{part.name}`")
        return rules

    def _choice(self) -> Part:
        parts = [self._sequence()]
        while self._is_sign("|"):
            self._take()
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Part("choice", parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._kind() and not self._is_sign("|", ")") and not self._begins_rule():
            part = self._item()
            while self._kind() == "repeat":
                part = self._repeated(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Part("sequence", parts)

    def _item(self) -> Part:
        kind, place = self._kind(), self._place()
        if kind == "name":
            return Part("rule", name=self._take(), place=place)
        if kind == "literal":
            codes = self._characters(self._take()[1:-1], place + 1)
            return Part("sequence", [Part("chars", ranges=((code, code),)) for code, _ in codes])
        if kind == "chars":
            return Part("chars", ranges=self._ranges(self._take()[1:-1], place + 1))
        if self._is_sign("."):
            self._take()
            return Part("chars", ranges=ANY)
        if self._is_sign("("):
            self._take()
            inner = self._choice()
            if not self._is_sign(")"):
                raise ValueError(f"{self._line(place)}this parenthesis is never closed")
            self._take()
            return inner
        raise self._wrong("expected a text, a class of characters, a name or a parenthesis")

    def _repeated(self, part: Part) -> Part:
        token = self._tokens[self._next]
        self._next += 1
        if (sign := token["repeat"]) in COUNTS:
            least, most = COUNTS[sign]
        else:
            least = most = int(token["least"])
            if token["comma"]:
                most = int(token["most"]) if token["most"] else None
        if most is not None and most < least:
            raise self._wrong(f"at least {least} and at most {most} contradict each other", -1)
        if most == 0:
            return Part("sequence")
        return Part("repeat", [part], least=least, most=most)

    def _ranges(self, text: str, place: int) -> Ranges:
        inverted = text.startswith("^")
        codes = [*self._characters(text[inverted:], place + inverted)]
        found: list[tuple[int, int]] = []
        while codes:
            first = last = codes.pop(0)[0]
            if len(codes) >= 2 and codes[0] == (ord("-"), False):
                last = codes.pop(1)[0]
                codes.pop(0)
            if last < first:
                raise ValueError(f"{self._line(place)}a range of characters is upside down")
            found.append((first, last))
        ranges = _inverted(found) if inverted else _merged(found)
        if not ranges:
            raise ValueError(f"{self._line(place)}no character is in this class")
        return ranges

    def _characters(self, text: str, place: int) -> Iterator[tuple[int, bool]]:
        """Code points, and whether an escape stood there."""
        for found in CHARACTER.finditer(text):
            digits = found["x"] or found["u"] or found["U"]
            if digits is not None:
                code = int(digits, 16)
            elif found["plain"] is not None:
                code = ord(found["plain"])
            elif found["sign"] in ESCAPED:
                code = ord(ESCAPED[found["sign"]])
            else:
                raise ValueError(f"{self._line(place)}{found[0]} is no escape of GBNF")
            if code > sys.maxunicode or code in SURROGATES:
                raise ValueError(f"{self._line(place)}{found[0]} is not a character")
            yield code, found["plain"] is None

    def _scan(self) -> Iterator[re.Match[str]]:
        place = 0
        while place < len(self._text):
            found = TOKEN.match(self._text, place)
            if found is None:
                raise ValueError(f"{self._line(place)}this has no end, or means nothing there")
            if found.lastgroup != "blank":
                yield found
            place = found.end()

    def _kind(self, ahead: int = 0) -> str:
        """The kind of a token; "" behind the last."""
        index = self._next + ahead
        return str(self._tokens[index].lastgroup) if index < len(self._tokens) else ""

    def _begins_rule(self) -> bool:
        return self._kind() == "name" and self._is_sign("::=", ahead=1)

    def _is_sign(self, *signs: str, ahead: int = 0) -> bool:
        return self._kind(ahead) == "sign" and self._tokens[self._next + ahead][0] in signs

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][0]

    def _place(self, ahead: int = 0) -> int:
        index = self._next + ahead
        return self._tokens[index].start() if index < len(self._tokens) else len(self._text)

    def _line(self, place: int) -> str:
        before = self._text[:place]
        return f"line {before.count(chr(10)) + 1}, column {place - before.rfind(chr(10))}: "

    def _wrong(self, reason: str, ahead: int = 0) -> ValueError:
        return ValueError(f"{self._line(self._place(ahead))}{reason}")


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _inverted(ranges: list[tuple[int, int]]) -> Ranges:
    left, rest = 0, []
    for first, last in (*_merged(ranges), (sys.maxunicode + 1, 0)):
        if left < first:
            rest.append((left, first - 1))
        left = last + 1
    return tuple(rest)


def walk(part: Part) -> Iterator[Part]:
    """A part and all inside."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += part.parts
