"""Reader of calls that are written with a tag for each parameter, as Qwen3-Coder does.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One line break on each side of a value is markup. The values become JSON by the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.python_format import python_as_json
from minisgl.text.parsing.reader import Patterns, Put, Reader, Reading

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
END_OF_NAME = Patterns(">", "<", "\n")
END_OF_LINE = Patterns("\n")
NUMBERS = ("integer", "number")


def read_qwen3_coder(calls: CallContext, opening: str) -> Reading[bool]:
    """Read one function. Its opening may be `<function=` where the one around it is forgotten."""
    reader, emitter = calls.reader, calls.emitter
    function = calls.markers[FUNCTION]
    if opening == function:
        if not emitter.at_line_start:
            return False
    else:
        yield from reader.peek()
        if not (yield from reader.skip(function)):
            return False
    name = yield from _read_name(reader, calls.tools)
    if not name:
        return False
    calls.start(name)
    complete = yield from _read_parameters(calls, calls.schema(name))
    # The braces are no text of the model's: at its end they are certain.
    if complete or reader.natural:
        emitter.arguments("}")
    emitter.end_call()
    return True


def _read_parameters(calls: CallContext, schema: Mapping[str, Any]) -> Reading[bool]:
    """Read the parameters and the closings after them; returns whether the call is complete."""
    reader, put, end_call = calls.reader, calls.emitter.arguments, calls.markers[END_CALL]
    properties = schema.get("properties")
    missing = [*properties] if isinstance(properties, Mapping) else []  # parameters
    put("{")
    separator = ""
    while True:
        yield from reader.peek()
        found = yield from reader.skip(PARAMETER, END_FUNCTION, end_call)
        if found == PARAMETER:
            key = yield from _read_name(reader, missing)
            if not key:
                return not reader.ended
            if key in missing:
                missing.remove(key)
            put(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            next_openings = [f"{PARAMETER}{name}>" for name in missing]
            found = yield from _read_value(
                calls, types_of(schema, key), next_openings if properties else [PARAMETER]
            )
            if not found and not reader.natural:
                return False
        if found == END_FUNCTION:
            yield from reader.peek()
            yield from reader.skip(end_call)
        if found != END_PARAMETER:
            return bool(found) or not reader.ended


def _read_name(reader: Reader, known: Iterable[str]) -> Reading[str]:
    """Read a name up to its `>`; "" where there is none.

    A name of `known` may have any < and > in it; another one with a < ends with its line.
    """
    parts: list[str] = []
    while (end := (yield from reader.until(END_OF_NAME, parts.append))) in ("<", ">"):
        name = "".join(parts).strip()
        if end == ">" and not any(longer.startswith(f"{name}>") for longer in known):
            return name
        parts.append(end)
        if end == "<" and not any(longer.startswith(f"{name}<") for longer in known):
            reader.unread((yield from reader.until(END_OF_LINE, parts.append)))
            line = "".join(parts)
            return line[:-1].strip() if line.endswith(">") else ""
    return ""


def _read_value(
    calls: CallContext, types: frozenset[str], next_openings: Sequence[str]
) -> Reading[str]:
    """Read a value, which becomes JSON; returns what has ended it. next_openings: see _read_text.

    A string goes out as it comes, another value when it is whole; at the end of an answer that
    was cut neither is completed.
    """
    reader, put = calls.reader, calls.emitter.arguments
    parts: list[str] = []
    streamed = types == {"string"}
    if streamed:
        put('"')
        end = yield from _read_text(calls, next_openings, lambda text: put(escaped(text)))
    else:
        end = yield from _read_text(calls, next_openings, parts.append)
    if end or reader.natural:
        put('"' if streamed else value_json("".join(parts), types))
    return end


def _read_text(calls: CallContext, next_openings: Sequence[str], put: Put) -> Reading[str]:
    """Read the text of a value; returns the closing behind it, "" at the end of the answer.

    A value may have any text in it. A closing counts where something follows that may follow it.
    One of `next_openings` at the start of a line shows that the closing before it is missing.
    """
    reader = calls.reader
    call, end_call = calls.markers[CALL], calls.markers[END_CALL]
    following = {
        END_PARAMETER: (PARAMETER, END_FUNCTION, end_call),
        END_FUNCTION: (calls.markers[FUNCTION], end_call),
        end_call: (call,),
    }
    closings = Patterns(*following, *next_openings)
    line_break = ""
    in_line = False  # something but a line break has come in front of what is read

    def put_all_but_line_break(text: str) -> None:
        nonlocal line_break, in_line
        text = line_break + text
        body = text.removesuffix("\n")
        line_break = text[len(body) :]
        in_line = not line_break
        if body:
            put(body)

    yield from reader.skip("\n")
    while found := (yield from reader.until(closings, put_all_but_line_break)):
        if found in next_openings:
            if not in_line:
                reader.unread(found)
                return END_PARAMETER
            put_all_but_line_break(found)
            continue
        reader.record()
        if not (yield from reader.peek()) or (yield from reader.starts(*following[found])):
            reader.forget()
            return found
        put_all_but_line_break(found + reader.recorded())
    if not reader.natural and line_break:
        put(line_break)
    return ""


def escaped(text: str) -> str:
    """A text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is not a plain string, as `text` has it wherever that is JSON.

    What is of none of `types` is a string; without types, whatever is JSON is taken for it.
    """
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if "null" in types and word.lower() in ("null", "none"):
        return "null"
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if not types & {"object", "array"} or (found := python_as_json(word)) is None:
            return json.dumps(text, ensure_ascii=False)
        word, value = found, json.loads(found)
    if not types or types.intersection(_types_of_value(value)):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _types_of_value(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return NUMBERS
        case float():
            return NUMBERS if value.is_integer() else ("number",)
        case str():
            return ()  # a plain string is written without quotes
        case list() | tuple():
            return ("array",)
        case _:
            return ("object",)


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the schema of a tool allows for a parameter; none if it does not say."""
    properties = schema.get("properties")
    waiting = [properties.get(name)] if isinstance(properties, Mapping) else []
    followed: set[str] = set()  # references, each once: some refer to themselves
    types: set[str] = set()
    while waiting:
        match waiting.pop():
            case {"type": str(kind)}:
                types.add(kind)
            case {"type": [*kinds]}:
                types.update(kind for kind in kinds if isinstance(kind, str))
            case {"$ref": str(reference)}:
                if reference not in followed:
                    followed.add(reference)
                    waiting.append(_resolved(schema, reference))
            case {"anyOf": [*options]} | {"oneOf": [*options]} | {"allOf": [*options]}:
                waiting += options
            case {"enum": [*values]}:
                types.update(*map(_types_of_constant, values))
            case {"const": value}:
                types.update(_types_of_constant(value))
    return frozenset(types)


def _types_of_constant(value: object) -> tuple[str, ...]:
    return ("string",) if isinstance(value, str) else _types_of_value(value)


def _resolved(root: Mapping[str, Any], reference: str) -> object:
    """What a reference into the same schema names, None where there is nothing."""
    place: object = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return None if place is root else place
