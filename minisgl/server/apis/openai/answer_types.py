"""The bodies of answers as types: answers are built from them, and /openapi.json describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, defstruct

from minisgl.server.answers.content_scores import ScoredToken
from minisgl.server.answers.reply import EndReason
from minisgl.text.tokenizer import DESCRIBED

ChatEndReason: TypeAlias = EndReason | Literal["tool_calls"]


class PromptTokensDetails(Struct, omit_defaults=True):
    cached_tokens: int  # found in the prefix cache, in any tier
    host_cached_tokens: int = 0  # of these, loaded from host memory; left out if there are none
    disk_cached_tokens: int = 0  # of the cached tokens, those read from disk; left out likewise


class CompletionTokensDetails(Struct):
    reasoning_tokens: int  # of blocks that are set apart from the content, with their markers
    # With speculation: guesses of tokens that are in the answer, and those that are not; left out
    # if none were verified.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Token counts. A prompt counts once, however many choices it has. In a chunk: those so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptToken(Struct):
    logprob: float
    rank: int  # 1 for the likeliest of all tokens
    decoded_token: str


# For each prompt token (null for the first): it and the likeliest at its position, by token id.
PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]


# -- chat -----------------------------------------------------------------------------------------


class ChatLogprobs(Struct):
    """The logprobs of exactly the tokens that the content consists of."""

    content: list[ScoredToken]
    refusal: None


class NamedArguments(Struct):
    name: str
    arguments: str  # as the model wrote them: JSON, if the answer was not cut


class FunctionCall(Struct, tag_field="type", tag="function"):
    id: str
    function: NamedArguments


class CustomCallInput(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class CustomCall(Struct, tag_field="type", tag="custom"):
    id: str
    custom: CustomCallInput


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None  # null: calls are all there is
    refusal: None
    tool_calls: list[FunctionCall | CustomCall] | UnsetType = UNSET
    # Where the model's reasoning is set apart; null: there is none in this answer.
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


MatchedStop: TypeAlias = int | str | UnsetType  # the token or the text that ended the answer


# Of the weights that have sampled the tokens, each with its first token; see OutputDelta.
VersionsOfWeights: TypeAlias = Sequence[tuple[int, str]] | UnsetType


class ChatAnswerChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndReason
    matched_stop: MatchedStop = UNSET
    token_ids: list[int] | UnsetType = UNSET
    routed_experts: bytes | UnsetType = UNSET  # as base64; see OutputDelta
    weight_versions: VersionsOfWeights = UNSET


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET  # of version, model and setup


class FunctionDelta(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET  # in the first chunk of a call
    arguments: str | UnsetType = UNSET


class CallDelta(Struct, omit_defaults=True):
    index: int  # counts the calls of the choice
    id: str | UnsetType = UNSET  # with the type in the first chunk of a call
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomCallInput | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndReason | None
    matched_stop: MatchedStop = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: VersionsOfWeights = UNSET  # in the last chunk of each choice


class ChatCompletionChunk(Struct, tag_field="object", tag="chat.completion.chunk"):
    """An event of a stream. The last one before [DONE] has the usage, if requested."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of each choice
    system_fingerprint: str | UnsetType = UNSET


# -- completions ----------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """The logprobs of every token. Tokens without a text of their own are named by bytes or id."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # position of each token in the text, in characters


class CompletionAnswerChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    matched_stop: MatchedStop = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    routed_experts: bytes | UnsetType = UNSET  # as base64; see OutputDelta
    weight_versions: VersionsOfWeights = UNSET


class Completion(Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    choices: list[CompletionAnswerChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of each choice
    matched_stop: MatchedStop = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: VersionsOfWeights = UNSET  # in the last chunk of each choice


class CompletionChunk(Struct, tag_field="object", tag="text_completion"):
    """An event of a stream. The last one before [DONE] has the usage, if requested."""

    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


# -- the others -----------------------------------------------------------------------------------


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(Struct):
    prompt: str


TokenizerInfo = defstruct(
    "TokenizerInfo",
    [
        ("tokenizer_class", str),
        ("chat_template", str | dict[str, str] | None),
        *((name, Any, UNSET) for name in sorted(DESCRIBED)),
    ],
)


class Model(Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int  # token ids are less than this
    task: str  # what it was loaded for: generate, embed or rerank
    input_modalities: list[str]  # what messages may have: text, and image
    root: str  # the model itself, by its first name
    parent: str | None = None  # of an adapter: the model that it adapts


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]


class Health(Struct):
    status: Literal["ready"]


class Version(Struct):
    version: str
