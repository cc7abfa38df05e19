"""Translates a request to the Responses API into a chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.engine.conversation import Conversation
from minisgl.errors import ContextLengthError, InvalidRequestError, TextTooLongError
from minisgl.images.limits import TooManyImagesError
from minisgl.server.answers.plan import conversation_of
from minisgl.server.apis.responses.history import PlacedItem
from minisgl.server.apis.responses.request_types import (
    CallOutput,
    FlatJsonSchema,
    InputImagePart,
    InputItem,
    Part,
    Parts,
    ResponsesRequest,
)
from minisgl.server.apis.responses.tool_box import ToolBox
from minisgl.server.http.decoding import decode
from minisgl.server.requests.chat_messages import CalledFunction, CustomInput, ToolCall
from minisgl.server.requests.constraint_types import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from minisgl.server.requests.request_types import NULL, ChatRequest
from minisgl.server.requests.templating import Reading
from minisgl.server.requests.translation import (
    GAP,
    FieldNames,
    Piece,
    PlacedImage,
    TranslatedChat,
    Turn,
    given,
    joined,
)
from minisgl.text.history import SYSTEM_ROLES, Role

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

INDEX = re.compile(r"\.(\d+)(?=\.|$)")


def bracketed(path: str) -> str:
    """A path as OpenAI writes it here: input[2].content[0]."""
    return INDEX.sub(r"[\1]", path)


NAMES = FieldNames("input", "max_output_tokens", bracketed)
# Fields of the request, by those of the chat.
FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


def chat_of(body: ResponsesRequest, items: Sequence[PlacedItem], tools: ToolBox) -> TranslatedChat:
    """The chat that a request asks for; raises InvalidRequestError.

    items: of the whole conversation.
    """
    turns = _turns(body.instructions, items, tools)
    choice, chosen_fields = tools.choice(body.tool_choice)
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
        images=body.images,
        **logprobs,
    )
    fields = FIELDS | tools.fields | chosen_fields
    return TranslatedChat(chat, turns, replace(NAMES, fields=fields), tools.left_out)


# -- messages --------------------------------------------------------------------------------------


def _turns(instructions: str | None, items: Sequence[PlacedItem], tools: ToolBox) -> list[Turn]:
    turns: list[Turn] = []
    if instructions:
        turns.append(Turn("system", "instructions", [instructions]))
    for item, path in items:
        _add(turns, item, path, tools)
    first = [*takewhile(lambda turn: turn.role in SYSTEM_ROLES, turns)]
    if len(first) > 1:
        pieces = [piece for turn in first for piece in turn.pieces]
        turns[: len(first)] = [Turn("system", first[0].path, pieces)]
    if all(turn.role in SYSTEM_ROLES for turn in turns):
        # Templates need somebody to answer to. Clients ask so to see whether the server is there.
        turns.append(Turn("user", "input"))
    return turns


def _add(turns: list[Turn], item: InputItem, path: str, tools: ToolBox) -> None:
    match item.type:
        case None | "message":
            pieces = _pieces(item.content, f"{path}.content")
            if item.role is None:
                raise InvalidRequestError(f"{path}.role", "is missing.")
            _turn_of(item.role, turns, path).pieces += filter(None, pieces)
        case "reasoning":
            parts = item.content or item.summary or ""
            text = parts if isinstance(parts, str) else GAP.join(part.text for part in parts)
            if text:
                _turn_of("assistant", turns, path).thoughts.append(text)
        case "function_call" | "custom_tool_call":
            turn = _turn_of("assistant", turns, path)
            turn.calls.append((path, _call(item, path, tools)))
        case "function_call_output" | "custom_tool_call_output":
            output = _pieces(_output(item, path), f"{path}.output")
            call_id = given(item.call_id, f"{path}.call_id")
            turns.append(Turn("tool", path, output, tool_call_id=call_id, id_field="call_id"))


def _output(item: InputItem, path: str) -> Parts | None:
    """What a tool has returned. It is decoded here, because other types have something else."""
    try:
        return decode(b'{"output":%b}' % bytes(item.output or NULL), CallOutput).output
    except InvalidRequestError as error:
        error.param = f"{path}.{error.param}"
        raise


def _turn_of(role: Role, turns: list[Turn], path: str) -> Turn:
    """The message that an item belongs to. Adjacent items of one role make one message: templates
    may insist on turns."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role, path))
    return turns[-1]


