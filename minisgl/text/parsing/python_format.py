"""Reader of calls that are written as a list of Python calls, `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minisgl.text.parsing.alternatives import properties_of
from minisgl.text.parsing.call_format import ArgumentStyle, CallFormat, CallSpelling
from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.json_formats import BRACKET, TOOL_NAME, read_xlam
from minisgl.text.parsing.reader import Patterns, Reader, Reading

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
LFM_START, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
QUOTES = ('"', "'")
SYNTAX = Patterns(*QUOTES, *"([{", *")]}")
# What may come before a key are only the first parenthesis and commas, and no key is in a string.
KEY_OR_STRING = re.compile(
    r"""'''(?:\\.|(?!''').)*'''|"{3}(?:\\.|(?!"{3}).)*"{3}|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|"""
    r"""(?P<before>(?:^\(|,)\s*)(?P<key>[^\s=,:()\[\]{}"'*][^=,:()\[\]{}"'*]*?)\s*=(?!=)""",
    re.DOTALL,
)
ESCAPE_OR_BREAK = re.compile(r"\\.|\n", re.DOTALL)
UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
WORDS = {"true": True, "false": False, "null": None}  # as JSON has them


def read_pythonic(calls: CallContext, opening: str) -> Reading[bool]:
    """Read a list of calls. Each is emitted at its closing parenthesis.

    An element that is no call with literal arguments ends the calls; it and the rest is content.
    Behind a marker the brackets of the list may be missing.
    In a text, where the opening is only the bracket, calls are those of offered tools.
    """
    reader = calls.reader
    if (yield from reader.peek()) == "[":
        reader.take(1)
    elif opening in ("", BRACKET):
        return False
    found = False
    while True:
        if found:
            reader.record()
        char = yield from reader.peek()
        if found and char == ",":
            reader.take(1)
            continue
        if found and char == "]":
            reader.take(1)
            break
        name = yield from reader.match(TOOL_NAME)
        source = None
        is_known = name in calls.tools or opening != BRACKET
        if name and is_known and (yield from reader.starts("(")):
            source = yield from _read_parentheses(reader)
        names = [*properties_of(calls.schema(name))]
        arguments = None if source is None else arguments_as_json(source, names)
        if arguments is None:
            if found:
                calls.emitter.text(reader.recorded())
            return found
        calls.start(name)
        calls.emitter.arguments(arguments)
        calls.emitter.end_call()
        found = True
    reader.forget()
    yield from reader.skip_next(calls.markers[PYTHON_END])
    return True


def read_lfm2(calls: CallContext, opening: str) -> Reading[bool]:
    """Read a list of Python calls, or JSON, which a prompt may ask for."""
    yield from calls.reader.peek()
    is_json = yield from calls.reader.ahead(_opens_json(calls.reader))
    return (yield from (read_xlam if is_json else read_pythonic)(calls, opening))


def _opens_json(reader: Reader) -> Reading[bool]:
    yield from reader.skip("[")
    return (yield from reader.peek()) == "{"


def _read_parentheses(reader: Reader) -> Reading[str | None]:
    """Read Python up to the parenthesis that closes the first one; None if there is none."""
    parts: list[str] = []
    depth = 0
    while found := (yield from reader.until(SYNTAX, parts.append)):
        parts.append(found)
        if found in QUOTES:
            if not (yield from _read_string(reader, found, parts)):
                return None
            continue
        depth += 1 if found in "([{" else -1
        if not depth:
            return "".join(parts)
    return None


def _read_string(reader: Reader, quote: str, parts: list[str]) -> Reading[bool]:
    """Read the rest of a string; returns whether it has an end."""
    if (yield from reader.starts(quote * 2)):
        parts.append(reader.take(2))
        quote *= 3
    elif (yield from reader.starts(quote)):
        parts.append(reader.take(1))
        return True
    syntax = Patterns(quote, "\\")
    while (found := (yield from reader.until(syntax, parts.append))) == "\\":
        parts.append(found)
        parts.append((yield from reader.character()))
    parts.append(found)
    return bool(found)


def arguments_as_json(source: str, names: Sequence[str] = ()) -> str | None:
    """The arguments in `source`, a pair of parentheses around literals, as JSON; None if they are
    not. Arguments without a name have those of `names`, in their order. A name need not be one of
    Python's: a tool's parameter may be called `class` or `user-id`."""
    try:
        source, keys = _with_python_names(source)
        call = _parsed(f"f{source}")
        if not isinstance(call, ast.Call) or len(call.args) > len(names):
            return None
        found: dict[str, Any] = dict(
            zip(names, map(_literal, call.args), strict=False)  # the rest are optional
        )
        for keyword in call.keywords:
            key = keys.get(keyword.arg or "")
            if key is None or key in found:
                return None
            found[key] = _literal(keyword.value)
        return _as_json(found)
    except UNREADABLE:
        return None


def is_key(name: str) -> bool:
    """Whether `name` is read as the name of an argument where a model writes it."""
    return _with_python_names(f"({name}=0)")[1] == {"key_0": name}


def _with_python_names(source: str) -> tuple[str, dict[str, str]]:
    """The arguments in `source` with a name of ours for each key, and the keys by these names."""
    keys: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        if not found["key"]:
            # Some models break lines in any string.
            return ESCAPE_OR_BREAK.sub(lambda each: "\\n" if each[0] == "\n" else each[0], found[0])
        name = f"key_{len(keys)}"
        keys[name] = found["key"]
        return f"{found['before']}{name}="

    return KEY_OR_STRING.sub(renamed, source), keys


def _as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")  # a lone surrogate from an escape is no text
    return text


def python_as_json(source: str) -> str | None:
    """A Python literal as JSON; None if it is none, or has what JSON has not."""
    try:
        return _as_json(_literal(_parsed(source)))
    except UNREADABLE:
        return None


def _parsed(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes, on the standard error
        return ast.parse(source, mode="eval").body


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JSONWords().visit(node))


class _JSONWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


PYTHONIC = CallFormat(
    "pythonic",
    CallSpelling(
        head="",
        middle="(",
        tail=")",
        between=", ",
        begin="[",
        end="]",
        arguments=ArgumentStyle.PYTHON,
    ),
    markers=(PYTHON_START, PYTHON_END),
    openings=(PYTHON_START,),
    read=read_pythonic,
    closing=PYTHON_END,
    bare=True,
    in_text=(BRACKET,),
)
LFM2 = CallFormat(
    "lfm2",
    replace(PYTHONIC.spelling, begin=f"{LFM_START}[", end=f"]{LFM_END}"),
    markers=(LFM_START, LFM_END),
    openings=(LFM_START,),
    read=read_lfm2,
    closing=LFM_END,
)
FORMATS = (PYTHONIC, LFM2)
