"""Rewrites the errors that msgspec finds in a body as readable messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeGuard

from msgspec import Struct, inspect

from minisgl.errors import CallerError, InvalidRequestError, one_of

MAX_MESSAGE_CHARS = 500
SEPARATORS = str.maketrans("$[].`", "     ")
FIELD_OPENINGS = ("Object missing required field `", "Object contains unknown field `")
GOT_FLOAT = ", got `float`"  # in a message of the decoder
NOT_SUPPORTED = "is not supported; leave it out"
# Names of JSON types, by msgspec's names.
KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a text",
}
# What a message has none of, by the types of parts in all APIs.
MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sounds"),
    **dict.fromkeys(("document", "file", "input_file"), "files"),
    **dict.fromkeys(("video", "video_url"), "videos"),
}
PARTS = {"array": "entries", "object": "keys", "str": "characters"}
LIMITS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
# These match only fixed messages of the decoder, never one that quotes the client.
TYPE = re.compile(r"Expected `(?P<wanted>[\w |]+)`(, got `(?P<got>\w+)`)?")
BOUND = re.compile(
    r"Expected `(?P<kind>\w+)` (?P<length>of length )?(?P<sign>[<>]=?) (?P<bound>\S+)"
)


def field_error(message: str, kind: type[Struct]) -> CallerError:
    """Translate a message such as "Expected `int`, got `str` - at `$.messages[0].role`"."""
    # Both may quote the client, whose text may be long and may resemble a message of the decoder.
    what, found, where = message.rpartition(" - at `")
    if not found:
        what, where = where, ""
    what, where = what[:MAX_MESSAGE_CHARS], where[:MAX_MESSAGE_CHARS]
    path = where.translate(SEPARATORS).split()
    for opening in FIELD_OPENINGS:
        if what.startswith(opening):
            path.append(what.removeprefix(opening).removesuffix("`"))
    if not path:
        logged = "The body is not a request"
        return CallerError(f"{logged}: {what}.", logged=logged)
    said = _said(what, path, kind)
    # Anything else may quote the client.
    is_fixed = what.startswith(FIELD_OPENINGS) or any(map(re.fullmatch, (TYPE, BOUND), (what,) * 2))
    return InvalidRequestError(".".join(path), f"{said}.", logged=said if is_fixed else None)


def _said(what: str, path: Sequence[str], kind: type[Struct]) -> str:
    """The message after the name of the field."""
    if what.startswith("Expected `null`"):
        return NOT_SUPPORTED
    if what.startswith("Object missing required field"):
        return "is missing"
    if what.startswith("Object contains unknown field"):
        return "is not known; leave it out"
    if found := TYPE.fullmatch(what):
        return _wrong_type(found["wanted"].split(" | "), found["got"])
    if found := BOUND.fullmatch(what):
        off = [type.ge for type in _types_at(kind, path) if _is_off(type)]
        return f"{NOT_SUPPORTED}, or at {off[0]:g}" if off else _out_of_bounds(found)
    if what.startswith("Invalid "):
        literals = [type for type in _types_at(kind, path) if isinstance(type, inspect.LiteralType)]
        values = [value for type in literals for value in type.values]
        if values == [""]:
            return NOT_SUPPORTED
        if values:
            _, _, value = what.partition("value ")
            media = MEDIA.get(value.strip("'"))
            because = f", because {media} are not supported" if media else ""
            return f"cannot be {value}{because}; {one_of(values)}"
    return what[:1].lower() + what[1:]


def _wrong_type(wanted: Sequence[str], got: str | None) -> str:
    # null means that the field is not given.
    must_be = " or ".join(KINDS.get(name, name) for name in wanted if name != "null")
    # "must be an integer, not a number" would be confusing.
    if got is None or got == "float":
        return f"must be {must_be}"
    return f"must be {must_be}, not {KINDS.get(got, got)}"


def _out_of_bounds(found: re.Match[str]) -> str:
    """The message for a number or a length out of bounds."""
    if found["length"] and found["sign"] == ">=" and found["bound"] == "1":
        return "must not be empty"
    limit, bound = LIMITS[found["sign"]], found["bound"].removesuffix(".0")
    if found["length"]:
        return f"must have {limit} {bound} {PARTS.get(found['kind'], 'entries')}"
    return f"must be {limit} {bound}"


def _types_at(kind: type[Struct], path: Sequence[str]) -> list[inspect.Type]:
    """The types that a field may have."""
    types = alternatives(inspect.type_info(kind))
    for name in path:
        types = [inner for outer in types for inner in _members(outer, name)]
    return types


def _members(type: inspect.Type, name: str) -> list[inspect.Type]:
    if isinstance(type, inspect.ListType):
        return alternatives(type.item_type)
    if isinstance(type, inspect.StructType):
        if name == type.tag_field:
            return [inspect.LiteralType((type.tag,))]
        return [
            inner
            for field in type.fields
            if field.encode_name == name
            for inner in alternatives(field.type)
        ]
    return []


def _is_off(type: inspect.Type) -> TypeGuard[inspect.FloatType]:
    """Whether only one number is allowed: the one that turns the feature off."""
    return isinstance(type, inspect.FloatType) and type.ge is not None and type.ge == type.le


def alternatives(type: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, without what is said of them."""
    if isinstance(type, inspect.Metadata):
        return alternatives(type.type)
    if isinstance(type, inspect.UnionType):
        return [inner for outer in type.types for inner in alternatives(outer)]
    return [type]
