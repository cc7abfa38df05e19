"""What a request of another API becomes: a chat, whose fields errors name as the client does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from minisgl.errors import ContextLengthError, InvalidRequestError
from minisgl.server.requests.chat_messages import Images, Message, ToolCall
from minisgl.server.requests.described import Unsupported, takes
from minisgl.server.requests.request_types import ChatRequest, CommonFields, Off
from minisgl.text.history import Role

GAP = "\n\n"  # between texts that come apart and become one message


@takes(Unsupported, "max_completion_tokens", "response_format", "reasoning_effort")
@takes(Unsupported, "thinking_token_budget", "truncate_prompt_tokens", "prompt_logprobs")
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


@dataclass(slots=True)
class Turn:
    """A message of the chat, while what it is made of is read. Paths are of the client's fields."""

    role: Role
    path: str  # of the first part
    texts: list[str] = field(default_factory=list)
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
    def text(self) -> str:
        return self.gap.join(self.texts)

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self.text,
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
