"""The tools of a request as those of a chat, in which the tools of namespaces have flat names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minisgl.errors import InvalidRequestError
from minisgl.server.apis.responses.request_types import (
    CALLABLE,
    NAMESPACE,
    AllowedChoice,
    AllowedTool,
    CustomChoice,
    FlatGrammar,
    FlatTool,
    FunctionChoice,
    ResponseTool,
    ResponseToolChoice,
)
from minisgl.server.requests import tools as chat
from minisgl.server.requests.translation import GAP, given

BETWEEN = "__"  # a namespace and the name of a tool in it, as the model sees them


@dataclass(frozen=True, slots=True)
class PlacedTool:
    """A tool that can be called, and where it stands in the request."""

    tool: FlatTool
    path: str
    namespace: str | None = None
    introduction: str | None = None  # what the namespace says of itself, in its first tool

    @property
    def flat_name(self) -> str:
        name = given(self.tool.name, f"{self.path}.name")
        return name if self.namespace is None else f"{self.namespace}{BETWEEN}{name}"

    @property
    def description(self) -> str | None:
        texts = [text for text in (self.introduction, self.tool.description) if text is not None]
        return GAP.join(texts) if texts else None

    def offered(self) -> chat.OfferedTool:
        """The tool as one of a chat; raises InvalidRequestError."""
        tool, name, description = self.tool, self.flat_name, self.description
        if tool.type == "function":
            return chat.FunctionTool(
                chat.FunctionSpec(name, description, tool.parameters, tool.strict)
            )
        format = tool.format
        if isinstance(format, FlatGrammar):
            grammar = chat.GrammarInput(chat.InputGrammar(format.syntax, format.definition))
            return chat.CustomTool(chat.CustomSpec(name, description, grammar))
        return chat.CustomTool(chat.CustomSpec(name, description, format))


class ToolBox:
    """The tools of a request that can be called, by their flat names."""

    def __init__(self, given: Sequence[ResponseTool]) -> None:
        """Raises InvalidRequestError."""
        self.tools = [*_placed(given)]
        if len(self.tools) > chat.MAX_TOOLS:
            raise InvalidRequestError("tools", f"must have at most {chat.MAX_TOOLS} tools in all.")
        self.left_out = frozenset(_types(given)) - CALLABLE - {NAMESPACE}
        # Of the tools in namespaces, what the client calls them.
        self.spaced: Mapping[str, tuple[str, str]] = {
            placed.flat_name: (placed.namespace, placed.tool.name or "")
            for placed in self.tools
            if placed.namespace is not None
        }
        # Of the request, by those of the chat.
        self.fields = {"tool_choice.allowed_tools": "tool_choice"}
        for index, placed in enumerate(self.tools):
            self.fields[f"tools.{index}"] = placed.path
            self.fields |= _kinds(f"tools.{index}", placed.path)
            self.fields[f"tools.{index}.custom.format.grammar"] = f"{placed.path}.format"
        self.fields |= _kinds("tool_choice", "tool_choice")
        self._names = frozenset(placed.flat_name for placed in self.tools)

    def flat_name(self, name: str, namespace: str | None) -> str:
        """The flat name of a tool that the client speaks of. Some clients leave the namespace out
        where it calls a tool: a name that only one namespace has means the tool there."""
        if namespace:
            return f"{namespace}{BETWEEN}{name}"
        if name in self._names:
            return name
        found = [flat for flat, (_, bare) in self.spaced.items() if bare == name]
        return found[0] if len(found) == 1 else name

    def choice(
        self, choice: ResponseToolChoice | None
    ) -> tuple[chat.ToolChoice | None, dict[str, str]]:
        """The choice as one of a chat; with the fields of the tools that it allows, by the chat's.

        Raises InvalidRequestError.
        """
        match choice:
            case FunctionChoice(name, namespace) | CustomChoice(name, namespace):
                kind = "function" if isinstance(choice, FunctionChoice) else "custom"
                return _named(kind, self.flat_name(name, namespace)), {}
            case AllowedChoice(mode, tools):
                named = [
                    (each, f"tool_choice.tools.{place}")
                    for place, tool in enumerate(tools)
                    for each in self._allowed(tool, f"tool_choice.tools.{place}")
                ]
                if not named:
                    raise InvalidRequestError(
                        "tool_choice.tools", "has no tool that can be called."
                    )
                fields: dict[str, str] = {}
                for place, (_, path) in enumerate(named):
                    fields |= _kinds(f"tool_choice.allowed_tools.tools.{place}", path)
                return chat.AllowedTools(chat.Allowance(mode, [tool for tool, _ in named])), fields
            case _:
                return choice, {}

    def _allowed(
        self, tool: AllowedTool, path: str
    ) -> Iterator[chat.NamedFunction | chat.NamedCustom]:
        """The tools that an entry allows: one, all of a namespace, or none of another type."""
        if tool.type == NAMESPACE:
            for placed in self.tools:
                if placed.namespace == tool.name:
                    yield _named(placed.tool.type, placed.flat_name)
        elif tool.type in CALLABLE:
            name = given(tool.name, f"{path}.name")
            yield _named(tool.type, self.flat_name(name, tool.namespace))


def _placed(tools: Sequence[ResponseTool]) -> Iterator[PlacedTool]:
    for place, tool in enumerate(tools):
        path = f"tools.{place}"
        if tool.type in CALLABLE:
            yield PlacedTool(tool, path)
        elif tool.type == NAMESPACE:
            name = given(tool.name, f"{path}.name")
            introduction = f"{name}: {tool.description}" if tool.description else None
            for index, inner in enumerate(tool.tools or ()):
                if inner.type in CALLABLE:
                    yield PlacedTool(inner, f"{path}.tools.{index}", name, introduction)
                    introduction = None


def _types(tools: Sequence[ResponseTool]) -> Iterator[str]:
    for tool in tools:
        yield tool.type
        if tool.type == NAMESPACE:
            yield from (inner.type for inner in tool.tools or ())


def _kinds(field: str, path: str) -> dict[str, str]:
    """What a chat has in a member that is named like the kind of the tool is in `path` itself."""
    return {f"{field}.{kind}": path for kind in CALLABLE}


def _named(type: str, flat_name: str) -> chat.NamedFunction | chat.NamedCustom:
    name = chat.ToolName(flat_name)
    return chat.NamedFunction(name) if type == "function" else chat.NamedCustom(name)
