"""What msgspec finds wrong with a body, in words for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct, inspect

from minisgl.errors import CallerError, InvalidRequestError, one_of

MAX_MESSAGE_CHARS = 500
NOT_SUPPORTED = "is not supported; leave it out"
# By msgspec's names.
KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a text",
}
PARTS = {"array": "entries", "object": "fields", "str": "characters"}
TYPE = re.compile(r"Expected `(?P<wanted>[\w |]+)`, got `(?P<got>\w+)`")
BOUND = re.compile(
    r"Expected `(?P<kind>\w+)` (?P<length>of length )?(?P<sign>[<>]=) (?P<bound>\S+)"
)
# Of what many clients ask for, and a list of values would not explain.
ENUM_WORDS = {
    "response_format.type": "JSON mode and structured output are not supported; allowed: text"
}


def field_error(message: str, kind: type[Struct]) -> CallerError:
    """From msgspec's words: "Expected `int`, got `str` - at `$.messages[0].role`"."""
    what, found, where = message.rpartition(" - at `")
    if not found:
        what, where = where, ""
    path = re.findall(r"\w+", where.removeprefix("key` in `"))
    if field := re.search("field `(.*)`$", what, re.DOTALL):
        path.append(field[1])
    if not path:
        return CallerError(f"The body is not a request: {what}.")
    said = _said(what[:MAX_MESSAGE_CHARS], path, kind)
    if where.startswith("key` in `"):
        said = f"each key {said}"
    return InvalidRequestError(".".join(path), f"{said}.")


def _said(what: str, path: Sequence[str], kind: type[Struct]) -> str:
    """What follows the name of the field."""
    if what.startswith("Expected `null`"):
        return NOT_SUPPORTED
    if what.startswith("Object missing required field"):
        return "is missing"
    if what.startswith("Object contains unknown field"):
        return "is not known; leave it out"
    if found := TYPE.fullmatch(what):
        return _wrong_type(found["wanted"].split(" | "), found["got"])
    if found := BOUND.fullmatch(what):
        return _out_of_bounds(found)
    if what.startswith("Invalid enum value"):
        values = _values_at(kind, path)
        if values == [""]:
            return NOT_SUPPORTED
        value = what.removeprefix("Invalid enum value ")
        return ENUM_WORDS.get(".".join(path), f"cannot be {value}; {one_of(values)}")
    return what[:1].lower() + what[1:]


def _wrong_type(wanted: Sequence[str], got: str) -> str:
    # null stands for a field that is not given.
    must_be = " or ".join(KINDS.get(name, name) for name in wanted if name != "null")
    if got == "float":  # where an integer is wanted, it would be odd to hear of a number
        return f"must be {must_be}"
    return f"must be {must_be}, not {KINDS.get(got, got)}"


def _out_of_bounds(found: re.Match[str]) -> str:
    """Of a number, or of the length of something."""
    if found["length"] and found["sign"] == ">=" and found["bound"] == "1":
        return "must not be empty"
    limit = "at most" if found["sign"] == "<=" else "at least"
    if found["length"]:
        return f"must have {limit} {found['bound']} {PARTS.get(found['kind'], 'entries')}"
    return f"must be {limit} {found['bound']}"


def _values_at(kind: type[Struct], path: Sequence[str]) -> list[object]:
    """The literals that a field allows."""
    types = _alternatives(inspect.type_info(kind))
    for name in path:
        types = [inner for outer in types for inner in _members(outer, name)]
    return [
        value for type in types if isinstance(type, inspect.LiteralType) for value in type.values
    ]


def _members(type: inspect.Type, name: str) -> list[inspect.Type]:
    if isinstance(type, inspect.ListType):
        return _alternatives(type.item_type)
    if isinstance(type, inspect.StructType):
        return [
            inner
            for field in type.fields
            if field.encode_name == name
            for inner in _alternatives(field.type)
        ]
    return []


def _alternatives(type: inspect.Type) -> list[inspect.Type]:
    return list(type.types) if isinstance(type, inspect.UnionType) else [type]
