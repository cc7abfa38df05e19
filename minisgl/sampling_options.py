"""The keywords of `LLM.generate`, `chat` and `stream`, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from minisgl.request import StructuredOutput


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    top_n_sigma: float
    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    include_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int]
    return_routed_experts: bool
    skip_special_tokens: bool
    structured: StructuredOutput | None


class ChatOptions(SamplingOptions, total=False):
    """Beside them, variables that many chat templates have, and how a conversation is rendered."""

    enable_thinking: bool
    thinking: bool
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool
    control_tokens_in_text: bool
