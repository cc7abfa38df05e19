"""The tools that a request offers to the model, and which of them it may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tool_grammars import Tool
from minisgl.grammar.tool_use import ToolUse, schema_of
from minisgl.server.requests.constraint_types import Parameters
from minisgl.server.requests.described import NOT_GIVEN

MAX_TOOLS = 1024
MAX_SCHEMA_BYTES = 1 << 20
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)


class FunctionSpec(Struct):
    name: str
    description: str | None = None
    parameters: Parameters = NOT_GIVEN
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: FunctionSpec


class TextInput(Struct, tag_field="type", tag="text"):
    pass


class InputGrammar(Struct):
    syntax: Literal["lark", "regex"]
    definition: str


class GrammarInput(Struct, tag_field="type", tag="grammar"):
    grammar: InputGrammar


class CustomSpec(Struct):
    name: str
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool whose input is a text."""

    custom: CustomSpec


OfferedTool: TypeAlias = FunctionTool | CustomTool
OfferedTools = Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)]


class ToolName(Struct):
    name: str


class NamedFunction(Struct, tag_field="type", tag="function"):
    function: ToolName


class NamedCustom(Struct, tag_field="type", tag="custom"):
    custom: ToolName


class Allowance(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: Allowance


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools
)


def tool_use(
    tools: Sequence[OfferedTool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """The tools that a request offers; None where it offers none.

    Raises InvalidRequestError.
    """
    found = [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools or ())]
    names = [tool.name for tool in found]
    for index, tool in enumerate(found):
        kind = "custom" if tool.custom else "function"
        if not NAME.fullmatch(tool.name):
            raise InvalidRequestError(
                f"tools.{index}.{kind}.name",
                "must have 1 to 128 characters: letters, digits, _, - and dots.",
            )
        if tool.name in names[:index]:
            raise InvalidRequestError(
                f"tools.{index}.{kind}.name", "is the name of another tool as well."
            )
    if not found:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", "asks for a call, and there are no tools.")
        return None
    if choice == "none":
        return None
    callable, required, several = tuple(found), choice == "required", parallel is not False
    if isinstance(choice, NamedFunction | NamedCustom):
        callable, required, several = (_named(found, choice, "tool_choice"),), True, False
    elif isinstance(choice, AllowedTools):
        path = "tool_choice.allowed_tools.tools"
        allowed = [
            _named(found, name, f"{path}.{index}")
            for index, name in enumerate(choice.allowed_tools.tools)
        ]
        callable = tuple(tool for tool in found if tool in allowed)
        required = choice.allowed_tools.mode == "required"
    specs = (
        each.function if isinstance(each, FunctionTool) else each.custom for each in tools or ()
    )
    return ToolUse(
        tools=tuple(found),
        described=[
            _for_template(tool, spec.description) for tool, spec in zip(found, specs, strict=True)
        ],
        callable=callable,
        required=required,
        parallel=several,
    )


def _tool(tool: OfferedTool, path: str) -> Tool:
    if isinstance(tool, FunctionTool):
        spec, field = tool.function, f"{path}.function.parameters"
        return Tool(
            name=spec.name,
            parameters=_parameters(spec.parameters, field),
            strict=bool(spec.strict),
            field=field,
        )
    name, format = tool.custom.name, tool.custom.format
    if not isinstance(format, GrammarInput):
        return Tool(name=name, custom=True, field=f"{path}.custom")
    syntax, text = format.grammar.syntax, format.grammar.definition
    return Tool(
        name=name,
        custom=True,
        field=f"{path}.custom.format.grammar.definition",
        regex=text if syntax == "regex" else None,
        lark=text if syntax == "lark" else None,
    )


def _parameters(raw: Raw | None, field: str) -> dict[str, Any] | None:
    if raw is None or bytes(raw) == b"null":
        return None
    if len(bytes(raw)) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(field, f"has more than {MAX_SCHEMA_BYTES} bytes.")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError:
        raise InvalidRequestError(field, "must be an object, which is a JSON schema.") from None
    except RecursionError:
        raise InvalidRequestError(field, "is nested too deeply.") from None


def _named(tools: Sequence[Tool], choice: NamedFunction | NamedCustom, path: str) -> Tool:
    custom = isinstance(choice, NamedCustom)
    name = choice.custom.name if isinstance(choice, NamedCustom) else choice.function.name
    for tool in tools:
        if (tool.name, tool.custom) == (name, custom):
            return tool
    kind = "custom" if custom else "function"
    raise InvalidRequestError(f"{path}.{kind}.name", "is the name of none of the tools.")


def _for_template(tool: Tool, description: str | None) -> dict[str, Any]:
    said = {} if description is None else {"description": description}
    function = {"name": tool.name, **said, "parameters": schema_of(tool)}
    return {"type": "function", "function": function}
