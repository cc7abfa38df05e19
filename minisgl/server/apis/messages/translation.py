"""Translates a request to the Messages API into a chat request, which goes the way of all chats."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Raw

from minisgl.errors import InvalidRequestError, ThreadError
from minisgl.server.apis.messages.client_tools import client_tool
from minisgl.server.apis.messages.conversation import turns_of
from minisgl.server.apis.messages.request_types import (
    MessagesRequest,
    MessagesToolChoice,
    Prompt,
    ToolSpec,
)
from minisgl.server.http.encoding import encode
from minisgl.server.requests.chat_messages import Reasoning
from minisgl.server.requests.constraint_types import JsonSchemaFormat, NamedSchema
from minisgl.server.requests.request_types import ChatRequest
from minisgl.server.requests.tools import (
    FunctionSpec,
    FunctionTool,
    NamedFunction,
    OfferedTool,
    ToolChoice,
    ToolName,
)
from minisgl.server.requests.translation import FieldNames, TranslatedChat, given

NAMES = FieldNames("messages", "max_tokens")
# Fields of the request, by those of the chat.
FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function.name": "tool_choice.name",
}
SCHEMA = "response_format.json_schema.schema"
THINKS = {"enabled": True, "disabled": False}  # otherwise the template decides


def translated(body: Prompt, *, system_anywhere: bool, can_think: bool) -> TranslatedChat:
    """The chat request that `body` stands for; raises InvalidRequestError.

    system_anywhere: whether the template takes a late system message.
    can_think: whether the reasoning of the model is set apart.
    """
    if body.thread is not None and body.thread.type == "continue":
        raise ThreadError
    turns = turns_of(body, system_anywhere=system_anywhere)
    fields = dict(FIELDS)
    tools: list[OfferedTool] = []
    left_out = ["mcp"] * len(body.mcp_servers or ())
    for index, tool in enumerate(body.tools or ()):
        known = client_tool(tool)
        if known is not None or tool.type in (None, "custom"):
            function, field = f"tools.{len(tools)}.function", f"tools.{index}"
            fields |= {function: field, f"{function}.parameters": f"{field}.input_schema"}
            tools.append(_tool(tool, field) if known is None else FunctionTool(known))
        else:
            left_out.append(tool.type)
    chat = ChatRequest(
        **body.common_fields(),
        messages=[turn.message() for turn in turns],
        continue_final_message=turns[-1].is_open or None,
        control_tokens_in_text=body.control_tokens_in_text,
        images=body.images,
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
    return TranslatedChat(chat, turns, replace(NAMES, fields=fields), left_out)


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
    name = given(tool.name, f"{path}.name")
    if tool.input_schema is None:
        raise InvalidRequestError(f"{path}.input_schema", "is missing.")
    schema = Raw(encode(tool.input_schema))
    return FunctionTool(FunctionSpec(name, tool.description, schema, tool.strict))


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return NamedFunction(ToolName(given(choice.name, "tool_choice.name")))
        case other:
            return other
