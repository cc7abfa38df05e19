"""What was said so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Message


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str  # as the model wrote it: a chat template knows what to do with its thinking
    num_tokens: int | None = None  # of the conversation up to here, as far as the model has told

    @property
    def messages(self) -> list[Message]:
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(slots=True)
class Conversation:
    """Turns, behind a system prompt if there is one."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    question: str | None = None  # asked last and not answered
    _dropped: Turn | None = None  # while its question is asked again

    @property
    def messages(self) -> list[Message]:
        """All that the model is told."""
        messages = self.said
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    @property
    def said(self) -> list[Message]:
        """By either side, the question included."""
        messages = [message for turn in self.turns for message in turn.messages]
        if self.question is not None:
            messages.append({"role": "user", "content": self.question})
        return messages

    def ask(self, text: str) -> None:
        self.question = text

    def ask_again(self) -> bool:
        """The question that has no answer, or else the last one. Returns whether there is one."""
        if self.question is None and self.turns:
            self._dropped = self.turns.pop()
            self.question = self._dropped.question
        return self.question is not None

    def answer(self, text: str, num_tokens: int | None = None) -> None:
        assert self.question is not None
        self.turns.append(Turn(self.question, text, num_tokens))
        self.question = self._dropped = None

    def give_up(self) -> bool:
        """Nothing came. Returns whether the answer that was dropped is back."""
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
