"""A request of the Responses API as a chat, and how its fields are named there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tools import CUSTOM_ARGUMENT
from minisgl.server import field_names
from minisgl.server.constraints import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from minisgl.server.messages import (
    CalledFunction,
    CustomInput,
    Images,
    Message,
    ToolCall,
    image_text,
)
from minisgl.server.protocol import ChatRequest
from minisgl.server.responses_api.protocol import (
    SYSTEM_ROLES,
    AllowedChoice,
    AllowedTool,
    CustomChoice,
    FlatGrammar,
    FlatJsonSchema,
    FunctionChoice,
    InputImagePart,
    InputItem,
    Parts,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
)
from minisgl.server.tools import (
    Allowance,
    AllowedTools,
    CustomSpec,
    CustomTool,
    FunctionSpec,
    FunctionTool,
    GrammarInput,
    InputGrammar,
    NamedCustom,
    NamedFunction,
    OfferedTool,
    ToolChoice,
    ToolName,
)

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
LIMIT_FIELD = "max_output_tokens"
BREAK = "\n\n"  # between texts of several items that become one message
CALLABLE = frozenset(("function", "custom"))
# Fields of the request by their names in the chat that it becomes.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": LIMIT_FIELD,
    "max_tokens": LIMIT_FIELD,
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
}
CHAT_ONLY = ("function", "custom", "grammar", "allowed_tools")  # members that here are not there
IN_MESSAGE = re.compile(r"messages\.(\d+)(?:\.tool_calls\.(\d+))?")
INDEX = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(slots=True)
class _Turn:
    """A message of the chat, while the items that it is made of are read."""

    role: Role
    item: int | None  # the first of them; None: the instructions, or an input that is a text
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_items: list[int] = field(default_factory=list)
    tool_call_id: str | None = None

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=_joined(self.texts),
            reasoning_content=_joined(self.reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.tool_call_id,
        )


@dataclass(frozen=True, slots=True)
class Chat:
    """A request as a chat."""

    body: ChatRequest
    turns: Sequence[_Turn]
    tools: Sequence[int]  # the places of its tools in the request
    allowed: Sequence[int]  # and of those that are allowed, in tool_choice
    left_out: frozenset[str]  # the types of the others

    def fields_named(self) -> AbstractContextManager[None]:
        """Errors about the chat name the fields of the request."""
        return _named_by(lambda param: _bracketed(self._path(param)))

    def _path(self, param: str) -> str:
        if param in NAMES:
            return NAMES[param]
        if found := IN_MESSAGE.match(param):
            turn = self.turns[int(found[1])]
            item = turn.call_items[int(found[2])] if found[2] else turn.item
            if item is None:
                return "instructions" if turn.role == "system" else "input"
            return f"input.{item}"
        path = param.split(".")
        if path[0] in ("tools", "tool_choice"):
            path = [name for name in path if name not in CHAT_ONLY]
            places = self.tools if path[0] == "tools" else self.allowed
            path = [str(places[int(name)]) if name.isdecimal() else name for name in path]
        return ".".join(path)


def fields_named() -> AbstractContextManager[None]:
    """Errors about a request name its fields as OpenAI does here: input[2].content[0]."""
    return _named_by(_bracketed)


def _named_by(name: Callable[[str], str]) -> AbstractContextManager[None]:
    return field_names.fields_named(name, prompt_field="input", limit_field=LIMIT_FIELD)


def _bracketed(path: str) -> str:
    return INDEX.sub(r"[\1]", path)


def chat_of(body: ResponsesRequest, *, system_anywhere: bool, images: Images) -> Chat:
    """The chat that a request asks for; raises InvalidRequestError.

    system_anywhere: whether the chat template takes a system message after others. Otherwise all
    are joined to the first one. images: what becomes of them.
    """
    turns = _turns(body, images, system_anywhere=system_anywhere)
    given = body.tools or ()
    places = [place for place, tool in enumerate(given) if tool.type in CALLABLE]
    choice, allowed = body.tool_choice, []
    if isinstance(choice, AllowedChoice):
        allowed = [place for place, tool in enumerate(choice.tools) if tool.type in CALLABLE]
    logprobs: dict[str, Any] = {}
    if body.wants_logprobs:
        logprobs = {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    chat = ChatRequest(
        **body.common_fields(),
        messages=[turn.message() for turn in turns],
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(given[place], f"tools.{place}") for place in places],
        tool_choice=_tool_choice(choice, allowed),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        control_tokens_in_text=body.control_tokens_in_text,
        **logprobs,
    )
    left_out = frozenset(tool.type for tool in given) - CALLABLE
    return Chat(chat, turns, places, allowed, left_out)


# -- messages --------------------------------------------------------------------------------------


def _turns(body: ResponsesRequest, images: Images, *, system_anywhere: bool) -> list[_Turn]:
    turns: list[_Turn] = []
    if body.instructions:
        turns.append(_Turn("system", None, [body.instructions]))
    if isinstance(body.input, str):
        turns.append(_Turn("user", None, [body.input]))
    else:
        for index, item in enumerate(body.input):
            _add(turns, index, item, images)
    turns = _with_system_joined(turns, system_anywhere=system_anywhere)
    if all(turn.role in SYSTEM_ROLES for turn in turns):
        # Templates need somebody to answer to. Clients ask so to see whether the server is there.
        turns.append(_Turn("user", None))
    return turns


def _add(turns: list[_Turn], index: int, item: InputItem, images: Images) -> None:
    path = f"input.{index}"
    match item.type:
        case None | "message":
            text = _text(item.content, f"{path}.content", images)
            if item.role is None:
                raise InvalidRequestError(f"{path}.role", "is missing.")
            _turn_of(item.role, turns, index).texts.append(text)
        case "reasoning":
            if text := _text(item.content or item.summary or "", path, images, BREAK):
                _turn_of("assistant", turns, index).reasoning.append(text)
        case "function_call" | "custom_tool_call":
            turn = _turn_of("assistant", turns, index)
            turn.calls.append(_call(item, path))
            turn.call_items.append(index)
        case "function_call_output" | "custom_tool_call_output":
            output = _text(item.output, f"{path}.output", images)
            call_id = _given(item.call_id, f"{path}.call_id")
            turns.append(_Turn("tool", index, [output], tool_call_id=call_id))
        case "item_reference":
            raise InvalidRequestError(
                f"{path}.type",
                "cannot be item_reference, because answers are not stored; send the item itself.",
            )


def _turn_of(role: Role, turns: list[_Turn], item: int) -> _Turn:
    """The message that an item belongs to. Adjacent items of one role make one message: templates
    may insist on turns."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role, item))
    return turns[-1]


