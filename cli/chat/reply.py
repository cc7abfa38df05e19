"""The record of one answer while it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.request import FinishReason
from minisgl.text.thinking import CLOSE, Split, ThinkingSplitter

from .model import ReplyDelta
from .text_format import count


@dataclass(slots=True)
class ReplyRecord:
    """Collects deltas and their times, in seconds by time.perf_counter."""

    asked_at: float
    text: str = ""  # as generated, with its thinking unless that came separately
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_first_tokens: int | None = None  # in the first delta that had any
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: FinishReason | None = None  # None at the end: the user stopped it
    _splitter: ThinkingSplitter = field(default_factory=ThinkingSplitter)

    def add(self, delta: ReplyDelta, now: float) -> Split:
        """Adds a delta that arrived at `now`. Returns what to show."""
        grows = delta.text or delta.thinking or (delta.num_tokens or 0) > (self.num_tokens or 0)
        if grows and self.finish_reason is None:  # servers send usage after the end
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
        """Returns what remains to be shown at the end."""
        return self._splitter.flush()

    @property
    def has_come(self) -> bool:
        """Whether anything arrived from which the conversation can continue."""
        ended = self.finish_reason is not None and self.first_at is not None
        return bool(self.text or self.num_tokens) or ended

    @property
    def message(self) -> str:
        """The answer for the conversation. Interrupted thinking is closed, as templates expect."""
        return f"{self.text}\n{CLOSE}\n\n" if self._splitter.inside else self.text

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.asked_at

    @property
    def later(self) -> tuple[int, float] | None:
        """Number of tokens after the first delta and their time in seconds; None if there were none
        or they were not counted."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        if self.num_tokens is None:
            return None
        # A server that counts only at the end has sent a token with its first delta.
        first = 1 if self.num_first_tokens is None else self.num_first_tokens
        return max(0, self.num_tokens - first), self.last_at - self.first_at

    @property
    def num_context_tokens(self) -> int | None:
        """Number of tokens of the conversation with this answer."""
        if self.num_prompt_tokens is None or self.num_tokens is None:
            return None
        return self.num_prompt_tokens + self.num_tokens

    def fills(self, max_seq_len: int | None) -> bool:
        """Whether the answer ended because the context is full."""
        if self.finish_reason is not FinishReason.LENGTH or max_seq_len is None:
            return False
        return (self.num_context_tokens or 0) >= max_seq_len

    def summary(self) -> str:
        """One line with the number of tokens, the speed and the cached part of the prompt."""
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
