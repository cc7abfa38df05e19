"""The fields that are used of an event in a streamed answer of the OpenAI API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # with which one can reckon


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None
    host_cached_tokens: Count | None = None
    disk_cached_tokens: Count | None = None


class CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: Count | None = None
    rejected_prediction_tokens: Count | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def details(self) -> PromptDetails:
        return self.prompt_tokens_details or PromptDetails()

    @property
    def drafts(self) -> tuple[int, int]:
        """The guesses of tokens that were verified, and those that were accepted."""
        details = self.completion_tokens_details or CompletionDetails()
        num_accepted = details.accepted_prediction_tokens or 0
        return num_accepted + (details.rejected_prediction_tokens or 0), num_accepted


class CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class StreamedCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: CalledFunction | None = None


class StreamDelta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[StreamedCall] | None = None
    reasoning_content: str | None = None  # DeepSeek's name for it, and others'
    reasoning: str | None = None  # vLLM's and OpenRouter's

    @property
    def thinking(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class StreamChoice(msgspec.Struct):
    delta: StreamDelta | None = None  # of a chat
    text: str | None = None  # of a completion
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct):
    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: Any = None
