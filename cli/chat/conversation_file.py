"""Reads and writes conversations: JSON of `/save`, or messages in the form of OpenAI's API."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

import msgspec

from minisgl.errors import CallerError

from .conversation import Conversation, Turn

SAVED_BY = "minisgl chat"
MAX_BYTES = 16 << 20  # more than any context holds
ROLES = ("system", "user", "assistant")


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
        content = _content(path)
    if not isinstance(content, dict) or content.get("saved_by") != SAVED_BY:
        raise FileError(f"{path} is there and is no conversation that /save wrote: it stays.")
    return stat.S_IMODE(os.stat(path).st_mode)


def read(path: str) -> SavedConversation:
    """Reads a conversation. Raises FileError."""
    content = _content(path)
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
    roles_and_texts = [
        _role_and_text(message, f"{path}: message {number}")
        for number, message in enumerate(content["messages"], 1)
    ]
    system = content.get("system")
    if roles_and_texts and roles_and_texts[0][0] == "system":
        system = roles_and_texts.pop(0)[1]
    for index, (role, _) in enumerate(roles_and_texts):
        if role != ("user", "assistant")[index % 2]:
            raise FileError(
                f"{path}: after a system message, if any, user and assistant must take turns, the "
                "user first."
            )
    texts = [text for _, text in roles_and_texts]
    return SavedConversation(
        [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=False)],
        texts[-1] if len(texts) % 2 else None,
        system,
        content.get("sampling"),
        content.get("model"),
    )


def _role_and_text(message: object, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise FileError(f"{where} is no object with a role and a content.")
    role, text = message.get("role"), message.get("content")
    if role not in ROLES:
        raise FileError(f"{where} has the role {role!r}; allowed: system, user or assistant.")
    if not isinstance(text, str):
        raise FileError(f"{where} has a content that is no text.")
    return role, text


def _content(path: str) -> Any:
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            raise FileError(f"{path} is not a file.")  # a folder, or what might never end
        with open(path, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_BYTES:
        raise FileError(f"{path} is larger than any conversation.")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path} is no JSON: {error}.") from error
