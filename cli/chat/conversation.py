"""The conversation so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Message


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str  # as generated: the chat template handles the thinking in it
    num_tokens: int | None = None  # of the conversation up to here; None: unknown

    @property
    def messages(self) -> list[Message]:
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(slots=True)
class Conversation:
    """Turns after an optional system prompt."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    question: str | None = None  # asked last and not answered
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
        """The messages of user and assistant, including an unanswered question."""
        messages = [message for turn in self.turns for message in turn.messages]
        if self.question is not None:
            messages.append({"role": "user", "content": self.question})
        return messages

    def ask(self, text: str) -> None:
        self.question = text

    def ask_again(self) -> bool:
        """Repeats the unanswered question, or else the last one. Returns whether there is one."""
        if self.question is None and self.turns:
            self._dropped = self.turns.pop()
            self.question = self._dropped.question
        return self.question is not None

    def answer(self, text: str, num_tokens: int | None = None) -> None:
        assert self.question is not None
        self.turns.append(Turn(self.question, text, num_tokens))
        self.question = self._dropped = None

    def give_up(self) -> bool:
        """Ends a question without an answer. Returns whether a dropped answer was restored."""
        if self._dropped is None:
            return False
        self.turns.append(self._dropped)
        self.question = self._dropped = None
        return True

    def undo(self) -> Turn | None:
        """Takes back the last turn, if there is one. A question without an answer stays: without
        that turn there may be room for it."""
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        self.turns.clear()
        self.question = None
