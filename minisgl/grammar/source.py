"""What users may write, made into what llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import StructTag, regex_to_lark

from minisgl.errors import InvalidRequestError
from minisgl.grammar import gbnf
from minisgl.grammar.lexemes import to_lark
from minisgl.request import StructuredOutput

MAX_BYTES = 1 << 20
# A space, or a line break and an indentation. Without a bound a model may go on for ever.
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"
BLANK = r"[\x20\t\r\n]"  # between the parts of a JSON text
ESCAPE = re.compile(r"\\(.)", re.S)
# Behind a grammar, so that the lines in errors are the user's. By default llguidance allows only
# the usual tokens of a text without alternatives, and calls the tokenizer for it at every step.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
LIMIT_KEYS = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")
)
VALUE_KEYS = frozenset(("const", "enum", "default", "examples"))
GBNF = re.compile(r"(?m)^\s*[\w-]+\s*::=")
LARK = re.compile(r"(?m)^\s*(start\s*(\[.*\])?:|%llguidance\b)")


class Source(msgspec.Struct, frozen=True):
    """A constraint as plain data, which a process can be sent."""

    kind: str  # a field of StructuredOutput
    text: str  # in the syntax of the kind; JSON where that is not text
    strict: bool = False
    whitespace: str = WHITESPACE  # "": none

    @property
    def schema(self) -> object:
        return json.loads(self.text) if self.kind == "json_schema" else None


def source_of(structured: StructuredOutput) -> Source:
    """Raises InvalidRequestError for what is not JSON or Unicode, or too large."""
    whitespace = structured.whitespace_pattern
    try:
        kind, text = _kind_and_text(structured)
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            structured.field, "is not Unicode text (a lone surrogate)."
        ) from error
    except RecursionError as error:
        raise InvalidRequestError(structured.field, "is nested too deeply.") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(structured.field, f"is not valid JSON: {error}.") from error
    if size > MAX_BYTES:
        raise InvalidRequestError(
            structured.field, f"has {size} bytes; at most {MAX_BYTES} are taken."
        )
    if whitespace is None:
        blanks = WHITESPACE
    else:  # where \s means the blanks of JSON
        blanks = ESCAPE.sub(lambda escape: BLANK if escape[1] == "s" else escape[0], whitespace)
    return Source(kind, text, structured.strict, blanks)


def _kind_and_text(structured: StructuredOutput) -> tuple[str, str]:
    if structured.json_object:
        return "json_schema", '{"type":"object"}'
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.grammar is not None:
        return "grammar", structured.grammar
    if structured.choice is not None:
        return "choice", _as_json(structured.choice)
    if structured.tool_calls is not None:
        return "tool_calls", structured.tool_calls.text
    if structured.structural_tag is not None:
        return "structural_tag", _json_text(structured.structural_tag, structured.field)
    return "json_schema", _json_text(structured.json_schema, structured.field)


def _json_text(value: object, field: str) -> str:
    parsed = json.loads(value) if isinstance(value, str) else value
    if parsed is True:  # the schema of every value
        parsed = {}
    if parsed is False:
        raise InvalidRequestError(field, "is false, which no answer satisfies.")
    if not isinstance(parsed, Mapping):
        raise InvalidRequestError(field, "must be an object, or its JSON text.")
    return _as_json(dict(parsed))


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def schema_options(*, strict: bool, whitespace: str = WHITESPACE) -> dict[str, Any]:
    """How a schema is compiled: the value of its key x-guidance."""
    if not whitespace:
        return {"whitespace_flexible": False, "lenient": not strict}
    return {"whitespace_pattern": whitespace, "lenient": not strict}


def grammar_text(source: Source) -> str:
    """The grammar in llguidance's form. Raises ValueError, or whatever a parser in Python does."""
    match source.kind:
        case "json_schema":
            schema = json.loads(source.text)
            options = schema_options(strict=source.strict, whitespace=source.whitespace)
            return f"start: {inline_schema(schema, options)}{OPTIONS}"
        case "regex":
            return f"start: {inline_regex(source.text)}{OPTIONS}"
        case "choice":
            choices = "|".join(map(literal, json.loads(source.text)))
            return f"start: /(?:{choices})/{OPTIONS}"
        case "grammar":
            return f"{_lark(source.text)}{OPTIONS}"
        case "structural_tag":
            return _structural_tags(json.loads(source.text), source)
        case _:
            return source.text


def inline_schema(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """A schema inside a Lark grammar; of its own x-guidance nothing is left."""
    return f"%json {_as_json({**with_integers(schema), 'x-guidance': options})}"


def with_integers(schema: Any) -> Any:
    """The schema with 2 for a limit of 2.0, which means the same."""
    if isinstance(schema, list):
        return [*map(with_integers, schema)]
    if not isinstance(schema, dict):
        return schema
    return {key: _integer(key, value) for key, value in schema.items()}


def _integer(key: str, value: Any) -> Any:
    if key in LIMIT_KEYS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if key in VALUE_KEYS else with_integers(value)


def inline_regex(regex: str) -> str:
    """A regex inside a Lark grammar."""
    return f"/{regex_to_lark(regex, use_ascii='')}/" if regex else '""'


def literal(text: str) -> str:
    """A regex for exactly this text."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text
    )


def _lark(text: str) -> str:
    if LARK.search(text) or not GBNF.search(text):
        return text
    try:
        return to_lark(gbnf.read(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"as GBNF (it has `::=`): {error}") from error


def _structural_tags(tag: dict[str, Any], source: Source) -> str:
    """The legacy form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if "format" in tag:
        raise ValueError(
            'the nested form, with "format", is not supported; send "structures" and "triggers"'
        )
    match tag:
        case {"structures": [_, *_] as structures, "triggers": [_, *_] as triggers}:
            pass
        case _:
            raise ValueError('it needs "structures" and "triggers", two lists that are not empty')
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be texts that are not empty")
    options = schema_options(strict=source.strict, whitespace=source.whitespace)
    tags = []
    for index, structure in enumerate(structures):
        match structure:
            case {"begin": str(begin), "end": str(end)}:
                schema = structure.get("schema", {})
            case _:
                raise ValueError(f'structures.{index} needs "begin" and "end", two texts')
        if not isinstance(schema, dict):
            raise ValueError(f"structures.{index}.schema must be an object")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise ValueError(f"structures.{index}.begin must start with one of the triggers")
        grammar = {**with_integers(schema), "x-guidance": options}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end))
    return f"{StructTag.to_grammar(tags, assume_special=False)}{OPTIONS}"
