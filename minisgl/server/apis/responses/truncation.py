"""Leaves out the oldest messages of a conversation that is too long, if the client wants that."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from minisgl.errors import ContextLengthError, TextTooLongError
from minisgl.server.answers.plan import read_conversation
from minisgl.server.apis.responses.request_types import SYSTEM_ROLES
from minisgl.server.requests.templating import Reading
from minisgl.server.requests.translation import TranslatedChat
from minisgl.server.served_engine import ServedEngine


async def shortened(chat: TranslatedChat, engine: ServedEngine, reading: Reading) -> TranslatedChat:
    """The chat with as much of its end as fits beside its instructions and its answer.

    It begins with a message of the user, so that no result of a tool is without its call. If not
    even the last one fits, the chat is unchanged, and refused like any other.
    """
    if await _fits(chat, engine, reading):
        return chat
    num_kept = [turn.role in SYSTEM_ROLES for turn in chat.turns].index(False)
    users = [place for place, turn in enumerate(chat.turns) if turn.role == "user"]
    places = [place for place in users if place > num_kept]
    first_fit, end = 0, len(places)
    while first_fit < end:  # what follows a beginning that fits, fits as well
        middle = (first_fit + end) // 2
        if await _fits(_without(chat, num_kept, places[middle]), engine, reading):
            end = middle
        else:
            first_fit = middle + 1
    return chat if first_fit == len(places) else _without(chat, num_kept, places[first_fit])


def _without(chat: TranslatedChat, start: int, end: int) -> TranslatedChat:
    """The chat without the messages from `start` to before `end`."""
    turns = [*chat.turns[:start], *chat.turns[end:]]
    body = msgspec.structs.replace(chat.body, messages=[turn.message() for turn in turns])
    return replace(chat, body=body, turns=turns)


async def _fits(chat: TranslatedChat, engine: ServedEngine, reading: Reading) -> bool:
    body = chat.body
    try:
        found = await read_conversation(engine, body, reading, parallel=body.parallel_tool_calls)
    except (ContextLengthError, TextTooLongError):
        return False
    room = engine.capacity.max_seq_len - len(found.prompt_token_ids)
    return room >= (body.max_completion_tokens or 1)