def _call(item: InputItem, path: str) -> ToolCall:
    call_id = _given(item.call_id, f"{path}.call_id")
    name = _given(item.name, f"{path}.name")
    if item.type == "custom_tool_call":
        input = _given(item.input, f"{path}.input")
        return ToolCall(call_id, "custom", custom=CustomInput(name, input))
    arguments = _given(item.arguments, f"{path}.arguments")
    return ToolCall(call_id, function=CalledFunction(name, _arguments(arguments)))


def _arguments(text: str) -> dict[str, Raw]:
    """Arguments as an object. What a model wrote instead of one is shown to it as a text."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Raw])
    except (ValueError, RecursionError):
        return {CUSTOM_ARGUMENT: Raw(msgspec.json.encode(text))}


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequestError(path, "is missing.")
    return value


def _text(parts: Parts | None, path: str, images: Images, between: str = "") -> str:
    if parts is None:
        raise InvalidRequestError(path, "must be a text or a list of text parts.")
    if isinstance(parts, str):
        return parts
    return between.join(
        image_text(images, f"{path}.{index}", "input_image")
        if isinstance(part, InputImagePart)
        else part.text
        for index, part in enumerate(parts)
    )


def _joined(texts: Sequence[str]) -> str:
    return BREAK.join(filter(None, texts))


def _with_system_joined(turns: list[_Turn], *, system_anywhere: bool) -> list[_Turn]:
    """The turns with the system messages at the beginning made one.

    Many templates know one system message only, the first. For those later ones join it too.
    """
    first: list[_Turn] = []
    others: list[_Turn] = []
    for turn in turns:
        joins = turn.role in SYSTEM_ROLES and not (others and system_anywhere)
        (first if joins else others).append(turn)
    if len(first) > 1:
        texts = [text for turn in first for text in turn.texts]
        first = [_Turn("system", first[0].item, texts)]
    return first + others


# -- tools and formats -----------------------------------------------------------------------------


def _tool(tool: ResponseTool, path: str) -> OfferedTool:
    name = _given(tool.name, f"{path}.name")
    if tool.type == "function":
        return FunctionTool(FunctionSpec(name, tool.description, tool.parameters, tool.strict))
    format = tool.format
    if isinstance(format, FlatGrammar):
        grammar = GrammarInput(InputGrammar(format.syntax, format.definition))
        return CustomTool(CustomSpec(name, tool.description, grammar))
    return CustomTool(CustomSpec(name, tool.description, format))


def _tool_choice(choice: ResponseToolChoice | None, allowed: Sequence[int]) -> ToolChoice | None:
    """allowed: the places of the tools that are allowed, in an AllowedChoice."""
    match choice:
        case FunctionChoice(name):
            return NamedFunction(ToolName(name))
        case CustomChoice(name):
            return NamedCustom(ToolName(name))
        case AllowedChoice(mode, tools):
            named = [_named(tools[place], f"tool_choice.tools.{place}") for place in allowed]
            if not named:
                raise InvalidRequestError("tool_choice.tools", "has no tool that can be called.")
            return AllowedTools(Allowance(mode, named))
        case _:
            return choice


def _named(tool: AllowedTool, path: str) -> NamedFunction | NamedCustom:
    name = ToolName(_given(tool.name, f"{path}.name"))
    return NamedFunction(name) if tool.type == "function" else NamedCustom(name)


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    format = body.text.format if body.text else None
    if isinstance(format, FlatJsonSchema):
        named = NamedSchema(format.name, format.description, format.schema, format.strict)
        return JsonSchemaFormat(json_schema=named)
    assert format is None or isinstance(format, TextFormat | JsonObjectFormat)
    return format
