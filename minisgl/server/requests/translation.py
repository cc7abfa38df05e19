"""What a request of another API becomes: a chat, whose fields errors name as the client does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from minisgl.errors import ContextLengthError, InvalidRequestError
from minisgl.server.requests.chat_messages import (
    ContentPart,
    Detail,
    ImageAddress,
    ImagePart,
    Images,
    Message,
    RefusalPart,
    ToolCall,
)
from minisgl.server.requests.described import Unsupported, takes
from minisgl.server.requests.request_types import ChatRequest, CommonFields, Off
from minisgl.text.history import Role

GAP = "\n\n"  # between texts that come apart and become one message


@takes(Unsupported, "max_completion_tokens", "response_format", "reasoning_effort")
@takes(Unsupported, "thinking_token_budget", "truncate_prompt_tokens", "prompt_logprobs")
@takes(Unsupported, "logprob_token_ids")
class TranslatedFields(CommonFields, kw_only=True):
    """The fields that the requests of the other APIs have in common."""

    model: str | None = None
    control_tokens_in_text: bool | None = None  # this and the next as in a chat
    images: Images | None = None

    # Of chats. They would have an effect there.
    n: Literal[1] | None = None
    """Only 1. Example: `1`"""
    logprobs: Off = None
    return_token_ids: Off = None


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a message, and the client's fields that have it and its address."""

    part: ImagePart
    path: str
    address_path: str

    @classmethod
    def at(cls, path: str, name: str, url: str | None, detail: Detail | None = None) -> PlacedImage:
        """name: of the field below `path` that has the address."""
        address = None if url is None else ImageAddress(url, detail)
        return cls(ImagePart(address), path, f"{path}.{name}")


Piece: TypeAlias = str | PlacedImage


def joined(pieces: Iterable[Piece], gap: str) -> list[Piece]:
    """The pieces of a message, where a gap comes between texts that follow each other."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += gap + piece
        else:
            found.append(piece)
    return found


@dataclass(slots=True)
class Turn:
    """A message of the chat, while what it is made of is read. Paths are of the client's fields."""

    role: Role
    path: str  # of the first part
    pieces: list[Piece] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, ToolCall]] = field(default_factory=list)  # each with its path
    tool_call_id: str | None = None
    id_field: str = ""  # the name of this field
    gap: str = GAP  # between the texts

    @property
    def is_open(self) -> bool:
        """Whether an answer may continue it."""
        return self.role == "assistant" and not self.calls

    @property
    def is_empty(self) -> bool:
        return not any(not isinstance(piece, str) or piece.strip() for piece in self.pieces)

    def message(self) -> Message:
        pieces = joined(self.pieces, self.gap)
        parts: list[ContentPart | RefusalPart | ImagePart] = [
            ContentPart(piece) if isinstance(piece, str) else piece.part for piece in pieces
        ]
        has_images = any(isinstance(part, ImagePart) for part in parts)
        return Message(
            role=self.role,
            content=parts if has_images else "".join(part.text for part in parts),
            reasoning_content=GAP.join(self.thoughts) or None,
            tool_calls=[call for _, call in self.calls] or None,
            tool_call_id=self.tool_call_id,
        )

    def fields(self, place: int) -> dict[str, str]:
        """The client's fields, by those of the message at `place` in the chat."""
        own = f"messages.{place}"
        found = {own: self.path, f"{own}.role": self.path}
        if self.id_field:
            found[f"{own}.tool_call_id"] = f"{self.path}.{self.id_field}"
        for index, (path, _) in enumerate(self.calls):
            found.setdefault(f"{own}.tool_calls", path)
            found[f"{own}.tool_calls.{index}"] = path
        for index, piece in enumerate(joined(self.pieces, self.gap)):
            if not isinstance(piece, str):
                found[f"{own}.content.{index}"] = piece.path
                found[f"{own}.content.{index}.image_url"] = piece.address_path
        return found


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How the client names the fields of the chat that its request becomes."""

    prompt_field: str  # which has the conversation
    limit_field: str  # max_tokens
    spelled: Callable[[str], str] = str  # a path as the API writes it
    fields: Mapping[str, str] = field(default_factory=dict)  # dotted paths, by those of the chat

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Errors about a field of the chat name the client's field."""
        try:
            yield
        except ContextLengthError as error:
            raise error.with_names(
                prompt_field=self.prompt_field, limit_field=self.limit_field
            ) from None
        except InvalidRequestError as error:
            error.param = self.spelled(self._name(error.param))
            raise

    def _name(self, path: str) -> str:
        names = path.split(".")
        for length in range(len(names), 0, -1):
            known = self.fields.get(".".join(names[:length]))
            if known is not None:
                return ".".join([known, *names[length:]])
        return path


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A request as a chat."""

    body: ChatRequest
    turns: Sequence[Turn]  # its messages
    names: FieldNames
    left_out: Collection[str]  # the types of its tools that this server does not run

    def fields_named(self) -> contextlib.AbstractContextManager[None]:
        """Errors about the chat name the fields of the request."""
        fields = dict(self.names.fields)
        for place, turn in enumerate(self.turns):
            fields |= turn.fields(place)
        return replace(self.names, fields=fields).used()


def given(value: str | None, path: str) -> str:
    """A value that must be there; raises InvalidRequestError."""
    if value is None:
        raise InvalidRequestError(path, "is missing.")
    return value
