"""Data sets of conversations, in ShareGPT's format or in MT-Bench's."""

from __future__ import annotations

import random
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from minisgl.errors import ConfigError

SHAREGPT = (
    'a list of {"conversations": [{"from": "human", "value": TEXT}, '
    '{"from": "gpt", "value": TEXT}]}'
)
MT_BENCH = 'a line for each {"question_id": ID, "category": NAME, "turns": [TEXT, ...]}'
# Names of the two sides in files of this format.
HUMANS, MODELS = ("human", "user"), ("gpt", "chatgpt", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The questions of one entry, and what the file knows of the answer to the first."""

    turns: tuple[str, ...]
    answer: str | None = None
    num_answer_tokens: int | None = None  # None: not known


class _Said(msgspec.Struct):
    value: str
    who: str = msgspec.field(name="from")


class _ShareGPT(msgspec.Struct):
    conversations: list[_Said]


class _MTBench(msgspec.Struct):
    turns: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


def read_dataset(path: Path) -> list[Conversation]:
    """The conversations of a file. Raises ConfigError that names the entry or the line.

    A JSON list has ShareGPT's format, and the first question with an answer is taken of each entry;
    entries without one are left out, as public files have some. Lines of JSON have MT-Bench's.
    """
    try:
        data = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise ConfigError("--dataset", path, f"cannot be read ({error.strerror})") from error
    if data.lstrip().startswith(b"["):
        found = _read_list(path, data)
    else:
        lines = ((number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip())
        found = [
            Conversation(turns=tuple(_decode(path, f"line {number}", line, _MTBench).turns))
            for number, line in lines
        ]
    if not found:
        allowed = f"it has no conversation; allowed: {SHAREGPT}, or {MT_BENCH}"
        raise ConfigError("--dataset", path, allowed)
    return found


def sample(
    conversations: Sequence[Conversation], num_requests: int, seed: int
) -> list[Conversation]:
    """Different conversations with `num_requests` questions together, or all; the last one may be
    cut."""
    picked: list[Conversation] = []
    for conversation in random.Random(f"sample of {seed}").sample(
        conversations, len(conversations)
    ):
        if num_requests <= 0:
            break
        picked.append(replace(conversation, turns=conversation.turns[:num_requests]))
        num_requests -= len(conversation.turns)
    return picked


def _read_list(path: Path, data: bytes) -> list[Conversation]:
    try:
        entries = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        allowed = f"it is not valid JSON ({error}); allowed: {SHAREGPT}"
        raise ConfigError("--dataset", path, allowed) from error
    found = []
    for number, entry in enumerate(entries, 1):
        said = _decode(path, f"entry {number}", entry, _ShareGPT).conversations
        first = next((at for at, one in enumerate(said) if one.who in HUMANS), len(said))
        answer = next((one.value for one in said[first + 1 :] if one.who in MODELS), None)
        if answer and said[first].value:
            found.append(Conversation(turns=(said[first].value,), answer=answer))
    return found


def _decode(path: Path, place: str, data: Any, form: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        allowed = SHAREGPT if form is _ShareGPT else f"{MT_BENCH}, or {SHAREGPT}"
        allowed = f"{error}; allowed: {allowed}"
        raise ConfigError("--dataset", f"{path}, {place}", allowed) from error
