"""Statistics over the answers of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from .reply_record import ReplyRecord
from .text_format import count


@dataclass(slots=True)
class ConversationStats:
    """Sums over all answers, including those dropped later. Times in seconds."""

    num_counted: int = 0  # answers whose number of tokens is known, and their tokens
    num_tokens: int = 0
    num_later_tokens: int = 0  # after the first ones, with the time that they took
    later_s: float = 0.0
    num_first: int = 0  # answers with a first token, and their times to it
    ttft_s: float = 0.0
    num_prompt_tokens: int = 0  # of answers for which the number of cached ones is known
    num_cached_tokens: int = 0

    def add(self, answer: ReplyRecord) -> None:
        if answer.num_tokens is not None:
            self.num_counted += 1
            self.num_tokens += answer.num_tokens
        if answer.ttft_s is not None:
            self.num_first += 1
            self.ttft_s += answer.ttft_s
        if answer.later is not None:
            num_tokens, seconds = answer.later
            self.num_later_tokens += num_tokens
            self.later_s += seconds
        if answer.num_prompt_tokens is not None and answer.num_cached_tokens is not None:
            self.num_prompt_tokens += answer.num_prompt_tokens
            self.num_cached_tokens += answer.num_cached_tokens

    def rows(self) -> list[tuple[str, str]]:
        """Names and values of the statistics that are known."""
        rows = []
        if self.num_tokens:
            tokens = count(self.num_tokens, "token")
            rows.append(("generated", f"{tokens} in {count(self.num_counted, 'answer')}"))
        if self.num_first:
            rows.append(("mean TTFT", f"{1000 * self.ttft_s / self.num_first:.0f} ms"))
        if self.later_s:
            rows.append(("mean speed", f"{self.num_later_tokens / self.later_s:.1f} tok/s"))
        if self.num_prompt_tokens:
            share = self.num_cached_tokens / self.num_prompt_tokens
            tokens = f"{self.num_cached_tokens:,} of {count(self.num_prompt_tokens, 'token')}"
            rows.append(("prompts cached", f"{tokens} ({share:.0%})"))
        return rows