def _call(item: InputItem, path: str, tools: ToolBox) -> ToolCall:
    call_id = given(item.call_id, f"{path}.call_id")
    name = tools.flat_name(given(item.name, f"{path}.name"), item.namespace)
    if item.type == "custom_tool_call":
        input = given(item.input, f"{path}.input")
        return ToolCall(call_id, "custom", custom=CustomInput(name, input))
    return ToolCall(call_id, function=CalledFunction(name, item.arguments))


def _pieces(parts: Parts | None, path: str) -> list[Piece]:
    if parts is None:
        raise InvalidRequestError(path, "must be a text or a list of parts.")
    if isinstance(parts, str):
        return [parts]
    pieces = (_piece(part, f"{path}.{index}") for index, part in enumerate(parts))
    return joined(pieces, "")


def _piece(part: Part, path: str) -> Piece:
    if not isinstance(part, InputImagePart):
        return part.text
    if part.file_id is not None:
        return PlacedImage.at(path, "file_id", None)
    return PlacedImage.at(path, "image_url", part.image_url, part.detail)


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    format = body.text.format if body.text else None
    if isinstance(format, FlatJsonSchema):
        named = NamedSchema(format.name, format.description, format.schema, format.strict)
        return JsonSchemaFormat(json_schema=named)
    assert format is None or isinstance(format, TextFormat | JsonObjectFormat)
    return format


async def shortened(
    chat: TranslatedChat, engine: AsyncEngine, reading: Reading, client: str
) -> tuple[TranslatedChat, Conversation | None]:
    """The chat with as much of its end as fits beside its instructions and its answer, as one
    prompt; images go with their messages.

    It begins with a message of the user, so that no result of a tool is without its call. If not
    even the last one fits, the chat is unchanged and no prompt, and refused like any other.
    """
    whole = await _fitting(chat, engine, reading, client)
    if whole is not None:
        return chat, whole
    num_kept = [turn.role in SYSTEM_ROLES for turn in chat.turns].index(False)
    users = [place for place, turn in enumerate(chat.turns) if turn.role == "user"]
    places = [place for place in users if place > num_kept]
    found: tuple[TranslatedChat, Conversation | None] = chat, None
    first_fit, end = 0, len(places)
    while first_fit < end:  # what follows a beginning that fits, fits as well
        middle = (first_fit + end) // 2
        rest = _without(chat, num_kept, places[middle])
        fitting = await _fitting(rest, engine, reading, client)
        if fitting is None:
            first_fit = middle + 1
        else:
            found, end = (rest, fitting), middle
    return found


def _without(chat: TranslatedChat, start: int, end: int) -> TranslatedChat:
    """The chat without the messages from `start` to before `end`."""
    turns = [*chat.turns[:start], *chat.turns[end:]]
    body = msgspec.structs.replace(chat.body, messages=[turn.message() for turn in turns])
    return replace(chat, body=body, turns=turns)


async def _fitting(
    chat: TranslatedChat, engine: AsyncEngine, reading: Reading, client: str
) -> Conversation | None:
    """The chat as a prompt, if the prompt and its images fit beside the answer."""
    body = chat.body
    try:
        with chat.fields_named():
            found = await conversation_of(
                engine, body, reading, client, parallel=body.parallel_tool_calls
            )
    except (ContextLengthError, TextTooLongError, TooManyImagesError):
        return None
    room = engine.capacity.max_seq_len - len(found.prompt.token_ids)
    return found if room >= (body.max_completion_tokens or 1) else None
