"""A request of the Responses API as a chat, and how its fields are named there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgspec

from minisgl.errors import InvalidRequestError
from minisgl.server import field_names
from minisgl.server.constraints import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from minisgl.server.decoding import decode
from minisgl.server.messages import (
    CalledFunction,
    CustomInput,
    Images,
    Message,
    ToolCall,
    image_text,
)
from minisgl.server.protocol import NULL, ChatRequest
from minisgl.server.responses_api.history import PlacedItem
from minisgl.server.responses_api.protocol import (
    SYSTEM_ROLES,
    CallOutput,
    FlatJsonSchema,
    InputImagePart,
    InputItem,
    Parts,
    ResponsesRequest,
)
from minisgl.server.responses_api.tools import ToolBox, given

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
LIMIT_FIELD = "max_output_tokens"
BREAK = "\n\n"  # between texts of several items that become one message
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
    path: str  # of the first of them
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_paths: list[str] = field(default_factory=list)
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
    tools: ToolBox
    allowed: Sequence[str]  # the paths in tool_choice of the tools that it allows

    @property
    def beginnings(self) -> list[int]:
        """Where a shorter conversation may begin: with a later message of the user."""
        start = self.num_system
        users = [place for place, turn in enumerate(self.turns) if turn.role == "user"]
        return [place for place in users if place > start]

    @property
    def num_system(self) -> int:
        """The number of system messages at the beginning, which stay."""
        roles = [turn.role in SYSTEM_ROLES for turn in self.turns]
        return roles.index(False)

    def beginning_at(self, place: int) -> Chat:
        """The chat without the messages between the instructions and that at `place`."""
        turns = [*self.turns[: self.num_system], *self.turns[place:]]
        body = msgspec.structs.replace(self.body, messages=[turn.message() for turn in turns])
        return replace(self, body=body, turns=turns)

    def fields_named(self) -> AbstractContextManager[None]:
        """Errors about the chat name the fields of the request."""
        return _named_by(lambda param: _bracketed(self._path(param)))

    def _path(self, param: str) -> str:
        if param in NAMES:
            return NAMES[param]
        if found := IN_MESSAGE.match(param):
            turn = self.turns[int(found[1])]
            return turn.call_paths[int(found[2])] if found[2] else turn.path
        path = param.split(".")
        if path[0] in ("tools", "tool_choice"):
            path = [name for name in path if name not in CHAT_ONLY]
            placed = [tool.path for tool in self.tools.tools]
            paths = placed if path[0] == "tools" else self.allowed
            for place, name in enumerate(path):
                if name.isdecimal():
                    path = [paths[int(name)], *path[place + 1 :]]
                    break
        return ".".join(path)


def fields_named() -> AbstractContextManager[None]:
    """Errors about a request name its fields as OpenAI does here: input[2].content[0]."""
    return _named_by(_bracketed)


def _named_by(name: Callable[[str], str]) -> AbstractContextManager[None]:
    return field_names.fields_named(name, prompt_field="input", limit_field=LIMIT_FIELD)


def _bracketed(path: str) -> str:
    return INDEX.sub(r"[\1]", path)


def chat_of(
    body: ResponsesRequest, items: Sequence[PlacedItem], *, system_anywhere: bool, images: Images
) -> Chat:
    """The chat that a request asks for; raises InvalidRequestError.

    items: of the whole conversation. system_anywhere: whether the chat template takes a system
    message after others. Otherwise all are joined to the first one. images: what becomes of them.
    """
    tools = ToolBox(body.tools or ())
    turns = _turns(body.instructions, items, tools, images, system_anywhere=system_anywhere)
    choice, allowed = tools.choice(body.tool_choice)
    logprobs: dict[str, Any] = {}
    if body.wants_logprobs:
        logprobs = {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    chat = ChatRequest(
        **body.common_fields(),
        messages=[turn.message() for turn in turns],
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        tools=[tool.offered() for tool in tools.tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        control_tokens_in_text=body.control_tokens_in_text,
        **logprobs,
    )
    return Chat(chat, turns, tools, allowed)


# -- messages --------------------------------------------------------------------------------------


def _turns(
    instructions: str | None,
    items: Sequence[PlacedItem],
    tools: ToolBox,
    images: Images,
    *,
    system_anywhere: bool,
) -> list[_Turn]:
    turns: list[_Turn] = []
    if instructions:
        turns.append(_Turn("system", "instructions", [instructions]))
    for placed in items:
        _add(turns, placed.item, placed.path, tools, images)
    turns = _with_system_joined(turns, system_anywhere=system_anywhere)
    if all(turn.role in SYSTEM_ROLES for turn in turns):
        # Templates need somebody to answer to. Clients ask so to see whether the server is there.
        turns.append(_Turn("user", "input"))
    return turns


def _add(turns: list[_Turn], item: InputItem, path: str, tools: ToolBox, images: Images) -> None:
    match item.type:
        case None | "message":
            text = _text(item.content, f"{path}.content", images)
            if item.role is None:
                raise InvalidRequestError(f"{path}.role", "is missing.")
            _turn_of(item.role, turns, path).texts.append(text)
        case "reasoning":
            if text := _text(item.content or item.summary or "", path, images, BREAK):
                _turn_of("assistant", turns, path).reasoning.append(text)
        case "function_call" | "custom_tool_call":
            turn = _turn_of("assistant", turns, path)
            turn.calls.append(_call(item, path, tools))
            turn.call_paths.append(path)
        case "function_call_output" | "custom_tool_call_output":
            output = _text(_output(item, path), f"{path}.output", images)
            call_id = given(item.call_id, f"{path}.call_id")
            turns.append(_Turn("tool", path, [output], tool_call_id=call_id))


def _output(item: InputItem, path: str) -> Parts | None:
    """What a tool has returned. It is decoded here, because other types have something else."""
    try:
        return decode(b'{"output":%b}' % bytes(item.output or NULL), CallOutput).output
    except InvalidRequestError as error:
        error.param = f"{path}.{error.param}"
        raise


def _turn_of(role: Role, turns: list[_Turn], path: str) -> _Turn:
    """The message that an item belongs to. Adjacent items of one role make one message: templates
    may insist on turns."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role, path))
    return turns[-1]


def _call(item: InputItem, path: str, tools: ToolBox) -> ToolCall:
    call_id = given(item.call_id, f"{path}.call_id")
    name = tools.flat_name(given(item.name, f"{path}.name"), item.namespace)
    if item.type == "custom_tool_call":
        input = given(item.input, f"{path}.input")
        return ToolCall(call_id, "custom", custom=CustomInput(name, input))
    return ToolCall(call_id, function=CalledFunction(name, item.arguments))


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
        first = [_Turn("system", first[0].path, texts)]
    return first + others


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    format = body.text.format if body.text else None
    if isinstance(format, FlatJsonSchema):
        named = NamedSchema(format.name, format.description, format.schema, format.strict)
        return JsonSchemaFormat(json_schema=named)
    assert format is None or isinstance(format, TextFormat | JsonObjectFormat)
    return format
