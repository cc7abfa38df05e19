"""Reads and writes conversations: JSON of `/save`, or messages in the form of OpenAI's API."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from reprlib import repr as short_repr
from typing import Any

import msgspec

from minisgl.errors import CallerError, one_of

from .conversation import Conversation, Turn, open_calls
from .model import Message

SAVED_BY = "minisgl chat"
MAX_BYTES = 64 << 20  # more than any context holds
ROLES = ("system", "user", "assistant", "tool")
DATA = "data:image/"
IMAGES = "images"  # of a message that was read, beside its text


class FileError(CallerError):
    """A file cannot be written, or does not hold a valid conversation."""


@dataclass(frozen=True, slots=True)
class SavedConversation:
    turns: list[Turn]
    question: str | None = None  # at the end, without an answer
    # None: not in the file.
    system: str | None = None
    sampling: Mapping[str, Any] | None = None
    model: str | None = None
    # After the question: calls of tools, and their results.
    steps: list[Message] = field(default_factory=list)
    images: Sequence[str] = ()  # of the question


def path_of(typed: str) -> str:
    with suppress(ValueError):  # a character that no file name can have
        if "\n" not in typed:  # or more than a name was pasted
            return os.path.realpath(os.path.expanduser(typed))
    raise FileError(f"{short_repr(typed)} is not the name of a file.")


def write(path: str, conversation: Conversation, sampling: Mapping[str, Any], model: str) -> None:
    """Writes the file atomically. Raises FileError, also if it would replace a foreign file."""
    content = {
        "saved_by": SAVED_BY,
        "model": model,
        "system": conversation.system,
        "sampling": sampling,
        "messages": conversation.said,
    }
    # Lone surrogates come from a terminal that does not use UTF-8.
    data = (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode(errors="replace")
    try:
        mode = _mode_to_keep(path)
        file, draft = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".minisgl-")
        try:
            with os.fdopen(file, "wb") as opened:
                os.fchmod(file, mode)
                opened.write(data)
            os.replace(draft, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}.") from error


def _mode_to_keep(path: str) -> int:
    """The mode of an existing file, or a private one. Raises FileError for a foreign file."""
    if not os.path.lexists(path):
        return 0o600
    if os.path.isdir(path):
        raise FileError(f"{path} is a folder.")
    content = None
    with suppress(FileError):
        content = read_json(path, "conversation")
    if not isinstance(content, dict) or content.get("saved_by") != SAVED_BY:
        raise FileError(f"{path} is there and is no conversation that /save wrote: it stays.")
    return stat.S_IMODE(os.stat(path).st_mode)


def read(path: str) -> SavedConversation:
    """Reads a conversation. Raises FileError."""
    content = read_json(path, "conversation")
    if isinstance(content, list):
        content = {"messages": content}
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise FileError(
            f"{path} is no conversation: allowed are a list of messages, or an object with one "
            "as its messages."
        )
    for name, kind, form in (
        ("system", str, "a text"),
        ("model", str, "a text"),
        ("sampling", dict, "an object"),
    ):
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise FileError(f"{path}: {name} must be {form}.")
    messages = [
        _message(message, f"{path}: message {number}")
        for number, message in enumerate(content["messages"], 1)
    ]
    system = content.get("system")
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    saved = _turns(messages, path)
    return replace(
        saved, system=system, sampling=content.get("sampling"), model=content.get("model")
    )


def _turns(messages: Sequence[Message], path: str) -> SavedConversation:
    """The turns, the question that is left over, and the steps after it."""
    turns: list[Turn] = []
    question: str | None = None
    images: Sequence[str] = ()
    steps: list[Message] = []
    for message in messages:
        waiting = [call["id"] for call in open_calls(steps)]
        match message:
            case {"role": "user", "content": str(text), **others} if question is None:
                question, images = text, tuple(others.get(IMAGES, ()))
            case {"role": "tool", "tool_call_id": call_id} if call_id in waiting:
                steps.append(message)
            case {"role": "assistant", "tool_calls": _} if question is not None and not waiting:
                steps.append(message)
            case {"role": "assistant", "content": str(text)} if (
                question is not None and not waiting
            ):
                turns.append(Turn(question, text, steps=tuple(steps), images=images))
                question, steps, images = None, [], ()
            case _:
                raise FileError(
                    f"{path}: after a system message, if any, user and assistant must take turns, "
                    "the user first, and each tool call needs its result."
                )
    return SavedConversation(turns, question, steps=steps, images=images)


def _message(message: object, where: str) -> Message:
    """A message with the fields that a chat knows."""
    if not isinstance(message, dict):
        raise FileError(f"{where} is no object with a role and a content.")
    role, text = message.get("role"), message.get("content")
    if role not in ROLES:
        raise FileError(f"{where} has the role {role!r}; {one_of(ROLES)}.")
    calls = message.get("tool_calls") if role == "assistant" else None
    if text is None and calls:
        text = ""
    images: list[str] = []
    if role == "user" and isinstance(text, list):
        text = _parts(text, where, images)
    if not isinstance(text, str):
        raise FileError(f"{where} has a content that is no text.")
    known: Message = {"role": role, "content": text, **({IMAGES: images} if images else {})}
    if role == "tool":
        known["tool_call_id"] = message.get("tool_call_id")
    if calls:
        known["tool_calls"] = _calls(calls, where)
        if isinstance(thinking := message.get("reasoning_content"), str):
            known["reasoning_content"] = thinking
    return known


def _parts(parts: list[Any], where: str, images: list[str]) -> str:
    """The text in the parts of a content, whose images are added to `images`."""
    text = ""
    for part in parts:
        match part:
            case {"type": "text", "text": str(more)}:
                text += more
            case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith(DATA):
                images.append(url)
            case _:
                raise FileError(f"{where} has parts other than texts and images as data:image/….")
    return text


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    known = []
    for call in calls if isinstance(calls, list) else [calls]:
        match call:
            case {"id": str(call_id), "function": {"name": str(name), "arguments": str(text)}}:
                function = {"name": name, "arguments": text}
                known.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise FileError(
                    f"{where} has a tool call that is not "
                    '{"id": …, "function": {"name": …, "arguments": …}}, all of them texts.'
                )
    return known


def read_json(path: str, what: str) -> Any:
    """The content of a file that should have a `what`. Raises FileError."""
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            raise FileError(f"{path} is not a file.")  # a folder, or what might never end
        with open(path, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_BYTES:
        raise FileError(f"{path} is larger than any {what}.")
    try:
        # Of bytes that are no UTF-8, msgspec says now this and now that.
        return msgspec.json.decode(data.removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError:
        raise FileError(f"{path} is not in UTF-8; save it in UTF-8.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise FileError(f"{path} is no JSON: {error}.") from error
