"""What was said so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Message


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant, behind a system prompt if there is one."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """As the model wrote it: a chat template knows what to do with its thinking."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forgets the last question, which was not answered."""
        self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()
