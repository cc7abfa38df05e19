"""One answer of the model, as it comes in."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.request import FinishReason
from minisgl.text.thinking import CLOSE, Split, ThinkingSplitter

from .model import ReplyDelta
from .wording import count


@dataclass(slots=True)
class Answer:
    """Collects deltas, with the times that matter to the person who waits. Times in seconds."""

    asked_at: float
    text: str = ""  # as the model wrote it, its thinking included unless told apart
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_first_tokens: int | None = None  # in the first delta that had any
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: FinishReason | None = None  # None to the end: it was stopped
    _splitter: ThinkingSplitter = field(default_factory=ThinkingSplitter)

    def add(self, delta: ReplyDelta, now: float) -> Split:
        """Returns what there is to show of it."""
        grows = delta.text or delta.thinking or (delta.num_tokens or 0) > (self.num_tokens or 0)
        if grows and self.finish_reason is None:  # a server counts after the end
            if self.first_at is None:
                self.first_at, self.num_first_tokens = now, delta.num_tokens
            self.last_at = now
        for name in ("num_tokens", "num_prompt_tokens", "num_cached_tokens", "finish_reason"):
            if (value := getattr(delta, name)) is not None:
                setattr(self, name, value)
        self.text += delta.text
        split = self._splitter.feed(delta.text)
        split.thinking = delta.thinking + split.thinking
        return split

    def flush(self) -> Split:
        """What is left to show, at the end."""
        return self._splitter.flush()

    @property
    def has_come(self) -> bool:
        """Whether there is anything that the conversation could go on from."""
        ended = self.finish_reason is not None and self.first_at is not None
        return bool(self.text or self.num_tokens) or ended

    @property
    def message(self) -> str:
        """For the conversation. Thinking that was stopped is closed, as every template expects."""
        return f"{self.text}\n{CLOSE}\n\n" if self._splitter.inside else self.text

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.asked_at

    @property
    def later(self) -> tuple[int, float] | None:
        """The tokens after the first delta and their time in seconds; None where there were none,
        or nobody counted."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        if self.num_tokens is None:
            return None
        # A server that counts only at the end has sent a token with its first delta.
        first = 1 if self.num_first_tokens is None else self.num_first_tokens
        return max(0, self.num_tokens - first), self.last_at - self.first_at

    @property
    def num_context_tokens(self) -> int | None:
        """Of the conversation with this answer."""
        if self.num_prompt_tokens is None or self.num_tokens is None:
            return None
        return self.num_prompt_tokens + self.num_tokens

    def fills(self, max_seq_len: int | None) -> bool:
        """Whether it ended because there was no room left."""
        if self.finish_reason is not FinishReason.LENGTH or max_seq_len is None:
            return False
        return (self.num_context_tokens or 0) >= max_seq_len

    def summary(self) -> str:
        """One line: how much, how fast, how much of the prompt was in the cache."""
        parts = []
        if self.num_tokens is not None:
            parts.append(count(self.num_tokens, "token"))
        if self.ttft_s is not None:
            parts.append(f"TTFT {1000 * self.ttft_s:.0f} ms")
        if self.later is not None:
            num_tokens, seconds = self.later
            parts.append(f"{num_tokens / seconds:.1f} tok/s")
        if self.num_prompt_tokens is not None and self.num_cached_tokens is not None:
            cached = f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,}"
            parts.append(f"{cached} prompt tokens cached")
        elif self.num_prompt_tokens is not None:
            parts.append(count(self.num_prompt_tokens, "prompt token"))
        if self.finish_reason is None:
            parts.append("stopped")
        elif self.finish_reason is FinishReason.LENGTH:
            parts.append("cut at the limit")
        return " · ".join(parts)
