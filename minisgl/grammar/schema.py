"""Finds the place in a JSON schema that llguidance complains about without naming it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

# Keywords by what they hold: a schema, a list of schemas, or schemas by name.
ONE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
MAX_REASON_CHARS = 400
# Places in the Lark grammar that a schema or regex is a part of.
PREAMBLE = re.compile(
    r'^at \d+\(\d+\): (failed to compile JSON schema: |invalid regex ".*" \(in regex\): )', re.S
)
LINE_AND_COLUMN = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
# llguidance has numbers as float64, so it would force another integer.
MAX_EXACT = 2**53
UNKNOWN_TOKEN = re.compile(r"Token range end too large: (\d+)")
UNREADABLE = "a text or a regex that has no end, or a character that means nothing there"

Schema = dict[str, Any]
# Given what a message has said and a schema: the keyword at fault, if it is in this schema.
Test = Callable[[re.Match[str], Schema], str | None]


@dataclass(frozen=True, slots=True)
class _Complaint:
    """A kind of message, and the keyword that it is about."""

    pattern: re.Pattern[str]
    find: Test
    ignorable: bool = False  # without strict


def ignored_keyword(warning: str) -> tuple[str, ...]:
    """The keywords that a warning of llguidance says are ignored."""
    if found := re.match(r"Unimplemented keys: (\[.*\])", warning):
        return tuple(map(str, json.loads(found[1])))
    return ("format",) if warning.startswith("Unknown format") else ("oneOf",)


def explain(message: str, schema: object, strict: bool) -> str:
    """Say where `schema` has what llguidance's message is about."""
    message = PREAMBLE.sub("", message)
    reason = tidy(message)
    for complaint in COMPLAINTS:
        found = complaint.pattern.search(message)
        if found is None:
            continue
        for place, part in _parts(schema, ""):
            if keyword := complaint.find(found, part):
                if complaint.ignorable and strict:
                    reason = (
                        "it is not supported, so it cannot be enforced; leave it out, or do "
                        "without strict, which ignores it"
                    )
                return f"at {place}/{escaped(keyword)}: {reason}."
    return f"{reason}."


def rounded_value(schema: object) -> str | None:
    """Say where `schema` demands an integer that llguidance would round; None if nowhere."""
    for place, part in _parts(schema, ""):
        for keyword in ("const", "enum"):
            if _has_rounded(part.get(keyword)):
                return (
                    f"at {place}/{keyword}: integers beyond ±2**53 cannot be enforced exactly; "
                    "use texts instead."
                )
    return None


def _has_rounded(value: object) -> bool:
    match value:
        case int():
            return abs(value) > MAX_EXACT
        case list():
            return any(map(_has_rounded, value))
        case dict():
            return any(map(_has_rounded, value.values()))
    return False


def tidy(message: str, written: str = "") -> str:
    """A message of llguidance in one line, without what only its authors understand.

    `written`: the grammar where it is as its user has written it; otherwise a place in it is a
    place in a text that nobody knows.
    """
    message = message.replace("<non-verbose/>", "").strip()
    place, message = _split_place(message, written)
    if found := UNKNOWN_TOKEN.match(message):
        return f"{place}the token id {found[1]} is out of vocabulary"
    if message.startswith("panic"):  # at a limit of its own, with a backtrace
        return "it is too large; split it, or leave out what is alike"
    if message.startswith("lexer error"):
        return f"{place}{UNREADABLE}"
    if re.match("NoExtension", message):
        return "nothing can satisfy it"
    if re.search("fuel|too (big|large|complex)|[Ll]exer|Unable to determine|grammar size", message):
        return "it is too complex; simplify its patterns, or split it"
    if message.startswith("recursion limit"):
        return "it is nested too deeply"
    message = re.split(r"\n *\d+ \| ", message)[0]  # an excerpt of the grammar, as it was converted
    return place + " ".join(message.split()).rstrip(".")[:MAX_REASON_CHARS]


def _split_place(message: str, written: str) -> tuple[str, str]:
    """The place that a message begins with, as people say it, and the rest."""
    bare = PREAMBLE.sub("", message)
    found = LINE_AND_COLUMN.match(bare)
    if found is None:
        return "", bare
    is_inside = int(found[1]) <= len(written.splitlines())
    return f"line {found[1]}, column {found[2]}: " if is_inside else "", bare[found.end() :]


def _parts(schema: object, place: str) -> Iterator[tuple[str, Schema]]:
    """The schema and those inside, with JSON pointers; definitions come last."""
    waiting: list[tuple[str, object]] = [(place, schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        inside: list[tuple[str, object]] = []
        for keyword in ONE:
            inside.append((f"{place}/{keyword}", part.get(keyword)))
        for keyword in SEVERAL:
            if isinstance(members := part.get(keyword), list):
                inside += [(f"{place}/{keyword}/{i}", each) for i, each in enumerate(members)]
        for keyword in NAMED:
            if isinstance(named := part.get(keyword), dict):
                inside += [
                    (f"{place}/{keyword}/{escaped(name)}", each) for name, each in named.items()
                ]
        waiting += reversed(inside)


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _has_all(found: re.Match[str], part: Schema) -> str | None:
    keywords: list[str] = json.loads(found[1])
    return keywords[0] if all(keyword in part for keyword in keywords) else None


def _named(found: re.Match[str], part: Schema) -> str | None:
    return found[1] if found[1] in part else None


def _has(keyword: str) -> Test:
    return lambda _, part: keyword if keyword in part else None


def _has_value(keyword: str, prefix: str = "") -> Test:
    return lambda found, part: keyword if part.get(keyword) == prefix + found[1] else None


def _has_bad_regex(_: re.Match[str], part: Schema) -> str | None:
    """The message quotes a regex as it was converted, so each is tried."""
    for keyword, regexes in (
        ("pattern", [part.get("pattern")]),
        ("patternProperties", part.get("patternProperties")),
    ):
        for regex in regexes or ():
            grammar = f"start: %json {json.dumps({'type': 'string', 'pattern': regex})}"
            if isinstance(regex, str) and LLMatcher.validate_grammar(grammar):
                return keyword
    return None


COMPLAINTS = (
    _Complaint(re.compile(r"Unimplemented keys: (\[.*\])"), _has_all, ignorable=True),
    _Complaint(re.compile(r"Unknown format: (.*)"), _has_value("format"), ignorable=True),
    _Complaint(re.compile("oneOf constraints are not supported"), _has("oneOf"), ignorable=True),
    _Complaint(re.compile(r"Invalid type: (.*)"), _has_value("type")),
    _Complaint(re.compile(r"Pointer '(.*)' does not exist"), _has_value("$ref", "#")),
    _Complaint(re.compile(r"Resource '(.*)' is not present"), _has_value("$ref")),
    _Complaint(re.compile("patternProperty regexes"), _has("patternProperties")),
    _Complaint(re.compile("regex|look"), _has_bad_regex),
    _Complaint(re.compile(r"(\w+) \([^)]*\) is greater than"), _named),
    _Complaint(re.compile(r"for '(\w+)'"), _named),
    _Complaint(re.compile("required property"), _has("required")),
    _Complaint(re.compile(r"^(\w+) must be"), _named),
    _Complaint(re.compile("NoExtension"), _has("$ref")),
)
