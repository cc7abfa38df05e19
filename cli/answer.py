"""One answer of the model, as it comes in."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.request import FinishReason, OutputDelta


@dataclass(slots=True)
class Answer:
    """Collects deltas, with the times that matter to the person who waits. Times in seconds."""

    num_prompt_tokens: int
    asked_at: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int = 0
    num_first_tokens: int = 0  # in the first delta that had any
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: FinishReason | None = None  # None to the end: it was stopped

    def add(self, delta: OutputDelta, now: float) -> None:
        if delta.token_ids:
            if self.first_at is None:
                self.first_at, self.num_first_tokens = now, len(delta.token_ids)
            self.last_at = now
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason = delta.finish_reason

    @property
    def tokens_per_second(self) -> float | None:
        """After the first delta; None where nothing came after it."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return (len(self.token_ids) - self.num_first_tokens) / (self.last_at - self.first_at)

    def summary(self) -> str:
        """One line: how much, how fast, how much of the prompt was in the cache."""
        parts = [_count(len(self.token_ids), "token")]
        if self.first_at is not None:
            parts.append(f"TTFT {1000 * (self.first_at - self.asked_at):.0f} ms")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        parts.append(f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached")
        if self.finish_reason is None:
            parts.append("stopped")
        return " · ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
