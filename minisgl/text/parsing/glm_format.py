"""Reader of calls that are written with a tag for each key and each value, as GLM-4.5 to 4.7 do.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Later versions have no line breaks between the tags. The values become JSON by the tool's schema.
"""

from __future__ import annotations

import json

from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.json_formats import END_TOOL_CALL, TOOL_CALL, TOOL_NAME
from minisgl.text.parsing.reader import Patterns, Put, Reading
from minisgl.text.parsing.xml_format import escaped, types_of, value_json

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


def read_glm(calls: CallContext, opening: str) -> Reading[bool]:
    """Read one call. Its closing may be missing at the end of an answer."""
    reader, put = calls.reader, calls.emitter.arguments
    key, end_call = calls.markers[KEY], calls.markers[END_TOOL_CALL]
    yield from reader.peek()
    name = yield from reader.match(TOOL_NAME)
    yield from reader.peek()
    if not name or not ((yield from reader.starts(key, end_call)) or reader.natural):
        return False
    calls.start(name)
    put("{")
    separator = ""
    while (found := (yield from reader.skip(key, end_call))) == key:
        parts: list[str] = []
        has_key = yield from reader.until(Patterns(calls.markers[END_KEY]), parts.append)
        yield from reader.peek()
        if not has_key or not (yield from reader.skip(calls.markers[VALUE])):
            break
        argument = "".join(parts).strip()
        put(f"{separator}{json.dumps(argument, ensure_ascii=False)}: ")
        separator = ", "
        yield from _read_value(calls, types_of(calls.schema(name), argument))
        yield from reader.peek()
    # The braces are no text of the model's: at its end they are certain.
    if found == end_call or reader.natural or not reader.ended:
        put("}")
    calls.emitter.end_call()
    return True


def _read_value(calls: CallContext, types: frozenset[str]) -> Reading[None]:
    """Read a value, which becomes JSON: a string as it comes, another one when it is whole."""
    put = calls.emitter.arguments
    parts: list[str] = []
    streamed = types == {"string"}
    if streamed:
        put('"')
    ended = yield from _read_text(
        calls, (lambda text: put(escaped(text))) if streamed else parts.append
    )
    if ended or calls.reader.natural:
        put('"' if streamed else value_json("".join(parts), types))


def _read_text(calls: CallContext, put: Put) -> Reading[bool]:
    """Read the text of a value; returns whether it has an end.

    Closings that are no tokens count where something follows that may follow them. One of the call
    shows that the one of the value is missing, and comes next again.
    """
    reader, markers = calls.reader, calls.markers
    end_value, end_call = markers[END_VALUE], markers[END_TOOL_CALL]
    following = {end_value: (markers[KEY], end_call), end_call: (markers[TOOL_CALL],)}
    closings = Patterns(*following)
    while found := (yield from reader.until(closings, put)):
        if len(found) > 1:
            reader.record()
            after = yield from reader.peek()
            if after and not (yield from reader.starts(*following[found])):
                put(found + reader.recorded())
                continue
            reader.unread(reader.recorded())
        if found == end_call:
            reader.unread(found)
        return True
    return False
