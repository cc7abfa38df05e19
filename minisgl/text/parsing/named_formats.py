"""Readers of the formats in which the name of a tool comes before a JSON object, its arguments."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from minisgl.text.parsing.alternatives import properties_of
from minisgl.text.parsing.call_format import CallFormat, CallSpelling
from minisgl.text.parsing.calls import CallContext, read_arguments
from minisgl.text.parsing.json_formats import FENCE, PYTHON_TAG, TOOL_NAME
from minisgl.text.parsing.plain_values import types_of
from minisgl.text.parsing.reader import BLANK_RUN, Patterns, Reading

FUNCTION, END_FUNCTION = "<function=", "</function>"
RECIPIENT = ">>>"  # a name, or TEXT, follows
TEXT = "all\n"
# Some distillations of DeepSeek-R1 write the second for the first.
CALLS, OTHER_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_CALLS, KIMI_END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_FUNCTIONS = "<|tool_call_argument_begin|>", "functions."
KIMI_ID = re.compile(r"[\w.\-:]+")
NUMBER = re.compile(r":\d*$")
# Tools whose one argument a model may write as it is, instead of an object.
CODE_TOOLS = ("python", "ipython", "code_interpreter")
ALL = Patterns()


def read_functionary_v3_1(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `NAME>{…}</function>`, or code to the end of the answer."""
    reader = calls.reader
    if opening == calls.markers[PYTHON_TAG]:
        name = next((name for name in CODE_TOOLS if name in calls.tools), "")
        if name:
            yield from _read_code(calls, name)
        return bool(name)
    name = yield from reader.match(TOOL_NAME)
    if not name or not (yield from reader.skip(">")) or (yield from reader.peek()) != "{":
        return False
    return (yield from _read_call(calls, name, END_FUNCTION))


def read_functionary_v3_2(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `NAME` and arguments in the next line, with RECIPIENT before them in a text."""
    reader = calls.reader
    yield from reader.skip(RECIPIENT)
    if (yield from reader.skip(TEXT)):
        reader.forget()
        return True
    name = yield from reader.match(TOOL_NAME)
    is_offered = name in calls.tools
    if not name or not (is_offered or not opening) or not (yield from reader.skip("\n")):
        return False
    blanks = yield from reader.match(BLANK_RUN)
    if (yield from reader.starts("{")):
        yield from _read_call(calls, name)
    elif is_offered and name in CODE_TOOLS:
        yield from _read_code(calls, name, blanks)
    else:
        return False
    return True


def read_deepseek(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `function`, SEPARATOR, a name, and arguments in a fence in the next line; or a name,
    SEPARATOR and arguments."""
    reader, markers = calls.reader, calls.markers
    if opening != markers[CALL]:
        yield from reader.peek()
        yield from reader.skip_all(markers[CALL])
    name = yield from reader.match(TOOL_NAME)
    if not (yield from reader.skip(markers[SEPARATOR])):
        return False
    is_empty = yield from reader.starts(markers[END_CALL])
    if (yield from reader.peek()) not in ("{", '"') and not is_empty:
        name = yield from reader.match(TOOL_NAME)
        if (yield from reader.skip_next(FENCE)):
            yield from reader.skip("json")
    return bool(name) and (yield from _read_call(calls, name, FENCE, markers[END_CALL]))


def read_kimi(calls: CallContext, opening: str) -> Reading[bool]:
    """Read `functions.NAME:NUMBER`, a marker and arguments."""
    reader, markers = calls.reader, calls.markers
    if opening != markers[KIMI_CALL]:
        yield from reader.peek()
        if not (yield from reader.skip_all(markers[KIMI_CALL])):
            return False
    yield from reader.peek()
    name = NUMBER.sub("", (yield from reader.match(KIMI_ID))).removeprefix(KIMI_FUNCTIONS)
    if not name or not (yield from reader.skip_next(markers[KIMI_ARGUMENTS])):
        return False
    return (yield from _read_call(calls, name, markers[KIMI_END_CALL]))


def _read_call(calls: CallContext, name: str, *closings: str) -> Reading[bool]:
    """Read the arguments of a call, which are an object, perhaps in a string, or nothing in front
    of one of `closings`, and these closings; returns whether they are."""
    reader = calls.reader
    char = yield from reader.peek()
    is_empty = bool(closings and (yield from reader.starts(*closings)))
    if char not in ("{", '"') and not is_empty:
        return False
    calls.start(name)
    if is_empty:
        calls.emitter.arguments("{}")
    else:
        yield from read_arguments(reader, calls.emitter.arguments)
    calls.emitter.end_call()
    for closing in closings:
        yield from reader.skip_next(closing)
    return True


def _read_code(calls: CallContext, name: str, begun: str = "") -> Reading[None]:
    """Read the rest of the answer, which is code, as the argument of a call."""
    put = calls.emitter.arguments
    schema = calls.schema(name)
    names = (name for name in properties_of(schema) if "string" in types_of(schema, name))
    key = next(names, "code")
    calls.start(name)
    put(f"{{{_quoted(key)}: {_quoted(begun)[:-1]}")
    yield from calls.reader.until(ALL, lambda text: put(_quoted(text)[1:-1]))
    if calls.reader.natural:
        put('"}')
    calls.emitter.end_call()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


FUNCTIONARY_V3_1 = CallFormat(
    "functionary_v3_1",
    CallSpelling(head=FUNCTION, middle=">", tail=END_FUNCTION, between=""),
    markers=(FUNCTION, PYTHON_TAG),
    openings=(FUNCTION, PYTHON_TAG),
    read=read_functionary_v3_1,
)
# The prompt ends with the RECIPIENT of the first part of the answer.
FUNCTIONARY_V3_2 = CallFormat(
    "functionary_v3_2",
    CallSpelling(head="", middle="\n", tail="", between=RECIPIENT, text=TEXT, after_text=RECIPIENT),
    markers=(),
    openings=(),
    read=read_functionary_v3_2,
    bare=True,
    in_text=(RECIPIENT,),
)
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    CallSpelling(
        head=f"{CALL}function{SEPARATOR}",
        middle="\n```json\n",
        tail=f"\n```{END_CALL}",
        between="\n",
        begin=CALLS,
        end=END_CALLS,
    ),
    markers=(CALLS, OTHER_CALLS, CALL, SEPARATOR, END_CALL, END_CALLS),
    openings=(CALLS, OTHER_CALLS, CALL),
    read=read_deepseek,
    closing=END_CALLS,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    spelling=replace(DEEPSEEK_V3.spelling, head=CALL, middle=SEPARATOR, tail=END_CALL, between=""),
)
KIMI_K2 = CallFormat(
    "kimi_k2",
    CallSpelling(
        head=f"{KIMI_CALL}{KIMI_FUNCTIONS}",
        middle=KIMI_ARGUMENTS,
        tail=KIMI_END_CALL,
        between="",
        begin=KIMI_CALLS,
        end=KIMI_END_CALLS,
        numbered=True,
    ),
    markers=(KIMI_CALLS, KIMI_CALL, KIMI_ARGUMENTS, KIMI_END_CALL, KIMI_END_CALLS),
    openings=(KIMI_CALLS, KIMI_CALL),
    read=read_kimi,
    closing=KIMI_END_CALLS,
)
FORMATS = (FUNCTIONARY_V3_1, FUNCTIONARY_V3_2, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2)
