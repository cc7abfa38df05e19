"""The record of one answer while it arrives, and statistics over several."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minisgl.printable import counted
from minisgl.request import FinishReason
from minisgl.text.thinking import CLOSE, ThinkingSplitter

from .model import CallPiece, Message, ReplyDelta

END_OF_CALL = ")\n"
# Of a delta, those that hold from then on.
KEPT = (
    *("num_tokens", "num_prompt_tokens", "num_cached_tokens"),
    *("num_drafted_tokens", "num_accepted_tokens", "finish_reason"),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """What to show next, in this order."""

    thinking: str = ""
    text: str = ""
    calls: str = ""  # each on a line, as NAME(ARGUMENTS)


@dataclass(slots=True)
class ReplyRecord:
    """Collects deltas and their times, in seconds by time.perf_counter."""

    asked_at: float
    text: str = ""  # as generated, with its thinking unless that came separately
    thinking: str = ""  # that came separately
    calls: list[CallPiece] = field(default_factory=list)
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_drafted_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_first_tokens: int | None = None  # in the first delta that had any
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: FinishReason | None = None  # None at the end: the user stopped it
    _splitter: ThinkingSplitter = field(default_factory=ThinkingSplitter)

    def add(self, delta: ReplyDelta, now: float) -> Shown:
        """Adds a delta that arrived at `now`. Returns what to show."""
        has_more = delta.text or delta.thinking or delta.calls
        grows = has_more or (delta.num_tokens or 0) > (self.num_tokens or 0)
        if grows and self.finish_reason is None:  # servers send usage after the end
            if self.first_at is None:
                self.first_at, self.num_first_tokens = now, delta.num_tokens
            self.last_at = now
        for name in KEPT:
            if (value := getattr(delta, name)) is not None:
                setattr(self, name, value)
        self.text += delta.text
        self.thinking += delta.thinking
        split = self._splitter.feed(delta.text)
        calls = "".join(map(self._add_call, delta.calls))
        return Shown(delta.thinking + split.thinking, split.text, calls)

    def _add_call(self, piece: CallPiece) -> str:
        last = self.calls[-1] if self.calls else None
        # Some servers repeat the id and name of a call, and some count no calls.
        if last is None or piece.index != last.index or piece.id not in ("", last.id):
            shown = f"{END_OF_CALL if last else ''}{piece.name}("
            call_id = piece.id or f"call_{secrets.token_hex(12)}"
            self.calls.append(replace(piece, id=call_id))
        else:
            shown = ""
            self.calls[-1] = replace(last, arguments=last.arguments + piece.arguments)
        return shown + piece.arguments

    def flush(self) -> Shown:
        """Returns what remains to be shown at the end."""
        split = self._splitter.flush()
        return Shown(split.thinking, split.text, ")" if self.calls and not self.is_cut_call else "")

    @property
    def is_cut(self) -> bool:
        """Whether the answer reached the limit of its length before its end."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def is_cut_call(self) -> bool:
        """Whether the answer was ended before its calls were complete."""
        return bool(self.calls) and self.finish_reason is not FinishReason.STOP

    @property
    def call_message(self) -> Message:
        """The answer for the conversation, if it calls tools."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
        ]
        message: Message = {"role": "assistant", "content": self.text, "tool_calls": calls}
        # Between calls and results, templates show a model what it has thought.
        return {**message, "reasoning_content": self.thinking} if self.thinking else message

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
        if not self.is_cut or max_seq_len is None:
            return False
        return (self.num_context_tokens or 0) >= max_seq_len

    def summary(self) -> str:
        """One line with the number of tokens, the speed and the cached part of the prompt."""
        parts = []
        if self.num_tokens is not None:
            parts.append(counted(self.num_tokens, "token"))
        if self.ttft_s is not None:
            parts.append(f"TTFT {1000 * self.ttft_s:.0f} ms")
        if self.later is not None:
            num_tokens, seconds = self.later
            parts.append(f"{num_tokens / seconds:.1f} tok/s")
        if self.num_drafted_tokens:
            drafts = counted(self.num_drafted_tokens, "draft")
            parts.append(f"{self.num_accepted_tokens or 0:,} of {drafts} accepted")
        if self.num_prompt_tokens is not None and self.num_cached_tokens is not None:
            cached = f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,}"
            parts.append(f"{cached} prompt tokens cached")
        elif self.num_prompt_tokens is not None:
            parts.append(counted(self.num_prompt_tokens, "prompt token"))
        if self.finish_reason is None:
            parts.append("stopped")
        elif self.is_cut:
            parts.append("cut at the limit")
        return " · ".join(parts)


def stats_rows(answers: Sequence[ReplyRecord]) -> list[tuple[str, str]]:
    """Names and values of the statistics that are known."""
    rows = []
    counts = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
    if sum(counts):
        tokens = counted(sum(counts), "token")
        rows.append(("generated", f"{tokens} in {counted(len(counts), 'answer')}"))
    ttfts_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    if ttfts_s:
        rows.append(("mean TTFT", f"{1000 * sum(ttfts_s) / len(ttfts_s):.0f} ms"))
    later = [answer.later for answer in answers if answer.later is not None]
    if later_s := sum(seconds for _, seconds in later):
        rows.append(("mean speed", f"{sum(number for number, _ in later) / later_s:.1f} tok/s"))
    if num_drafted := sum(answer.num_drafted_tokens or 0 for answer in answers):
        num_accepted = sum(answer.num_accepted_tokens or 0 for answer in answers)
        share = f"{num_accepted / num_drafted:.0%}"
        rows.append(("drafts accepted", f"{num_accepted:,} of {num_drafted:,} ({share})"))
    prompts = [
        (answer.num_prompt_tokens, answer.num_cached_tokens)
        for answer in answers
        if answer.num_prompt_tokens is not None and answer.num_cached_tokens is not None
    ]
    if num_tokens := sum(number for number, _ in prompts):
        num_cached = sum(number for _, number in prompts)
        tokens = f"{num_cached:,} of {counted(num_tokens, 'token')}"
        rows.append(("prompts cached", f"{tokens} ({num_cached / num_tokens:.0%})"))
    return rows
