"""Readers of the formats in which a call is a JSON object, or has one for its arguments."""

from __future__ import annotations

import re
from dataclasses import replace

from minisgl.text.parsing.call_format import CallFormat, CallSpelling
from minisgl.text.parsing.calls import Announced, CallContext, read_arguments, read_object
from minisgl.text.parsing.reader import Patterns, Reading

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
TOOL_NAME = re.compile(r"[\w.\-]+")
BRACE, BRACKET = "{", "["
FENCE = "```"


def read_hermes(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `{"name": …, "arguments": …}` and its closing marker, which may be missing."""
    if (yield from calls.reader.peek()) != "{" or not (yield from read_object(calls)):
        return False
    while (yield from calls.reader.peek()) == "}":  # one too many, as small models write it
        calls.reader.take(1)
    yield from calls.reader.skip(calls.markers[END_TOOL_CALL])
    return True


def read_llama3(calls: CallContext, opening: str) -> Reading[bool]:
    """Read objects with `; ` between them. Without a marker each must look like a call."""
    announced = {"": Announced.BY_PLACE, BRACE: Announced.BY_NAME}.get(opening, Announced.BY_MARKER)
    return (yield from _read_objects(calls, announced, (";", ",")))


def read_mistral(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `[{"name": …, "arguments": …}, …]`, or `name[ARGS]{…}` with a `[CALL_ID]` or none."""
    reader = calls.reader
    if (yield from reader.peek()) == BRACKET:
        return (yield from _read_list(calls))
    name = yield from reader.match(TOOL_NAME)
    if not name:
        return False
    yield from reader.peek()
    args = calls.markers[ARGS]
    if (yield from reader.skip(calls.markers[CALL_ID])):
        announced = yield from reader.until(Patterns(args), lambda _: None)
    else:
        announced = yield from reader.skip(args)
    has_arguments = (yield from reader.peek()) == "{"
    if not announced and not has_arguments:
        return False
    calls.start(name)
    if has_arguments:
        yield from read_arguments(reader, calls.emitter.arguments, calls.markers[TOOL_CALLS])
    elif reader.natural:
        calls.emitter.arguments("{}")
    calls.emitter.end_call()
    return True


def read_xlam(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `[{"name": …, "arguments": …}, …]`, which may be in a fence; or one such object."""
    reader = calls.reader
    announced = Announced.BY_MARKER
    if opening in ("", BRACKET, FENCE):
        announced = Announced.BY_NAME if opening else Announced.BY_PLACE
    if opening == FENCE:
        reader.take(len(FENCE))
        yield from reader.skip("json")
    yield from reader.peek()
    if opening in ("", BRACKET) and (yield from reader.skip(TOOL_CALLS)):
        announced = Announced.BY_MARKER
    match (yield from reader.peek()):
        case "[":
            found = yield from _read_list(calls, announced)
        case "{":
            found = yield from read_object(calls, announced)
        case _:
            found = False
    if found and opening == FENCE:
        yield from reader.skip_next(FENCE)
    return found


def _read_list(calls: CallContext, announced: Announced = Announced.BY_MARKER) -> Reading[bool]:
    """Read a list of objects, up to one that is no call."""
    calls.reader.take(1)
    return (yield from _read_objects(calls, announced, (",",), "]"))


def _read_objects(
    calls: CallContext, announced: Announced, separators: tuple[str, ...], closing: str = ""
) -> Reading[bool]:
    """Read objects up to one that is no call, and `closing` if there is none such."""
    reader = calls.reader
    found = False
    while (yield from reader.peek()) == BRACE:
        if found:
            reader.record()
        if not (yield from read_object(calls, announced)):
            if found:
                calls.emitter.text(reader.recorded())
            return found
        found = True
        if (yield from reader.peek()) in separators:
            reader.take(1)
    if found:
        yield from reader.skip(closing)
    return found


HERMES = CallFormat(
    "hermes",
    CallSpelling(
        head=f'{TOOL_CALL}\n{{"name": "',
        middle='", "arguments": ',
        tail=f"}}\n{END_TOOL_CALL}",
        between="\n",
    ),
    markers=(TOOL_CALL, END_TOOL_CALL),
    openings=(TOOL_CALL,),
    read=read_hermes,
    closing=END_TOOL_CALL,
)
LLAMA3_JSON = CallFormat(
    "llama3_json",
    CallSpelling(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
    markers=(PYTHON_TAG,),
    openings=(PYTHON_TAG,),
    read=read_llama3,
    bare=True,
    in_text=(BRACE,),
)
XLAM = CallFormat(
    "xlam",
    CallSpelling(
        head='{"name": "', middle='", "arguments": ', tail="}", between=", ", begin="[", end="]"
    ),
    markers=(TOOL_CALLS,),
    openings=(TOOL_CALLS,),
    read=read_xlam,
    bare=True,
    in_text=(BRACKET, FENCE),
)
MISTRAL = CallFormat(
    "mistral",
    CallSpelling(head=TOOL_CALLS, middle=ARGS, tail="", between=""),
    markers=(TOOL_CALLS, ARGS, CALL_ID),
    openings=(TOOL_CALLS,),
    read=read_mistral,
)
# Tokenizers before version 11; all that an answer has is read the same.
MISTRAL_LIST = replace(MISTRAL, spelling=replace(XLAM.spelling, begin=f"{TOOL_CALLS}["))
FORMATS = (HERMES, LLAMA3_JSON, MISTRAL, XLAM)
