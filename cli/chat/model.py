"""The interface of the model in a chat: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.errors import CallerError, UnsupportedModelError
from minisgl.request import FinishReason, SamplingParams

Message = dict[str, Any]  # in the form of OpenAI's API


# What is asked of models that do not generate, by their task.
PURPOSES = {
    "embed": "makes vectors of texts: `minisgl serve` offers them at /v1/embeddings",
    "rerank": "scores documents: `minisgl serve --task rerank` offers that at /v1/rerank",
}


def check_can_chat(name: str, task: str) -> None:
    """Raise UnsupportedModelError for a model that was not loaded to generate text."""
    if task in PURPOSES:
        raise UnsupportedModelError(
            f"{name} was loaded with --task {task} and cannot chat. It {PURPOSES[task]}."
        )


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What answers are besides text: JSON that follows a schema, or calls of tools."""

    schema: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # in the form of OpenAI's API


TEXT = AnswerRules()


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Begins a tool call, if it has a name, or goes on with its arguments."""

    index: int  # of the call in the answer
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ReplyDelta:
    """What has arrived since the last delta. Counts are of the answer so far; None: unknown."""

    text: str = ""
    thinking: str = ""  # if the model or server separates it from the text
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompt
    finish_reason: FinishReason | None = None
    calls: Sequence[CallPiece] = ()
    num_drafted_tokens: int | None = None  # guesses of tokens that were verified
    num_accepted_tokens: int | None = None  # of these, those that are in the answer


class ChatModel(Protocol):
    adapter: str  # that answers, one of `adapters`; empty: the model itself

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters; on a server, of all its other models."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def sees(self) -> bool | None:
        """Whether it takes images; None: unknown."""
        ...

    @property
    def facts(self) -> Sequence[str]:
        """The parts of the banner: the model's name first, then where and how it runs."""
        ...

    @property
    def max_seq_len(self) -> int | None:
        """Maximum number of tokens in a conversation; None: unknown."""
        ...

    @property
    def sampling_defaults(self) -> SamplingParams | None:
        """Values of parameters that are not set; None: a server has its own, and perhaps parameters
        that minisgl does not know."""
        ...

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raises MinisglError if the parameters are invalid."""
        ...

    async def check_rules(self, rules: AnswerRules) -> None:
        """Raises MinisglError if the model cannot follow the rules, as far as that is known."""
        ...

    def status(self) -> Sequence[tuple[str, str]]:
        """Further statistics for /stats, as names and values."""
        ...

    def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], rules: AnswerRules, /
    ) -> AsyncGenerator[ReplyDelta, None]:
        """Streams the next message. Closing the generator, or cancelling its task, ends it at once.

        Raises MinisglError; ContextFullError if the messages are too long.
        """
        ...


class ContextFullError(CallerError):
    """The conversation is too long to be answered."""
