"""Grammars of tool calls, in the format in which the model writes them.

Each tool has a schema of its own in the grammar, so that references inside of it work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from minisgl.errors import InvalidRequestError
from minisgl.grammar.gemma_values import GemmaValues
from minisgl.grammar.lark import Grammar, Member, marked, string
from minisgl.grammar.plain_texts import ANY_TEXT, text_of
from minisgl.grammar.schema import escaped
from minisgl.grammar.source import (
    OPTIONS,
    grammar_text,
    inline_schema,
    schema_options,
    source_of,
)
from minisgl.request import StructuredOutput, ToolCallGrammar
from minisgl.text.parsing.alternatives import alternatives, constants, properties_of, types_in
from minisgl.text.parsing.call_format import ArgumentStyle, CallSpelling
from minisgl.text.parsing.formats import MAX_HELD_IN_TEXT, OPENINGS
from minisgl.text.parsing.plain_values import types_of
from minisgl.text.parsing.python_format import is_key

# The one argument of a custom tool, whose input is a text.
CUSTOM_ARGUMENT = "input"
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
) -> StructuredOutput:
    """A constraint for answers that call `tools`.

    marker_ids: the markers in `spelling` that are one token. required: nothing but calls;
    otherwise a text may stand for them, or before them. parallel: allow several calls.
    Raises InvalidRequestError for a tool that the format cannot be held to.
    """
    if not tools:
        raise InvalidRequestError("tools", "there is no tool to call.")
    grammar = Grammar(marker_ids)
    names = [json.dumps(tool.name, ensure_ascii=False)[1:-1] for tool in tools]
    ends = [  # of each call, from its arguments on
        grammar.rule(
            f"end_{index}",
            _Arguments(grammar, f"call_{index}", tool, spelling).rule,
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
    return StructuredOutput(tool_calls=text, field="tools")


def headed(
    answer: StructuredOutput,
    header: str,
    marker_ids: Mapping[str, int],
    calls: StructuredOutput | None = None,
) -> StructuredOutput:
    """A constraint for answers like `answer` behind a header, which is markup, or for those that
    make calls, as `calls` says."""
    start, parts = f"{marked(header, marker_ids)} @answer", [answer]
    grammars = [{"name": "answer", "lark_grammar": grammar_text(source_of(answer))}]
    if calls is not None and (made := calls.tool_calls) is not None:
        is_several = made.text.startswith("{")
        several = json.loads(made.text)["grammars"] if is_several else [{"lark_grammar": made.text}]
        grammars = [{**several[0], "name": "tool_calls"}, *several[1:], *grammars]
        start, parts = f"@tool_calls | {start}", [*made.parts, answer]
    grammars.insert(0, {"lark_grammar": f"start: {start}{OPTIONS}"})
    whole = ToolCallGrammar(json.dumps({"grammars": grammars}), tuple(parts))
    return StructuredOutput(tool_calls=whole, field=answer.field)


def _optional_calls(grammar: Grammar, opening: str, beginning: str, calls: str) -> None:
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
    grammar: Grammar,
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


class _Arguments:
    """The rules for the arguments of one tool. `rule` is the name of the first."""

    def __init__(self, grammar: Grammar, name: str, tool: Tool, spelling: CallSpelling) -> None:
        self._grammar = grammar
        self._spelling = spelling
        self._name = name
        self._tool = tool
        self._root = _object_schema(tool)
        self._properties = properties_of(self._root)
        required = self._root.get("required")
        self._required = required if isinstance(required, list | tuple) else ()
        if tool.lark is not None and spelling.arguments is not ArgumentStyle.TAGS:
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
        }[spelling.arguments]
        try:
            self.rule = write()
        except RecursionError as error:
            raise InvalidRequestError(tool.field, "is nested too deeply.") from error

    def _json(self) -> str:
        schema = inline_schema(self._root, schema_options(strict=self._tool.strict))
        return self._grammar.rule(f"{self._name}_arguments", schema)

    # -- tags --------------------------------------------------------------------------------------

    def _tagged(self) -> str:
        parts = []
        tags, json_tag = self._spelling.tags, self._spelling.json_tag
        before_key, before_value = map(self._grammar.text, tags[:2])
        for index, key in enumerate(self._properties):
            name = f"{self._name}_{index}"
            tag = (self._is_json(key) and json_tag) or tags[1]
            head = f"{before_key} {string(key)} {self._grammar.text(tag)}"
            rule = self._grammar.rule(name, head, self._tagged_value(name, key))
            parts.append(rule if key in self._required else f"{rule}?")
        if self._is_open:
            value = self._grammar.raw_text(f"{self._name}_value", ANY_TEXT, tags[2])
            parts.append(f"({before_key} /[^<>\\n]+/ {before_value} {value})*")
        return self._grammar.rule(f"{self._name}_arguments", " ".join(parts) or '""')

    def _tagged_value(self, name: str, key: str) -> str:
        end = self._grammar.text(self._spelling.tags[2])
        if self._tool.lark is not None:
            return f"{self._grammar.nest(f'{name}_input', self._tool.lark)} {end}"
        types = types_of(self._root, key)
        if self._is_json(key):
            return f"{self._schema_of(key, types)} {end}"
        schemas = alternatives(self._root, self._properties[key]) or [{}]
        texts = [text for schema in schemas for text in self._texts(key, schema)]
        either = " | ".join(f"({text})" for text in texts)
        value = self._grammar.raw_text(f"{name}_value", either, self._spelling.tags[2])
        others = types - {"string"}
        if not others or ANY_TEXT in texts or self._spelling.json_tag:
            return value
        return f"({value} | {self._schema_of(key, others)} {end})"

    def _texts(self, key: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Expressions of terminals for the texts that a schema without combinations allows."""
        if values := constants(schema):
            for value in values:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield string(text)
        elif "string" in types_in(schema):
            keyword = next((each for each in ("format", "allOf", "not") if each in schema), "")
            if self._tool.strict and keyword:
                raise InvalidRequestError(
                    self._tool.field,
                    f"at /properties/{escaped(key)}/{keyword}: cannot be enforced, for the model "
                    "writes strings in calls as plain text; leave it out, or do without strict.",
                )
            yield text_of(schema)

    def _is_json(self, key: str) -> bool:
        """Whether a value is written as JSON; others are texts."""
        types = types_of(self._root, key)
        return "string" not in types and bool(types or self._tool.strict)

    @property
    def _is_open(self) -> bool:
        """Whether the arguments may be any."""
        return not self._properties and self._root.get("additionalProperties") is not False

    # -- Gemma -------------------------------------------------------------------------------------

    def _quoted(self) -> str:
        tool = self._tool
        values = GemmaValues(
            self._grammar, self._name, self._root, field=tool.field, strict=tool.strict
        )
        return values.arguments()

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
        name, rule = self._name, self._grammar.rule
        members = []
        for index, key in enumerate(self._properties):
            argument = rule(f"{name}_{index}", string(f"{key}="), self._python_value(key))
            members.append(Member(argument, key in self._required))
        options = {**schema_options(strict=False), "json_allowed_escapes": PYTHON_ESCAPES}
        more = rule(f"{name}_more", r"/[a-zA-Z_]\w*/", '"="', inline_schema({}, options))
        return self._grammar.listed(name, members, ", ", more if self._is_open else "")

    def _python_value(self, key: str) -> str:
        types = types_of(self._root, key)
        if types == {"boolean"}:
            schemas = alternatives(self._root, self._properties[key])
            values = {value for each in schemas for value in constants(each) or (True, False)}
            return f"({' | '.join(string(str(value)) for value in sorted(values))})"
        return self._schema_of(key, types, json_allowed_escapes=PYTHON_ESCAPES)

    def _schema_of(self, key: str, types: frozenset[str], **options: Any) -> str:
        """The schema of a property, with all that its references may name.

        types: of its values, those that are held to it; none for all.
        """
        schema: dict[str, Any] = {
            "$defs": {"tool": _moved(self._root, "#/$defs/tool")},
            "$ref": f"#/$defs/tool/properties/{quote(escaped(key), safe='~')}",
        }
        if "string" not in types and "string" in types_of(self._root, key):
            schema["type"] = sorted(types)
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
