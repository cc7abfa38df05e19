"""The bodies of answers as types: what /openapi.json says of them, and tests hold them to."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

EndReason: TypeAlias = Literal["stop", "length"]


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None  # the field of the request that is at fault, as a dotted path
    code: str | None


class Error(Struct):
    """Every answer that is not a success, and the event that ends a stream that failed."""

    error: ErrorDetails


class PromptTokensDetails(Struct):
    cached_tokens: int  # found in the prefix cache


class CompletionTokensDetails(Struct):
    reasoning_tokens: int  # reported apart from the answer: none are


class Usage(Struct):
    """A prompt counts once, however many choices it has. In a chunk: that choice's, so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptToken(Struct):
    logprob: float
    rank: int | None  # 1 for the likeliest; null for a token of the prompt that is not in the top
    decoded_token: str


# Of each token of the prompt but the first: it and the likeliest at its place, by token id.
PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]


# -- chat -----------------------------------------------------------------------------------------


class RankedToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Struct):
    """Of exactly the tokens that the content is made of, their part in it."""

    content: list[ScoredToken]
    refusal: None


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatAnswerChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """An event of a stream. The last one before [DONE] has the usage, if that was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first of each choice


# -- completions ----------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """Of every token. Those that are no text of their own are called by their bytes or their id."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where each begins in the text, in characters


class CompletionAnswerChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionAnswerChoice]
    usage: Usage


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first of each choice
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Struct):
    """An event of a stream. The last one before [DONE] has the usage, if that was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# -- the others -----------------------------------------------------------------------------------


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(Struct):
    prompt: str


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int  # token ids are below it


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Health(Struct):
    status: Literal["ready"]


class Version(Struct):
    version: str
