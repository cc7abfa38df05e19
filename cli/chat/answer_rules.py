"""Reads what `/json` and `/tools` take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.errors import CallerError

from .conversation_file import path_of, read_json
from .text_format import unquoted_argument

TOOL_FORM = '{"type": "function", "function": {"name": …, "parameters": …}}'


class RulesError(CallerError):
    """A schema or a file of tools is not one."""


def read_schema(typed: str) -> dict[str, Any]:
    """The schema that was typed, or that of a file. Raises RulesError, FileError."""
    where = "The schema"
    text = unquoted_argument(typed)
    if text.lstrip().startswith("{"):
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise RulesError(f"The schema is no JSON: {error}.") from error
    else:
        where = path_of(text)
        schema = read_json(where, "schema")
    if not isinstance(schema, dict):
        raise RulesError(f"{where} is no JSON schema, which is an object.")
    return schema


def read_tools(typed: str) -> tuple[dict[str, Any], ...]:
    """The tools of a file. Raises RulesError, FileError."""
    path = path_of(unquoted_argument(typed))
    tools = read_json(path, "list of tools")
    if isinstance(tools, dict):
        tools = tools.get("tools", [tools])
    if not isinstance(tools, list) or not tools:
        raise RulesError(f"{path} has no tools: it needs a list of {TOOL_FORM}.")
    for number, tool in enumerate(tools, 1):
        if not _is_tool(tool):
            raise RulesError(f"{path}: tool {number} is not {TOOL_FORM}.")
    names = [name_of(tool) for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RulesError(f"{path} has two tools with the name {twice}.")
    return tuple(tools)


def name_of(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _is_tool(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str(name), **function}} if name:
            return isinstance(function.get("parameters", {}), dict)
    return False
