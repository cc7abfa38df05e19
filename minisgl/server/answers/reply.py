"""The answer to one generation request: a reply has choices, each fed with the deltas of a stream.

A choice either turns each delta into events (`events`) or collects them (`keep`) for the whole
answer (`whole`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import msgspec

from minisgl.errors import EngineStoppedError
from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, Event
from minisgl.grammar.tool_grammars import CUSTOM_ARGUMENT
from minisgl.request import FinishReason, OutputDelta
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.plan import AnswerStyle

EndReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Call:
    """A call of the answer, as far as it has come."""

    id: str
    name: str
    custom: bool
    arguments: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its arguments, as the model wrote them."""
        return "".join(self.arguments)

    @property
    def input(self) -> str:
        """The text that a custom tool is given; the model may have written something else."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, str])[CUSTOM_ARGUMENT]
        except (ValueError, KeyError, RecursionError):
            return self.text


class AnswerReader:
    """The events of one answer, and its calls so far."""

    def __init__(self, style: AnswerStyle | None) -> None:
        """style: None for an answer that is not parsed: its text is the content."""
        self.calls: list[Call] = []
        self.has_broken_call = False  # one whose arguments are no JSON object
        self._style = style
        self._started = False

    def read(self, delta: OutputDelta) -> Sequence[Event]:
        """The events of `delta`, in order, the first time with those of the echo."""
        style = self._style
        if style is None:
            return [ContentText(delta.text)] if delta.text else []
        started, self._started = self._started, True
        found = delta.events if started else [*style.echo, *delta.events]
        for each in found:
            match each:
                case CallStart(name=name):
                    self.calls.append(Call(style.call_id(), name, name in style.custom_names))
                    style.count_call()
                case CallArguments(index, text):
                    self.calls[index].arguments.append(text)
                case CallEnd(is_object=False):
                    self.has_broken_call = True
        return found


class ReplyChoice(ABC):
    """One choice of a reply, while it is generated."""

    def __init__(self, job: GenerationJob) -> None:
        self.job = job
        self.last = OutputDelta([], "", 0, 0)  # came last; its counts are of the whole answer
        self._started = False
        self._finish_reason: EndReason | None = None
        self._token_ended = False  # whether the last token ended it and is not part of the text

    @abstractmethod
    def events(self, delta: OutputDelta) -> bytes:
        """The events that report `delta`; none while its text is held back."""

    @abstractmethod
    def keep(self, delta: OutputDelta) -> None:
        """Collect `delta` for the whole answer."""

    @property
    def num_scored(self) -> int:
        """Tokens kept with their logprobs."""
        return 0

    def check_finished(self) -> EndReason:
        """Why the choice ended, called after its stream; raises EngineStoppedError if it did not,
        or if it was aborted and the API has no word for that."""
        if self._finish_reason is None:
            raise EngineStoppedError("The request was stopped before it had finished.")
        return self._finish_reason

    def _take(self, delta: OutputDelta) -> str:
        """Count `delta`; returns the text that it adds to the answer."""
        self.last = delta
        if delta.finish_reason is not None:
            self._end(delta)
        started, self._started = self._started, True
        return delta.text if started else (self.job.echo or "") + delta.text

    def _end(self, delta: OutputDelta) -> None:
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish_reason = "stop" if delta.finish_reason is FinishReason.STOP else "length"
            self._token_ended = isinstance(delta.stop_reason, int)


class Reply(ABC):
    """The answer to one HTTP request."""

    # Fields of the request: that of the prompt, and that of max_tokens.
    prompt_field: ClassVar[str]
    limit_field: str = "max_tokens"
    choices: Sequence[ReplyChoice]

    def __init__(self, id: str) -> None:
        """`id` must differ from that of every other reply."""
        self.id = id

    @abstractmethod
    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""

    def first_events(self) -> bytes:
        """The events before those of the choices, sent before anything is generated."""
        return b""

    @abstractmethod
    def last_events(self) -> bytes:
        """The events after those of the choices."""

    @abstractmethod
    def failure_events(self, error: Exception) -> bytes:
        """The events that end a stream after an error, in place of the last ones."""
