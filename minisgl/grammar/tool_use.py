"""The tools that a conversation offers, and how they limit the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tool_grammars import CUSTOM_ARGUMENT, Tool, tool_calls
from minisgl.request import StructuredOutput
from minisgl.text.parsing.selection import AnswerFormat

ANYTHING = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request. The model may see more of them than it may call."""

    tools: tuple[Tool, ...]
    described: Sequence[Mapping[str, Any]]  # as chat templates know them: all of them functions
    callable: tuple[Tool, ...]
    required: bool = False  # a call must be made
    parallel: bool = True  # several may be made

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of the arguments, by the names of the tools."""
        return {tool.name: schema_of(tool) for tool in self.tools}

    @property
    def callable_names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.callable)

    @property
    def custom_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.custom)

    def grammar(self, form: AnswerFormat, *, only_calls: bool = False) -> StructuredOutput | None:
        """What holds the answer to these tools; None where the model is free.

        only_calls: as what the answer is held to where it is calls.
        """
        bound = any(_is_bound(tool) for tool in self.callable)
        restricted = bound or not self.parallel or self.callable != self.tools
        if not (self.required or restricted or only_calls):
            return None
        if form.calls is None:
            if not self.required:
                return None
            raise InvalidRequestError(
                "tool_choice",
                "cannot be enforced: the format of the model's calls is not known. Start the "
                "server with --tool-parser.",
            )
        # A tool that is neither required nor strict guides the model, which is free to deviate.
        tools = [
            tool if self.required or _is_bound(tool) else replace(tool, parameters=ANYTHING)
            for tool in self.callable
        ]
        return tool_calls(
            tools,
            form.calls.spelling,
            form.marker_ids,
            required=self.required or only_calls,
            parallel=self.parallel,
        )


def offered(functions: Sequence[Mapping[str, Any]]) -> ToolUse | None:
    """Functions in OpenAI's form, any of which the model may call; None without one."""
    tools = tuple(
        Tool(
            name=function["name"],
            parameters=function.get("parameters"),
            strict=function.get("strict") is True,
            field=f"tools[{index}].function.parameters",
        )
        for index, function in enumerate(each["function"] for each in functions)
    )
    return ToolUse(tools=tools, described=functions, callable=tools) if tools else None


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    if tool.custom:
        return {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
            "required": [CUSTOM_ARGUMENT],
        }
    return dict(NO_ARGUMENTS if tool.parameters is None else tool.parameters)


def _is_bound(tool: Tool) -> bool:
    """Whether the client relies on the form of the arguments."""
    return tool.strict or tool.regex is not None or tool.lark is not None
