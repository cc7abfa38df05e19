"""The bodies of requests as types: supported fields, and unsupported ones, rejected by name.

A field of type `None` (Unsupported) is known and not supported: null passes, a value gets a 400.
A field that is not declared is ignored, unless the server runs with --strict-fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError
from minisgl.models.generation import GenerationDefaults
from minisgl.parameters import Parameter
from minisgl.request import (
    EVERYONE,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_INTEGER,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    PARAMETERS,
    SamplingParams,
    Tenant,
)
from minisgl.server.http.deadlines import Seconds
from minisgl.server.http.validation_errors import NOT_SUPPORTED
from minisgl.server.requests.chat_messages import (
    Effort,
    Images,
    Messages,
    Reasoning,
    TemplateOptions,
)
from minisgl.server.requests.constraint_types import ResponseFormat, Schema, StructuredFields
from minisgl.server.requests.described import (
    NOT_GIVEN,
    Ignored,
    Unsupported,
    only,
    takes,
    unsupported,
)
from minisgl.server.requests.tools import OfferedTools, ToolChoice

MAX_N = 128
MAX_CHOICES = 1024  # of one request: prompts times n
MAX_STOP_CHARS = 256  # of one stop string; each choice makes a matcher of its own
MAX_ID_DIGITS = len(str(MAX_INTEGER))
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

# Values that are not decoded: a client could send many numbers that take long to read.
# Of a sampler: see SAMPLER_DETAILS.
Detail = Annotated[Raw, Meta(description="Without effect: its sampler must be off.")]
NULL = Raw(b"null")
# Bounded because reading integers of thousands of digits takes long; the engine checks the rest.
TokenId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Scalar: Any = TokenId | float | str | bool | None
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NUM_LOGPROBS = ("logprobs", "prompt_logprobs", "top_logprobs")  # fields that may have it
NumKept = Annotated[int, Meta(ge=-1, le=MAX_INTEGER, extra_json_schema={"not": {"const": 0}})]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)]
NamedIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROBS)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]


def _bounds(parameter: Parameter) -> Meta:
    """Bounds for the OpenAPI description only: SamplingParams checks them, with better messages."""
    return Meta(extra_json_schema={"minimum": parameter.low, "maximum": parameter.high})


# Accepted at the value that turns the feature off, which some clients send in every request.
Off = Annotated[Annotated[bool, Meta(extra_json_schema={"const": False})] | None, only(False)]
OffAt0 = Annotated[Annotated[float, Meta(ge=0, le=0)] | None, only(0)]
OffAt1 = Annotated[Annotated[float, Meta(ge=1, le=1)] | None, only(1)]
# Parameters of a sampler: ignored if the request turns that sampler off, and rejected otherwise.
SAMPLER_DETAILS = {
    "mirostat": ("mirostat_tau", "mirostat_eta"),
    "xtc_probability": ("xtc_threshold",),
    "dry_multiplier": (
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ),
}
# By token id. Keys stay texts until their number is known to be small: a client could send many
# integers that collide in a hash table.
Bias = Annotated[Raw, Meta(extra_json_schema={"type": "number", "minimum": -100, "maximum": 100})]
LogitBias = Annotated[
    dict[str, Bias],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
    ),
]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; never sent


class ClientFields(Struct, kw_only=True):
    """The fields that say whose request it is, and how long it may take."""

    timeout: Seconds | None = None
    """How many seconds the answer may take, from the arrival of the request. Default: no limit.
    Example: `30`"""

    cache_salt: Salt | None = None
    """Share cached prefixes only with requests of this salt. Default: none. Example: `"mine"`"""
    extra_key: Salt | None = None
    """Divides the cache as cache_salt does. Default: none. Example: `"mine"`"""
    user: Raw = NOT_GIVEN
    """The user of a client: takes turns with others of that client. Default: none. Example:
    `"ada"`"""

    @property
    def salt(self) -> str | None:
        """What divides the prefix cache: cache_salt, extra_key, or the pair of them."""
        if self.cache_salt is None or self.extra_key is None:
            return self.cache_salt or self.extra_key
        return hashlib.blake2b(repr((self.cache_salt, self.extra_key)).encode()).hexdigest()

    def tenant(self, client: str) -> Tenant:
        """The tenant of a request of `client`: the client, and the user that the request names."""
        if not client:
            return EVERYONE
        try:
            user = msgspec.json.decode(self.user or NULL, type=str)
        except ValueError:
            user = ""
        # User names may be long, so the queue keeps a digest.
        return Tenant(client, user and hashlib.blake2b(user.encode(), digest_size=8).hexdigest())


# Parameters that are fields of another form in each API, or stand elsewhere.
NOT_COMMON = ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
# Constraints by the names of older servers, and what to send for them.
REPLACED = {
    "guided_json": "structured_outputs.json",
    "guided_json_object": "structured_outputs.json_object",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "structured_outputs, for which there is one backend,",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
}
if TYPE_CHECKING:
    ParameterFields = ClientFields
else:
    ParameterFields = msgspec.defstruct(
        "ParameterFields",
        [
            (name, Annotated[parameter.kind, _bounds(parameter)] | None, None)
            for name, parameter in PARAMETERS.items()
            if name not in NOT_COMMON
        ]
        + [
            (name, Annotated[None, unsupported(f"send {other} instead")], None)
            for name, other in REPLACED.items()
        ],
        bases=(ClientFields,),
        kw_only=True,
    )


@takes(Unsupported, "stop_regex", "length_penalty", "prompt_embeds", "input_ids")
@takes(OffAt1, "repeat_penalty", "typical_p")
@takes(OffAt0, *SAMPLER_DETAILS)
@takes(Detail, *chain.from_iterable(SAMPLER_DETAILS.values()))
class CommonFields(ParameterFields, kw_only=True):
    """The fields that the requests of all APIs have in common."""

    min_tokens: Annotated[int, _bounds(PARAMETERS["min_tokens"])] | None = None
    """How many tokens must come before an answer may end. Default: 0. Example: `5`"""
    stop: StopText | StopStrings | None = None
    """Texts that end the answer where they appear. Default: none. Example: `["END"]`"""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    """Tokens that end the answer. Default: none. Example: `[2]`"""
    include_stop_str_in_output: bool | None = None
    """Keep the text that ended the answer. Default: false. Example: `true`"""
    ignore_eos: bool | None = None
    """Go on behind the model's own end of the answer. Default: false. Example: `true`"""
    logit_bias: LogitBias | None = None
    """Added to the logits of tokens, by token id. Default: none. Example: `{"11": -5}`"""
    allowed_token_ids: AllowedIds | None = None
    """The only tokens that the answer may have. Default: all. Example: `[11, 12, 13]`"""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that the answer must not have. Default: none. Example: `["certainly"]`"""
    skip_special_tokens: bool | None = None
    """false: show control tokens in the answer. Default: true. Example: `false`"""
    structured_outputs: StructuredFields | None = None
    """One constraint, by its kind. Default: none. Example: `{"choice": ["yes", "no"]}`"""
    json_schema: Schema = NOT_GIVEN
    """Holds the answer to JSON of this schema. Default: none. Example: `{"type": "object",
    "properties": {"city": {"type": "string"}}}`"""
    structural_tag: Schema = NOT_GIVEN
    """Free text in which each trigger begins a tag whose content has a schema. Default: none.
    Example: `{"structures": [{"begin": "<city>", "schema": {"type": "object", "properties":
    {"city": {"type": "string"}}}, "end": "</city>"}], "triggers": ["<city>"]}`"""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens of logprobs by their ids. Default: false. Example: `true`"""
    use_beam_search: Off = None

    def __post_init__(self) -> None:
        check_off(use_beam_search=self.use_beam_search)
        for sampler, details in SAMPLER_DETAILS.items():
            if getattr(self, sampler) is None:
                for name in details:
                    if getattr(self, name) not in (None, NULL):
                        raise InvalidRequestError(name, f"{NOT_SUPPORTED}.")

    def common_fields(self) -> dict[str, Any]:
        """These fields alone, for another request."""
        return {name: getattr(self, name) for name in CommonFields.__struct_fields__}


