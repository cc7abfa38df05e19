"""Grammars of tool calls, in the format in which the model writes them.

Each tool has a schema of its own in the grammar, so that references inside of it work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from minisgl.errors import InvalidRequestError
from minisgl.grammar.schema import escaped
from minisgl.grammar.source import (
    OPTIONS,
    grammar_text,
    inline_regex,
    inline_schema,
    schema_options,
    source_of,
)
from minisgl.request import StructuredOutput, ToolCallGrammar
from minisgl.text.parsing.formats import MAX_HELD_IN_TEXT, OPENINGS, ArgumentStyle, CallSpelling
from minisgl.text.parsing.gemma_format import QUOTE
from minisgl.text.parsing.python_format import is_key
from minisgl.text.parsing.xml_format import types_of

# The one argument of a custom tool, whose input is a text.
CUSTOM_ARGUMENT = "input"
PLAIN_KEY = re.compile(r"[^<>{}\[\]:,\"\s\/]+")
SCALAR = r"-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?|true|false|null"
ANY_TEXT = r"/(.|\n)*/"
# The escapes that mean the same in JSON and in Python.
PYTHON_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call: a function, or a custom tool with a text for its input."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: no arguments
    strict: bool = False
    custom: bool = False
    regex: str | None = None  # of a custom tool's input
    lark: str | None = None
    field: str = "tools"  # the name of the schema, or of the input's grammar, in errors


def tool_calls(
    tools: Sequence[Tool],
    spelling: CallSpelling,
    marker_ids: Mapping[str, int],
    *,
    required: bool,
    parallel: bool = True,
    field: str = "tools",
) -> StructuredOutput:
    """A constraint for answers that call `tools`.

    marker_ids: the markers in `spelling` that are one token. required: nothing but calls;
    otherwise a text may stand for them, or before them. parallel: allow several calls.
    Raises InvalidRequestError for a tool that the format cannot be held to.
    """
    if not tools:
        raise InvalidRequestError(field, "there is no tool to call.")
    grammar = _Grammar(spelling, marker_ids)
    names = [json.dumps(tool.name, ensure_ascii=False)[1:-1] for tool in tools]
    ends = [  # of each call, from its arguments on
        grammar.rule(
            f"end_{index}",
            _Arguments(grammar, f"call_{index}", tool).rule,
            grammar.text(spelling.tail),
        )
        for index, tool in enumerate(tools)
    ]
    number = "/:[0-9]+/" if spelling.numbered else ""
    middle = grammar.text(spelling.middle)
    bodies = [  # of each call, what follows its head
        grammar.rule(f"call_{index}", string(name), number, middle, ends[index])
        for index, name in enumerate(names)
    ]
    any_call = grammar.rule("any_call", " | ".join(bodies))
    more = f"({grammar.text(spelling.between + spelling.head)} {any_call})*"
    further = more if parallel and not spelling.single else ""
    after = f"{further} {grammar.text(spelling.end)}"  # the first call
    beginning = spelling.begin + spelling.head
    if required:
        grammar.rule("start", grammar.text(beginning), any_call, after)
    elif all(spelling.aside):
        before, behind = map(grammar.text, spelling.aside)
        grammar.rule("aside", f"{before} {ANY_TEXT} {behind}")
        text_or_calls = f"{grammar.text(spelling.text)} {ANY_TEXT} | {grammar.text(beginning)}"
        grammar.rule("start", f"aside* ({text_or_calls} {any_call} {after})")
    elif opening := next((text for text in OPENINGS if beginning.startswith(text)), ""):
        _optional_calls(grammar, opening, beginning, f"{any_call} {after}")
    else:
        calls = f"{grammar.text(beginning)} {any_call} {after}"
        beginnings = [spelling.after_text + spelling.first(name) for name in names]
        if len(beginnings) > MAX_HELD_IN_TEXT:
            beginnings = []
        any_text = spelling.text.replace("\n", "\\n") or f"[^{re.escape(beginning[0])}]"
        _optional_bare_calls(grammar, calls, f"{any_text}(.|\\n)*", beginnings, ends, after)
    text = ToolCallGrammar(str(grammar), tuple(map(_part, filter(_has_grammar, tools))))
    return StructuredOutput(tool_calls=text, field=field)


def calls_or(
    calls: StructuredOutput, answer: StructuredOutput, header: str, marker_ids: Mapping[str, int]
) -> StructuredOutput:
    """A constraint for answers that either make calls, as `calls` says, or are like `answer`.

    header: what is written before such an answer, which is markup.
    """
    assert calls.tool_calls is not None
    text = calls.tool_calls.text
    first, *others = json.loads(text)["grammars"] if text.startswith("{") else [_named("", text)]
    start = f"start: @tool_calls | {marked(header, marker_ids)} @answer{OPTIONS}"
    parts = [
        _named("", start),
        {**first, "name": "tool_calls"},
        *others,
        _named("answer", grammar_text(source_of(answer))),
    ]
    both = ToolCallGrammar(json.dumps({"grammars": parts}), (*calls.tool_calls.parts, answer))
    return StructuredOutput(tool_calls=both, field=answer.field)


def headed(
    answer: StructuredOutput, header: str, marker_ids: Mapping[str, int]
) -> StructuredOutput:
    """A constraint for answers like `answer` with a header, which is markup."""
    start = f"start: {marked(header, marker_ids)} @answer{OPTIONS}"
    parts = [_named("", start), _named("answer", grammar_text(source_of(answer)))]
    whole = ToolCallGrammar(json.dumps({"grammars": parts}), (answer,))
    return StructuredOutput(tool_calls=whole, field=answer.field)


def _named(name: str, lark: str) -> dict[str, str]:
    return {"name": name, "lark_grammar": lark} if name else {"lark_grammar": lark}


def _optional_calls(grammar: _Grammar, opening: str, beginning: str, calls: str) -> None:
    """Add the start of a grammar in which a text may stand for the calls, or before them."""
    if marker := grammar.first_marker(opening):
        before, _, rest = beginning.partition(marker)
        text = f"/(.|\\n)*{re.escape(before)}/" if before else ANY_TEXT
        grammar.rule("start", f"{ANY_TEXT} | {text} {grammar.text(marker + rest)} {calls}")
    else:  # the text goes as far as the opening
        rest = grammar.text(beginning.removeprefix(opening))
        grammar.rule("opened[lazy]", f"{ANY_TEXT} {grammar.text(opening)}")
        grammar.rule("start", f"opened {rest} {calls} | {ANY_TEXT}")


def _optional_bare_calls(
    grammar: _Grammar,
    calls: str,
    text: str,
    beginnings: Sequence[str],
    ends: Sequence[str],
    after: str,
) -> None:
    """The same for calls without a marker.

    An answer that begins as they do is calls. `text` is a regex of others, which go as far as one
    of `beginnings`. These have the name of a tool: in a text, what all calls begin with is common.
    """
    opened = [
        grammar.rule(f"opened_{index}[lazy]", f"/{text}/ {grammar.text(beginning)}").partition("[")[
            0
        ]
        for index, beginning in enumerate(beginnings)
    ]
    in_text = [f"{opening} {end} {after}" for opening, end in zip(opened, ends, strict=False)]
    grammar.rule("start", " | ".join([calls, *in_text, f"/({text})?/"]))


def _has_grammar(tool: Tool) -> bool:
    return tool.parameters is not None or tool.regex is not None or tool.lark is not None


def _part(tool: Tool) -> StructuredOutput:
    """The constraint of one tool alone, which tells what is wrong in it."""
    if tool.regex is not None:
        return StructuredOutput(regex=tool.regex, field=tool.field)
    if tool.lark is not None:
        return StructuredOutput(grammar=tool.lark, field=tool.field)
    return StructuredOutput(json_schema=tool.parameters, strict=tool.strict, field=tool.field)


class _Grammar:
    """A Lark grammar that is being written."""

    def __init__(self, spelling: CallSpelling, marker_ids: Mapping[str, int]) -> None:
        self.style = spelling.arguments
        self.tags, self.json_tag = spelling.tags, spelling.json_tag or spelling.tags[1]
        self.marker_ids = marker_ids
        self._rules: list[str] = []
        self._nested: list[dict[str, str]] = []  # grammars of their own

    def rule(self, name: str, *parts: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{name}: {' '.join(parts)}")
        return name

    def text(self, text: str) -> str:
        """An expression for a text with markers in it; "" for none."""
        return marked(text, self.marker_ids)

    def first_marker(self, text: str) -> str:
        """The first marker in a text; "" for none."""
        places = {text.find(marker): marker for marker in self.marker_ids if marker in text}
        return places[min(places)] if places else ""

    def nest(self, name: str, lark: str) -> str:
        """Add a grammar of its own; returns an expression for it."""
        self._nested.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def __str__(self) -> str:
        lark = "\n".join(self._rules) + OPTIONS
        if not self._nested:
            return lark
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._nested]})


def marked(text: str, marker_ids: Mapping[str, int]) -> str:
    """An expression for a text in which `marker_ids` are tokens; "" for none."""
    parts = re.split(f"({'|'.join(map(re.escape, marker_ids))})", text) if marker_ids else [text]
    return " ".join(
        f"<[{marker_ids[part]}]>" if part in marker_ids else string(part) for part in parts if part
    )


def string(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Arguments:
    """The rules for the arguments of one tool. `rule` is the name of the first."""

    def __init__(self, grammar: _Grammar, name: str, tool: Tool) -> None:
        self._grammar = grammar
        self._name = name
        self._tool = tool
        self._root = _object_schema(tool)
        properties = self._root.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        required = self._root.get("required")
        self._required = required if isinstance(required, list | tuple) else ()
        if tool.lark is not None and grammar.style is not ArgumentStyle.TAGS:
            raise InvalidRequestError(
                tool.field,
                "cannot be enforced: the model writes the input of tools as a JSON string. Use a "
                "regex, or the format text.",
            )
        write = {
            ArgumentStyle.JSON: self._json,
            ArgumentStyle.TAGS: self._tagged,
            ArgumentStyle.QUOTED: self._quoted,
            ArgumentStyle.PYTHON: self._python,
        }[grammar.style]
        self.rule = write()

    def _json(self) -> str:
        schema = inline_schema(self._root, schema_options(strict=self._tool.strict))
        return self._grammar.rule(f"{self._name}_arguments", schema)

    # -- tags --------------------------------------------------------------------------------------

    def _tagged(self) -> str:
        parts = []
        before_key, before_value = map(self._grammar.text, self._grammar.tags[:2])
        for index, key in enumerate(self._properties):
            name = f"{self._name}_{index}"
            tag = self._grammar.json_tag if self._is_json(key) else self._grammar.tags[1]
            head = f"{before_key} {string(key)} {self._grammar.text(tag)}"
            rule = self._grammar.rule(name, head, self._tagged_value(name, key))
            parts.append(rule if key in self._required else f"{rule}?")
        if not self._properties and self._root.get("additionalProperties") is not False:
            value = self._raw_text(f"{self._name}_value", ANY_TEXT)
            parts.append(f"({before_key} /[^<>\\n]+/ {before_value} {value})*")
        return self._grammar.rule(f"{self._name}_arguments", " ".join(parts) or '""')

    def _tagged_value(self, name: str, key: str) -> str:
        tool, schema = self._tool, self._properties[key]
        end = self._grammar.text(self._grammar.tags[2])
        if tool.lark is not None:
            return f"{self._grammar.nest(f'{name}_input', tool.lark)} {end}"
        if tool.regex is not None:
            return f"{inline_regex(tool.regex)} {end}"
        if self._is_json(key):
            return f"{self._schema_of(key, {})} {end}"
        constants = _constants(schema)
        if constants:
            texts = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for value in constants
            )
            return f"({' | '.join(map(string, texts))}) {end}"
        if tool.strict and "format" in schema:
            raise InvalidRequestError(
                tool.field,
                f"at /properties/{escaped(key)}/format: cannot be enforced, for the model writes "
                "strings in calls as plain text; leave it out, or do without strict.",
            )
        return self._raw_text(f"{name}_value", _text_regex(schema))

    def _is_json(self, key: str) -> bool:
        """Whether a value is written as JSON; others are texts."""
        tool, types = self._tool, types_of(self._root, key)
        is_text = tool.lark is not None or tool.regex is not None or "string" in types
        return not is_text and bool(types or tool.strict)

    def _raw_text(self, name: str, regex: str) -> str:
        end = self._grammar.tags[2]
        if marker := self._grammar.first_marker(end):  # which no text has in it
            before = end[: end.index(marker)]
            if before:
                self._grammar.rule(name.upper(), regex, string(before))
                regex = name.upper()
            return self._grammar.rule(name, regex, self._grammar.text(end.removeprefix(before)))
        self._grammar.rule(f"{name}[suffix={string(end)}]", regex)
        return name

    def _listed(self, assign: str, separator: str, value: Callable[[str], str]) -> str:
        """`first_i`: the arguments from i on, the first of the call; `next_i`: others precede."""
        keys = [*self._properties]
        name, rule = self._name, self._grammar.rule
        rule(f"{name}_first_{len(keys)}", '""')
        rule(f"{name}_next_{len(keys)}", '""')
        for index in reversed(range(len(keys))):
            key = keys[index]
            argument = rule(f"{name}_{index}", string(f"{key}{assign}"), value(key))
            skip = "" if key in self._required else f" | {name}_first_{index + 1}"
            skip_next = "" if key in self._required else f" | {name}_next_{index + 1}"
            rule(f"{name}_first_{index}", f"{argument} {name}_next_{index + 1}{skip}")
            rule(
                f"{name}_next_{index}",
                f'"{separator}" {argument} {name}_next_{index + 1}{skip_next}',
            )
        return f"{name}_first_0"

    # -- Gemma -------------------------------------------------------------------------------------

    def _quoted(self) -> str:
        for key in self._properties:
            if not PLAIN_KEY.fullmatch(key):
                raise InvalidRequestError(
                    self._tool.field,
                    f"at /properties/{escaped(key)}: the model writes names without quotes, where "
                    "blanks, quotes, brackets, commas and colons cannot be read; rename it.",
                )
        return self._listed(":", ",", self._quoted_value)

    def _quoted_value(self, key: str) -> str:
        tool, schema, quote = self._tool, self._properties[key], self._grammar.text(QUOTE)
        if tool.regex is not None:
            return f"{quote} {inline_regex(tool.regex)} {quote}"
        types = types_of(self._root, key)
        if types and not types & {"string", "array", "object"}:
            return self._schema_of(key, {})
        if types == {"string"}:
            texts = " | ".join(string(value) for value in _constants(schema))
            return f"{quote} {f'({texts})' if texts else _text_regex(schema)} {quote}"
        if tool.strict:
            raise InvalidRequestError(
                tool.field,
                f"at /properties/{escaped(key)}: cannot be enforced, for the model does not write "
                "lists and objects in calls as JSON; do without strict.",
            )
        name = f"{self._name}_{[*self._properties].index(key)}_value"
        rule = self._grammar.rule
        rule(f"{name}_pair", f'/{PLAIN_KEY.pattern}/ ":" {name}')
        rule(f"{name}_list", f'"[" ({name} ("," {name})*)? "]"')
        rule(f"{name}_object", f'"{{" ({name}_pair ("," {name}_pair)*)? "}}"')
        text = f"{quote} {ANY_TEXT} {quote}"
        return rule(name, f"{text} | {name}_list | {name}_object | /{SCALAR}/")

    # -- Python ------------------------------------------------------------------------------------

    def _python(self) -> str:
        for key in self._properties:
            if not is_key(key):
                raise InvalidRequestError(
                    self._tool.field,
                    f"at /properties/{escaped(key)}: the model writes arguments as Python does, "
                    "where a name with quotes, brackets or any of = , : * cannot be read; rename "
                    "it.",
                )
        return self._listed("=", ", ", self._python_value)

    def _python_value(self, key: str) -> str:
        if types_of(self._root, key) == {"boolean"}:
            return '("True" | "False")'
        return self._schema_of(key, {"json_allowed_escapes": PYTHON_ESCAPES})

    def _schema_of(self, key: str, options: dict[str, Any]) -> str:
        """The schema of a property, with all that its references may name."""
        schema: dict[str, Any] = {
            "$defs": {"tool": _moved(self._root, "#/$defs/tool")},
            "$ref": f"#/$defs/tool/properties/{quote(escaped(key), safe='~')}",
        }
        return inline_schema(schema, {**schema_options(strict=self._tool.strict), **options})


def _object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    if tool.custom:
        pattern = {} if tool.regex is None else {"pattern": f"^(?:{tool.regex})$"}
        return {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string", **pattern}},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        }
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is to stand at `place`: its references into itself go there."""
    match schema:
        case {"$ref": str(reference)} if reference.startswith("#") and not reference[1:2].isalpha():
            moved = {key: _moved(value, place) for key, value in schema.items() if key != "$ref"}
            return {**moved, "$ref": place + reference[1:]}
        case Mapping():
            return {key: _moved(value, place) for key, value in schema.items()}
        case list() | tuple():
            return [_moved(value, place) for value in schema]
        case _:
            return schema


def _constants(schema: Any) -> list[Any]:
    match schema:
        case {"const": value}:
            return [value]
        case {"enum": [*values]}:
            return values
        case _:
            return []


def _text_regex(schema: Any) -> str:
    """A Lark expression for the plain text of a string: its pattern and its lengths."""
    if not isinstance(schema, Mapping):
        return ANY_TEXT
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    regex = f"/(.|\\n){{{least},{most}}}/" if least or most != "" else ANY_TEXT
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if pattern.endswith("$") else "(.|\\n)*"
        bare = pattern.removeprefix("^").removesuffix("$")
        regex = f"{inline_regex(f'{before}(?:{bare}){after}')} & {regex}"
    return regex
