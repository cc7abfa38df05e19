"""Translates a request to the Messages API into a chat request, which goes the way of all chats."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from msgspec import Raw

from minisgl.errors import InvalidRequestError
from minisgl.server.constraints import JsonSchemaFormat, NamedSchema
from minisgl.server.encoding import encode
from minisgl.server.field_names import fields_named
from minisgl.server.messages import Images, Reasoning
from minisgl.server.messages_api.client_tools import client_tool
from minisgl.server.messages_api.conversation import conversation_of
from minisgl.server.messages_api.protocol import (
    MessagesRequest,
    MessagesToolChoice,
    Prompt,
    ToolSpec,
)
from minisgl.server.protocol import ChatRequest
from minisgl.server.tools import (
    FunctionSpec,
    FunctionTool,
    NamedFunction,
    OfferedTool,
    ToolChoice,
    ToolName,
)

# Fields of the chat request, by the names that a client of this API knows.
FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function.name": "tool_choice.name",
}
SCHEMA = "response_format.json_schema.schema"
THINKS = {"enabled": True, "disabled": False}  # otherwise the template decides


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat request, and the fields of the request that it was."""

    request: ChatRequest
    num_server_tools: int  # which were left out, because Anthropic runs them
    _fields: dict[str, str]

    def fields_named(self) -> AbstractContextManager[None]:
        """Errors about a field of the chat request name the client's field."""
        return fields_named(self._field, prompt_field="messages", limit_field="max_tokens")

    def _field(self, path: str) -> str:
        """The client's name of a field of the chat request, both as dotted paths."""
        names = path.split(".")
        for length in range(len(names), 0, -1):
            known = self._fields.get(".".join(names[:length]))
            if known is not None:
                return ".".join([known, *names[length:]])
        return path


def translated(
    body: Prompt, *, system_anywhere: bool, can_think: bool, images: Images
) -> Translation:
    """The chat request that `body` stands for; raises InvalidRequestError.

    system_anywhere: whether the template takes a late system message.
    can_think: whether the reasoning of the model is set apart. images: what becomes of them.
    """
    conversation = conversation_of(body, system_anywhere=system_anywhere, images=images)
    fields = FIELDS | conversation.fields
    tools: list[OfferedTool] = []
    for index, tool in enumerate(body.tools or ()):
        known = client_tool(tool)
        if known is not None or tool.type in (None, "custom"):
            function, field = f"tools.{len(tools)}.function", f"tools.{index}"
            fields |= {function: field, f"{function}.parameters": f"{field}.input_schema"}
            tools.append(_tool(tool, field) if known is None else FunctionTool(known))
    chat = ChatRequest(
        **body.common_fields(),
        messages=conversation.messages,
        continue_final_message=conversation.is_open or None,
        control_tokens_in_text=body.control_tokens_in_text,
        tools=tools,
        reasoning=_reasoning(body),
    )
    if body.tool_choice is not None:
        chat.tool_choice = _choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if body.format is not None:
        config = body.output_config
        name = "output_config.format" if config and config.format else "output_format"
        fields[SCHEMA] = f"{name}.schema"
        named = NamedSchema(schema=Raw(encode(body.format.schema)), strict=True)
        chat.response_format = JsonSchemaFormat(json_schema=named)
    if isinstance(body, MessagesRequest):
        _sample(body, chat)
        if body.thinking is not None and body.thinking.type == "enabled" and can_think:
            chat.thinking_token_budget = body.thinking.budget_tokens
    num_server_tools = len(body.tools or ()) - len(tools) + len(body.mcp_servers or ())
    return Translation(chat, num_server_tools, fields)


def _sample(body: MessagesRequest, chat: ChatRequest) -> None:
    """Take over what decides how the answer is sampled, by the names of this API."""
    chat.max_tokens = body.max_tokens
    chat.stream = body.stream
    if body.stop_sequences is not None:
        chat.stop = body.stop_sequences
    if body.metadata is not None:
        chat.user = body.metadata.user_id


def _reasoning(body: Prompt) -> Reasoning:
    """As at Anthropic, a request that does not speak of thinking asks for none."""
    effort = body.output_config.effort if body.output_config else None
    enabled = THINKS.get(body.thinking.type) if body.thinking else False
    return Reasoning(effort=effort, enabled=enabled)


def _tool(tool: ToolSpec, path: str) -> FunctionTool:
    if tool.name is None:
        raise InvalidRequestError(f"{path}.name", "is missing.")
    if tool.input_schema is None:
        raise InvalidRequestError(f"{path}.input_schema", "is missing.")
    schema = Raw(encode(tool.input_schema))
    return FunctionTool(FunctionSpec(tool.name, tool.description, schema, tool.strict))


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequestError("tool_choice.name", "is missing.")
            return NamedFunction(ToolName(choice.name))
        case other:
            return other