@takes(Unsupported, "moderation", "prompt_cache_options")
@takes(Ignored, "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
@takes(Ignored, "prompt_cache_retention")
class GenerationRequest(CommonFields, kw_only=True):
    """The fields that chats and completions have in common."""

    model: str | None = None
    """A name of the model, or of an adapter. Default: the model that is served."""
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    """How many answers to give to each prompt. Default: 1. Example: `2`"""
    stream: bool | None = None
    """Send the answer as events while it is generated. Default: false. Example: `true`"""
    stream_options: StreamOptions | None = None
    """Whether a stream tells its usage; only with stream. Default: none. Example:
    `{"include_usage": true}`"""

    truncate_prompt_tokens: NumKept | None = None
    """Keep only the last tokens of the prompt; -1: as many as leave room. Default: all. Example:
    `1000`"""
    prompt_logprobs: NumLogprobs | None = None
    """Add the logprobs of the prompt, with so many alternatives. Default: none. Example: `1`"""
    logprob_token_ids: NamedIds | None = None
    """Add the logprobs of these tokens to those of each token of the answer. Default: none.
    Example: `[11, 12]`"""
    return_token_ids: bool | None = None
    """Add the token ids of prompt and answer. Default: false. Example: `true`"""
    return_routed_experts: bool | None = None
    """Add the experts that each token takes, as base64. Default: false. Example: `true`"""

    response_format: ResponseFormat | None = None
    """Holds the answer to JSON, or to JSON of a schema. Default: free text. Example: `{"type":
    "json_object"}`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only allowed with stream: true.")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens", "must be -1 or at least 1.")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "is not allowed with stream: true.")
        if self.return_routed_experts and self.stream:
            raise InvalidRequestError("return_routed_experts", "is not allowed with stream: true.")

    @property
    def num_choices(self) -> int:
        """The number of choices for each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk reports the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk reports the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields that the request sets, by their names in SamplingParams."""
        given = {name: getattr(self, name) for name in SHARED_FIELDS}
        given["logit_bias"] = _by_token_id(self.logit_bias or {}) or None
        given["include_stop"] = self.include_stop_str_in_output
        return {name: value for name, value in given.items() if value is not None}


# The fields that have the same name, and meaning, in a request and in SamplingParams.
SHARED_FIELDS = tuple(
    spec.name for spec in fields(SamplingParams) if spec.name in GenerationRequest.__struct_fields__
)


def check_off(**values: bool | None) -> None:
    """Raise InvalidRequestError for the first field that is on: it is not supported."""
    for name, value in values.items():
        if value:
            raise InvalidRequestError(name, f"{NOT_SUPPORTED}.")


def _by_token_id(bias: dict[str, Raw]) -> dict[int, Any]:
    """`bias` with integer keys; raises InvalidRequestError. SamplingParams checks the values."""
    for key in bias:
        # Only the canonical spelling, so that no token appears twice.
        if not key.isdecimal() or str(int(key[:MAX_ID_DIGITS])) != key:
            raise InvalidRequestError(
                "logit_bias", f"each key must be a token id, which {short_repr(key)} is not."
            )
    return {int(key): _bias(key, value) for key, value in bias.items()}


def _bias(key: str, value: Raw) -> object:
    try:
        return msgspec.json.decode(value, type=Scalar)
    except ValueError:
        raise InvalidRequestError(
            "logit_bias", f"the bias of token {key} must be a number from -100 to 100."
        ) from None


def separated(name: str, given: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The texts or lists of token ids of a field, which may be one; raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    kinds = {*map(type, given)}
    if kinds == {int}:
        return [cast("list[int]", given)]
    if kinds not in ({str}, {list}):
        raise InvalidRequestError(
            name, "must be a text, a list of texts, or one or more lists of token ids."
        )
    return cast("list[str] | list[list[int]]", given)


@takes(Unsupported, "chat_template", "documents", "functions", "audio", "prediction")
@takes(Unsupported, "web_search_options")
@takes(Ignored, "verbosity")
class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    scores_each_prompt: ClassVar[bool] = False  # all choices have one, which is reported once

    messages: Messages
    """The conversation, the oldest message first. Example: `[{"role": "user", "content":
    "Hello!"}]`"""
    max_completion_tokens: PositiveCount | None = None
    """The newer name of max_tokens. Default: as max_tokens. Example: `100`"""
    max_tokens: PositiveCount | None = None
    """How many tokens an answer may have. Default: the room that is left; 16 for /v1/completions.
    Example: `100`"""
    logprobs: bool | None = None
    """Add the logprobs of the answer. Default: false. Example: `true`"""
    top_logprobs: NumLogprobs | None = None
    """How many alternatives each token has; only with logprobs. Default: 0. Example: `5`"""

    reasoning_effort: Effort | None = None
    """How much the model thinks. Default: as the model does. Example: `"low"`"""
    reasoning: Reasoning | None = None
    """How much the model thinks. Default: as the model does. Example: `{"effort": "low"}`"""
    include_reasoning: bool | None = None
    """false: leave the reasoning out of the answer. Default: true. Example: `false`"""
    separate_reasoning: bool | None = None
    """false: leave the reasoning in the content. Default: true. Example: `false`"""
    stream_reasoning: Annotated[bool, Meta(extra_json_schema={"const": True})] | None = None
    """Only true: reasoning is streamed as it comes. Default: true. Example: `true`"""
    thinking_token_budget: Count | None = None
    """How many tokens the model may think. Default: no limit. Example: `200`"""
    add_generation_prompt: bool | None = None
    """Begin the assistant's message in the prompt. Default: true. Example: `true`"""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own special tokens around the prompt, besides those of the template.
    Default: false. Example: `true`"""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables of the chat template. Default: none. Example: `{"enable_thinking": false}`"""
    continue_final_message: bool | None = None
    """Go on with the last message, which stays open. Default: false. Example: `true`"""
    control_tokens_in_text: bool | None = None
    """Read control tokens that messages spell; otherwise they are text. Default: the option
    --control-tokens-in-text. Example: `false`"""
    images: Images | None = None
    """What becomes of images. Default: the option --images. Example: `"placeholder"`"""
    echo: bool | None = None
    """Begin the answer with the prompt. Default: false. Example: `true`"""

    tools: OfferedTools | None = None
    """What the model may call. Default: none. Example: `[{"type": "function", "function": {"name":
    "get_weather", "description": "The weather in a city.", "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}}}}}]`"""
    tool_choice: ToolChoice | None = None
    """Whether the model must call a tool, and which. Default: auto. Example: `"auto"`"""
    parallel_tool_calls: bool | None = None
    """false: at most one call. Default: true. Example: `false`"""
    function_call: Literal["none"] | None = None
    """Only "none": tools has replaced it. Default: none. Example: `"none"`"""
    modalities: list[Literal["text"]] | None = None
    """Only ["text"]. Default: ["text"]. Example: `["text"]`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "is only allowed with logprobs: true.")
        if self.logprob_token_ids and self.logprobs is False:
            raise InvalidRequestError("logprob_token_ids", "is not allowed with logprobs: false.")
        if self.stream_reasoning is False:
            raise InvalidRequestError("stream_reasoning", f"{NOT_SUPPORTED}.")

    @property
    def wants_reasoning(self) -> bool:
        """Whether the answer has the reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The name of the field that limits the answer."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def echoed(self) -> str | None:
        """The text that the answer begins with: the last message, if of the same role."""
        if not self.echo:
            return None
        last = self.messages[-1]
        same_role = last.role == "assistant" or self.add_generation_prompt is False
        return last.text if same_role or self.continue_final_message else None

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        return defaults.sampling(
            **self.sampling_fields(),
            max_tokens=self.asked_max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


@takes(Unsupported, "thinking_token_budget")
class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    scores_each_prompt: ClassVar[bool] = True
    limit_field: ClassVar[str] = "max_tokens"

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    """The text to continue, as text or as token ids. Example: `"Once upon a time"`"""
    max_tokens: Count | None = None
    logprobs: NumLogprobs | None = None
    """Add logprobs, with so many alternatives for each token. Default: none. Example: `5`"""
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Begin the prompt as the tokenizer does. Default: true. Example: `false`"""
    best_of: int | None = None
    """Only 1, or n. Default: n. Example: `1`"""
    suffix: Literal[""] | None = None
    """Only the empty text. Default: none. Example: `""`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens", "0 is only allowed with echo: true.")
        if self.best_of not in (None, 1, self.num_choices):
            raise InvalidRequestError("best_of", "is not supported beyond n.")

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each a text or a list of token ids; raises InvalidRequestError."""
        found = separated("prompt", self.prompt)
        if len(found) * self.num_choices > MAX_CHOICES:
            raise InvalidRequestError("prompt", f"with n, at most {MAX_CHOICES} choices are made.")
        return found

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # A request for no tokens must ask for something: the logprobs of the prompt.
        logprobs = 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs
        scored = self.echo and (logprobs is not None or max_tokens == 0)
        wanted = [self.prompt_logprobs, (logprobs or 0) if scored else None]
        given = self.sampling_fields() | {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": max((count for count in wanted if count is not None), default=None),
        }
        return defaults.sampling(**given)


@takes(Unsupported, "chat_template")
class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: tokenizes a text, or a conversation under the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    """The text to continue, as text or as token ids. Example: `"Once upon a time"`"""
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Begin the prompt as the tokenizer does. Default: true. Example: `false`"""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    """Add the text of each token. Default: false. Example: `true`"""
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    control_tokens_in_text: bool | None = None
    images: Images | None = None
    tools: OfferedTools | None = None
    tool_choice: ToolChoice | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and self.messages is None:
            raise InvalidRequestError("prompt", "is missing; allowed: prompt or messages.")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequestError("messages", "is not allowed together with prompt.")
        if self.prompt is not None and self.tools is not None:
            raise InvalidRequestError("tools", "is not allowed together with prompt.")


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Count]
    """Token ids. Example: `[1, 2, 3]`"""
