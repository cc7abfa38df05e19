"""What answers in a chat: an engine of our own, or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.errors import CallerError
from minisgl.request import FinishReason, SamplingParams

Message = dict[str, str]


@dataclass(slots=True)
class ReplyDelta:
    """What has come since the last one. Counts are of the whole answer so far; None: not told."""

    text: str = ""
    thinking: str = ""  # where it is told apart from the text
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompt
    finish_reason: FinishReason | None = None


class ChatModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Sequence[str]:
        """What the banner says of it: its name first, then where and how it runs."""
        ...

    @property
    def max_seq_len(self) -> int | None:
        """How many tokens a conversation may have; None: not known."""
        ...

    @property
    def sampling_defaults(self) -> SamplingParams | None:
        """In force where nothing is chosen; None: a server has its own, and perhaps parameters
        that minisgl does not know."""
        ...

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raises MinisglError if no answer can be given with these parameters."""
        ...

    def status(self) -> Sequence[tuple[str, str]]:
        """What else it knows of its work: names and values."""
        ...

    def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[ReplyDelta, None]:
        """Streams the next message. To close it, or to cancel its task, ends the answer at once.

        Raises MinisglError; ContextFullError where the messages are too long.
        """
        ...


class ContextFullError(CallerError):
    """The conversation has become too long to be answered."""
