"""The conversation so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .model import Message


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str  # as generated: the chat template handles the thinking in it
    num_tokens: int | None = None  # of the conversation up to here; None: unknown
    steps: Sequence[Message] = ()  # between the two: calls of tools, and their results
    images: Sequence[str] = ()  # of the question, as `data:` addresses

    @property
    def messages(self) -> list[Message]:
        return [
            question_message(self.question, self.images),
            *self.steps,
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(slots=True)
class Conversation:
    """Turns after an optional system prompt."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    question: str | None = None  # asked last and not answered
    steps: list[Message] = field(default_factory=list)  # after it
    images: Sequence[str] = ()  # of it, as `data:` addresses
    attached: list[str] = field(default_factory=list)  # those of the next one
    _dropped: Turn | None = None  # while its question is asked again

    @property
    def messages(self) -> list[Message]:
        """All messages for the model."""
        messages = self.said
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    @property
    def said(self) -> list[Message]:
        """The messages after the system prompt, including an unanswered question."""
        messages = [message for turn in self.turns for message in turn.messages]
        if self.question is not None:
            messages += [question_message(self.question, self.images), *self.steps]
        return messages

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """The calls of tools that have no result yet."""
        return open_calls(self.steps)

    def ask(self, text: str) -> None:
        self.question = text
        self.images, self.attached = tuple(self.attached), []
        self.steps = []

    def ask_again(self) -> bool:
        """Repeats the unanswered question, or else the last one. Returns whether there is one.

        Calls without results are dropped; results that the model has not answered are kept.
        """
        if self.question is None and self.turns:
            self._dropped = self.turns.pop()
            self.question, self.images = self._dropped.question, self._dropped.images
        if self.open_calls:
            self.steps = []
        return self.question is not None

    def add_result(self, text: str) -> None:
        """Adds the result of the first of the open calls."""
        call = self.open_calls[0]
        self.steps.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def answer(self, text: str, num_tokens: int | None = None) -> None:
        assert self.question is not None
        self.turns.append(
            Turn(self.question, text, num_tokens, tuple(self.steps), tuple(self.images))
        )
        self._end_question()

    def give_up(self) -> bool:
        """Ends a question without an answer. Returns whether a dropped answer was restored."""
        if self._dropped is None:
            return False
        self.turns.append(self._dropped)
        self._end_question()
        return True

    def undo(self) -> Turn | None:
        """Takes back the last turn, if there is one, or a question whose calls wait for results.
        Any other question without an answer stays: without that turn there may be room for it."""
        if self.question is not None and self.open_calls:
            turn = Turn(self.question, "")
            self._end_question()
            return turn
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        self.turns.clear()
        self.attached = []
        self._end_question()

    def _end_question(self) -> None:
        self.question = self._dropped = None
        self.images = ()
        self.steps = []


def question_message(text: str, images: Sequence[str] = ()) -> Message:
    """A message of the user: the images, then the text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    content = [*parts, {"type": "text", "text": text}] if parts else text
    return {"role": "user", "content": content}


def open_calls(steps: Sequence[Message]) -> list[dict[str, Any]]:
    """The calls in the last assistant message of `steps` that have no result yet."""
    results = set()
    for message in reversed(steps):
        if message["role"] == "assistant":
            return [call for call in message["tool_calls"] if call["id"] not in results]
        results.add(message["tool_call_id"])
    return []
