"""What the readers of all call formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from minisgl.text.parsing.emitter import Emitter
from minisgl.text.parsing.reader import BLANKS, Put, Reader, Reading

NAME, ARGUMENTS = "name", ("arguments", "parameters")
# Members that a call may have besides.
OTHERS = ("id", "type", "function", "call_id")


class Arrivals(dict[str, str]):
    """How texts arrive, by how they are spelled: a marker in them that is one token is its mark."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        super().__init__()
        self._marks = marks

    def __missing__(self, text: str) -> str:
        arrival = text
        for marker, mark in self._marks.items():
            arrival = arrival.replace(marker, mark)
        return self.setdefault(text, arrival)


@dataclass(slots=True)
class CallContext:
    """What a reader of calls works with.

    A reader begins behind the opening and returns whether it has found a call. Where it has not,
    what it read is recorded, apart from what it has emitted as text.
    """

    reader: Reader
    emitter: Emitter
    markers: Arrivals
    tools: Mapping[str, Mapping[str, Any]]  # the JSON Schema of the arguments of each known tool

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a tool's arguments; empty for an unknown tool."""
        schema = self.tools.get(name)
        return schema if isinstance(schema, Mapping) else {}

    def start(self, name: str) -> None:
        """Begin a call: what has been read belongs to it."""
        self.reader.forget()
        self.emitter.start_call(name)

    def pass_over(self) -> Reading[None]:
        """Emit the JSON value that is being read, from where the record begins, as text."""
        text = self.reader.recorded()
        value = text.lstrip(BLANKS)
        self.emitter.text(text.removesuffix(value))
        self.reader.unread(value)
        yield from self.reader.value(self.emitter.text)


class Announced(Enum):
    """What shows that an object is a call."""

    BY_MARKER = "by a marker"
    BY_PLACE = "by its place"  # it begins the answer
    BY_NAME = "by its name"  # it is in a text, and a tool of this name is offered


def read_object(calls: CallContext, announced: Announced = Announced.BY_MARKER) -> Reading[bool]:
    """Read `{"name": …, "arguments": …}` of which the brace comes next.

    The members may be in any order; arguments that come before the name wait for it. Without a
    marker an object must look like a call in every member. Another one is text to its end, so that
    nothing inside of it is taken for a call.
    """
    bare = announced is not Announced.BY_MARKER
    reader, emitter = calls.reader, calls.emitter
    reader.take(1)
    name: str | None = None
    started = has_arguments = complete = False
    waiting: list[str] = []

    def start() -> None:
        nonlocal started
        assert name is not None
        started = True
        calls.start(name)
        emitter.arguments("".join(waiting))

    def put(text: str) -> None:
        if started:
            emitter.arguments(text)
        else:
            waiting.append(text)

    while True:
        char = yield from reader.peek()
        if char in ("}", ","):
            reader.take(1)
            if complete := char == "}":
                break
            continue
        key = yield from reader.string()
        if key is None or (yield from reader.peek()) != ":":
            break
        reader.take(1)
        yield from reader.peek()
        if key == NAME and name is None:
            name = yield from reader.string()
            if not name:
                break
            if announced is Announced.BY_NAME and name not in calls.tools:
                yield from calls.pass_over()
                return False
            if has_arguments or not bare:
                start()
        elif key in ARGUMENTS and not has_arguments:
            if bare and (yield from reader.starts("{")):
                opens = yield from reader.ahead(reader.opens_object())
                if not opens:
                    break
            has_arguments = True
            if name and not started:
                start()
            yield from read_arguments(reader, put)
        elif bare and key not in OTHERS:
            if not started:
                yield from calls.pass_over()
            break
        elif not (yield from reader.value(lambda _: None)):
            break
    if complete and name and not started and name in calls.tools:
        start()
    if started:
        if not has_arguments and (complete or reader.natural):
            emitter.arguments("{}")
        emitter.end_call()
    return started


def read_arguments(reader: Reader, put: Put, stop: str = "<") -> Reading[None]:
    """Read a value that is the arguments, to `put` as it comes. stop: see `Reader.value`.

    A string that has them inside is taken for what is inside of it, and null for no arguments.
    """
    if (yield from reader.starts("{")):
        yield from reader.value(put, closes=True, stop=stop)
        return
    parts: list[str] = []
    yield from reader.value(parts.append)
    put(plain_arguments("".join(parts)))


def plain_arguments(text: str) -> str:
    """The arguments that a value is which is no object; see `read_arguments`."""
    try:
        value = json.loads(text)
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            value.encode()  # not where an escape has made a lone surrogate
            return value
    except (ValueError, RecursionError):
        return text
    return "{}" if value is None else text
