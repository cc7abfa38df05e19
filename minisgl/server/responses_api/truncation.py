"""Leaves out the oldest messages of a conversation that is too long, if the client wants that."""

from __future__ import annotations

from minisgl.errors import ContextLengthError, TextTooLongError
from minisgl.server.answer_plan import read_conversation
from minisgl.server.messages import Reading
from minisgl.server.responses_api.conversation import Chat
from minisgl.server.served_engine import ServedEngine


async def shortened(chat: Chat, engine: ServedEngine, reading: Reading) -> Chat:
    """The chat with as much of its end as fits beside its instructions and its answer.

    It begins with a message of the user, so that no result of a tool is without its call. If not
    even the last one fits, the chat is unchanged, and refused like any other.
    """
    if await _fits(chat, engine, reading):
        return chat
    places = chat.beginnings
    first_fit, end = 0, len(places)
    while first_fit < end:  # what follows a beginning that fits, fits as well
        middle = (first_fit + end) // 2
        if await _fits(chat.beginning_at(places[middle]), engine, reading):
            end = middle
        else:
            first_fit = middle + 1
    return chat.beginning_at(places[first_fit]) if first_fit < len(places) else chat


async def _fits(chat: Chat, engine: ServedEngine, reading: Reading) -> bool:
    body = chat.body
    try:
        found = await read_conversation(engine, body, reading, parallel=body.parallel_tool_calls)
    except (ContextLengthError, TextTooLongError):
        return False
    room = engine.capacity.max_seq_len - len(found.prompt_token_ids)
    return room >= (body.max_completion_tokens or 1)
