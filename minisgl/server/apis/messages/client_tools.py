"""The tools that Anthropic defines and the client runs, as functions for any model.

Anthropic's models know what these tools take; others are told by the descriptions and schemas here.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Raw

from minisgl.server.apis.messages.request_types import ToolSpec
from minisgl.server.http.encoding import encode
from minisgl.server.requests.tools import FunctionSpec

# Such as bash_20250124: the name of a tool and the date of its definition.
TYPE = re.compile(r"(bash|text_editor|memory)_(\d{8})")
# Until this date an editor takes the text of an insertion as new_str, and can undo.
LAST_WITH_UNDO = "20250124"
TEXT, LINE = {"type": "string"}, {"type": "integer"}
RANGE = {"type": "array", "items": LINE, "minItems": 2, "maxItems": 2}
# What all that edit files can do, and what their commands take.
EDITING = ["view", "create", "str_replace", "insert"]
FIELDS = {"path": TEXT, "view_range": RANGE, "file_text": TEXT, "old_str": TEXT}
FIELDS |= {"new_str": TEXT, "insert_line": LINE}

BASH = (
    "Runs a command in a bash session that stays open between calls. Either give a command, or set "
    "restart to begin a new session."
)
EDITOR = (
    "Views and changes text files. view shows a file with line numbers, or the lines of view_range "
    "(first and last; -1 for the end), or lists a folder. create writes file_text to a new file. "
    "str_replace replaces old_str, which must be in the file exactly once, by new_str. insert adds "
    "{inserted} behind line insert_line (0: at the beginning)."
)
MEMORY = (
    "Reads and changes the files of a memory that outlasts the conversation; their paths begin "
    "with /memories. view shows a file or lists a folder, create writes file_text to a file, "
    "str_replace replaces old_str by new_str, insert adds insert_text behind line insert_line, "
    "delete removes path, rename moves old_path to new_path."
)


def client_tool(tool: ToolSpec) -> FunctionSpec | None:
    """The function for a tool that the client runs; None for any other type of tool."""
    found = TYPE.fullmatch(tool.type or "")
    if found is None:
        return None
    kind, date = found.groups()
    match kind:
        case "bash":
            parameters = _object(command=TEXT, restart={"type": "boolean"})
            name, text = "bash", BASH
        case "memory":
            name, text, parameters = "memory", MEMORY, _memory()
        case _:
            name, text, parameters = _editor(date)
    return FunctionSpec(
        tool.name or name, tool.description or text, Raw(encode(parameters)), tool.strict
    )


def _editor(date: str) -> tuple[str, str, dict[str, Any]]:
    """Name, description and parameters of an editor."""
    if date <= LAST_WITH_UNDO:
        text = EDITOR.format(inserted="new_str") + " undo_edit takes the last change back."
        parameters = _commands([*EDITING, "undo_edit"], ["path"], FIELDS)
        return "str_replace_editor", text, parameters
    text = EDITOR.format(inserted="insert_text")
    parameters = _commands(EDITING, ["path"], {**FIELDS, "insert_text": TEXT})
    return "str_replace_based_edit_tool", text, parameters


def _memory() -> dict[str, Any]:
    fields = {**FIELDS, "insert_text": TEXT, "old_path": TEXT, "new_path": TEXT}
    return _commands([*EDITING, "delete", "rename"], [], fields)


def _commands(names: list[str], required: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    command = {"type": "string", "enum": names}
    return {**_object(command=command, **fields), "required": ["command", *required]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}
