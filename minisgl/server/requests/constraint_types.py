"""The fields that constrain an answer as types: OpenAI's, and those of other servers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

from minisgl.request import MAX_CHOICES
from minisgl.server.requests.described import NOT_GIVEN

# Not decoded with the body: a schema may be long. As an object, or as a text that has its JSON;
# null as if it were left out, as clients send it.
Schema = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "boolean", "string", "null"]})]
# The parameters of a tool.
Parameters = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    schema: Schema = NOT_GIVEN  # of llama.cpp


class NamedSchema(Struct):
    name: str | None = None
    description: str | None = None
    schema: Schema = NOT_GIVEN  # null: any JSON object
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema = NOT_GIVEN
    schema: Schema = NOT_GIVEN  # of llama.cpp


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag"):
    structures: Raw = NOT_GIVEN
    triggers: Raw = NOT_GIVEN
    format: None = None


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredFields(Struct):
    """vLLM's structured_outputs."""

    json: Schema = NOT_GIVEN
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Schema = NOT_GIVEN
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is none
