"""Counts the tokens of the answers of a data set, by the server's own tokenizer where it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.dataset import Conversation
from minisgl.bench.workload.requests import estimated_tokens
from minisgl.client.errors import ServerError


class _Counted(msgspec.Struct):
    count: int


async def with_answer_lengths(
    target: Endpoint, picked: Sequence[Conversation]
) -> tuple[list[Conversation], bool]:
    """The conversations with the lengths of their answers, and whether the server counted them.

    A server without /tokenize, which minisgl and vLLM have, counts nothing: all lengths are then
    estimated from the bytes.
    """
    counts: list[int | None] = []
    try:
        for one in picked:
            counts.append(None if one.answer is None else await _count(target, one.answer))
    except (ServerError, msgspec.DecodeError, UnicodeDecodeError):
        counts = [None if one.answer is None else estimated_tokens(one.answer) for one in picked]
        counted = False
    else:
        counted = True
    pairs = zip(picked, counts, strict=True)
    return [replace(one, num_answer_tokens=count) for one, count in pairs], counted


async def _count(target: Endpoint, text: str) -> int:
    asked = {"prompt": text, "add_special_tokens": False}
    named = {} if target.model is None else {"model": target.model}
    found = await target.send(f"{target.root}/tokenize", msgspec.json.encode(asked | named))
    return msgspec.json.decode(found, type=_Counted).count
