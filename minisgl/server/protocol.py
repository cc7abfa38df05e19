"""The bodies of requests: their types are what is honoured, anything else is refused by name.

A field declared as `None` is known and not supported: null passes, a value gets a 400. A field
that is not declared at all is ignored, unless the server runs with --strict-fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from reprlib import repr as short_repr
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.request import (
    EVERYONE,
    MAX_INTEGER,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Tenant,
)
from minisgl.server.served_engine import SamplingDefaults
from minisgl.server.validation_errors import GOT_FLOAT, NOT_SUPPORTED, field_error

MAX_N = 128
MAX_CHOICES = 1024  # of one request: prompts times n
MAX_SCORES = 1 << 19  # logprobs in an answer: of each token, and of its alternatives
MAX_STOP_CHARS = 256  # of one stop string; each choice makes a matcher of its own
# What a chat template is given: rendering takes its time from the event loop.
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of all messages together
MAX_TEMPLATE_OPTIONS = 256
MAX_ID_DIGITS = len(str(MAX_INTEGER))
SCORES_LIMIT = f"an answer holds at most {MAX_SCORES} logprobs, alternatives included"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

Body = TypeVar("Body", bound=Struct)
Unsupported: TypeAlias = None
Ignored: TypeAlias = Any
Detail: TypeAlias = Any  # of a sampler: see SAMPLER_DETAILS
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumKept = Annotated[int, Meta(ge=-1, le=MAX_INTEGER, extra_json_schema={"not": {"const": 0}})]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# What a template knows besides its own options: a field of the request says it, or nobody.
TEMPLATE_FIELDS = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
TemplateOptions = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_OPTIONS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _range(low: float, high: float) -> Meta:
    """For the description only: SamplingParams checks it, in words for people."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


Share = Annotated[float, _range(0, 1)]
Penalty = Annotated[float, _range(-2, 2)]
# Known and honoured where it says no, which some clients do in every request.
Off = Annotated[bool, Meta(extra_json_schema={"const": False})]
OffAt0 = Annotated[float, Meta(ge=0, le=0)]
OffAt1 = Annotated[float, Meta(ge=1, le=1)]
# What these say of a sampler means nothing where the client turns it off, and is refused else.
SAMPLER_DETAILS = {
    "mirostat": ("mirostat_tau", "mirostat_eta"),
    "xtc_probability": ("xtc_threshold",),
    "dry_multiplier": (
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ),
}
# By token id. JSON's keys are texts, and stay so until they are known to be few: anybody can make
# integers that collide in a hash table.
LogitBias = Annotated[
    dict[str, Any],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        extra_json_schema={
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    ),
]


class TextFormat(Struct):
    type: Literal["text"]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; none is sent


class GenerationRequest(Struct, kw_only=True):
    """What the two endpoints have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, _range(0, 2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, _range(-1, MAX_INTEGER)] | None = None
    min_p: Share | None = None
    min_tokens: Annotated[int, _range(0, MAX_INTEGER)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, _range(-(2**63), 2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, _range(1e-6, 1e6)] | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    truncate_prompt_tokens: NumKept | None = None  # -1: as many as leave room for the answer
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None

    response_format: TextFormat | None = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    grammar: Unsupported = None
    structural_tag: Unsupported = None
    json_schema: Unsupported = None
    stop_regex: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: Unsupported = None
    length_penalty: Unsupported = None
    logprob_token_ids: Unsupported = None
    thinking_token_budget: Unsupported = None
    prompt_embeds: Unsupported = None
    input_ids: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
    use_beam_search: Off | None = None
    return_tokens_as_token_ids: Off | None = None
    repeat_penalty: OffAt1 | None = None
    typical_p: OffAt1 | None = None
    mirostat: OffAt0 | None = None
    mirostat_tau: Detail = None
    mirostat_eta: Detail = None
    xtc_probability: OffAt0 | None = None
    xtc_threshold: Detail = None
    dry_multiplier: OffAt0 | None = None
    dry_base: Detail = None
    dry_allowed_length: Detail = None
    dry_penalty_last_n: Detail = None
    dry_sequence_breakers: Detail = None

    user: Any = None  # tells the users of a client apart, where it is a text
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only allowed with stream: true.")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens", "must be -1 or at least 1.")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "is not allowed with stream: true.")
        _check_off(
            use_beam_search=self.use_beam_search,
            return_tokens_as_token_ids=self.return_tokens_as_token_ids,
        )
        for sampler, details in SAMPLER_DETAILS.items():
            if getattr(self, sampler) is None:
                for name in details:
                    if getattr(self, name) is not None:
                        raise InvalidRequestError(name, f"{NOT_SUPPORTED}.")

    def tenant(self, client: str) -> Tenant:
        """Whom the request is from, given the client; it alone says which of its users asks."""
        if not client:
            return EVERYONE
        user = self.user if isinstance(self.user, str) else ""
        # Clients choose what they call their users, so the queue keeps a short form.
        return Tenant(client, user and hashlib.blake2b(user.encode(), digest_size=8).hexdigest())

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def sampling_fields(self) -> dict[str, Any]:
        """What the request says about sampling, by the names of SamplingParams."""
        given = {name: getattr(self, name) for name in SHARED_FIELDS}
        given["logit_bias"] = _by_token_id(self.logit_bias or {}) or None
        given["include_stop"] = self.include_stop_str_in_output
        return {name: value for name, value in given.items() if value is not None}


# What a request and SamplingParams call by the same name means the same.
SHARED_FIELDS = tuple(
    spec.name for spec in fields(SamplingParams) if spec.name in GenerationRequest.__struct_fields__
)


def _check_off(**values: bool | None) -> None:
    for name, value in values.items():
        if value:
            raise InvalidRequestError(name, f"{NOT_SUPPORTED}.")


def _by_token_id(bias: dict[str, Any]) -> dict[int, Any]:
    """SamplingParams checks the values."""
    for key in bias:
        # In one spelling alone, so that no token has two.
        if not key.isdecimal() or str(int(key[:MAX_ID_DIGITS])) != key:
            raise InvalidRequestError(
                "logit_bias", f"each key must be a token id, which {short_repr(key)} is not."
            )
    return {int(key): value for key, value in bias.items()}


REFUSAL_IS_ANSWER = "a refusal is only allowed in a message of the assistant."


class ContentPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", rename={"text": "refusal"}):
    """What an assistant who refused has said, in a list of parts."""

    text: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart | RefusalPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: str | None = None  # what an assistant said instead of its content

    def for_template(self, path: str) -> dict[str, Any]:
        named = {} if self.name is None else {"name": self.name}
        if self.role != "assistant":
            self._check_said(path)
        return {"role": self.role, "content": self._text(), **named}

    @property
    def num_parts(self) -> int:
        return len(self.content) if isinstance(self.content, list) else 0

    def _text(self) -> str:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return text + (self.refusal or "")

    def _check_said(self, path: str) -> None:
        """Only an assistant may refuse, or say nothing at all."""
        if self.refusal is not None:
            raise InvalidRequestError(f"{path}.refusal", REFUSAL_IS_ANSWER)
        if self.content is None:
            raise InvalidRequestError(
                f"{path}.content", "must be a text or at least one text part."
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if isinstance(part, RefusalPart):
                    raise InvalidRequestError(f"{path}.content.{index}.type", REFUSAL_IS_ANSWER)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if sum(message.num_parts for message in messages) > MAX_PARTS:
        raise InvalidRequestError(
            "messages", f"must have at most {MAX_PARTS} content parts in all."
        )
    return [message.for_template(f"messages.{index}") for index, message in enumerate(messages)]


def _template_options(chosen: dict[str, Any] | None, **fields: object) -> dict[str, Any]:
    """What goes to the chat template besides the messages: null says nothing."""
    chosen = chosen or {}
    for name in chosen.keys() & TEMPLATE_FIELDS:
        raise InvalidRequestError("chat_template_kwargs", f"{name} cannot be set.")
    return {name: value for name, value in fields.items() if value is not None} | chosen


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: PositiveCount | None = None
    max_tokens: PositiveCount | None = None  # its older name
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    tools: Unsupported = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Ignored = None  # limits the calls that there may be, and there are none
    functions: Unsupported = None
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    verbosity: Unsupported = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "is only allowed with logprobs: true.")

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The name by which the client limits its answer."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    def template_messages(self) -> list[dict[str, Any]]:
        return _template_messages(self.messages)

    @property
    def echoed(self) -> str | None:
        """What the answer begins with: the last message, where the answer is by the same role."""
        *_, last = self.template_messages()
        same_role = last["role"] == "assistant" or self.add_generation_prompt is False
        if self.echo and (same_role or self.continue_final_message):
            return str(last["content"])
        return None

    def template_options(self) -> dict[str, Any]:
        return _template_options(
            self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message or None,
        )

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        return defaults.sampling(
            **self.sampling_fields(),
            max_tokens=self.asked_max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]  # of one kind
    max_tokens: Count | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens", "0 is only allowed with echo: true.")
        if self.best_of not in (None, 1, self.num_choices):
            raise InvalidRequestError("best_of", "is not supported beyond n.")

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    def prompts(self) -> Sequence[str | list[int]]:
        """One or more texts or lists of token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = {*map(type, given)}
        if kinds == {int}:
            return [cast("list[int]", given)]
        if len(given) * self.num_choices > MAX_CHOICES:
            raise InvalidRequestError("prompt", f"with n, at most {MAX_CHOICES} choices are made.")
        if kinds not in ({str}, {list}):
            raise InvalidRequestError(
                "prompt", "must be a text, a list of texts, or one or more lists of token ids."
            )
        return cast("list[str] | list[list[int]]", given)

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # A request for no tokens has to ask for something: the scores of the prompt.
        scored = self.echo and (self.logprobs is not None or max_tokens == 0)
        wanted = [self.prompt_logprobs, (self.logprobs or 0) if scored else None]
        given = self.sampling_fields() | {
            "max_tokens": max_tokens,
            "logprobs": self.logprobs,
            "prompt_logprobs": max((count for count in wanted if count is not None), default=None),
        }
        return defaults.sampling(**given)


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: of a text, or of a conversation under the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    tools: Unsupported = None
    chat_template: Unsupported = None

    def __post_init__(self) -> None:
        if self.prompt is None and self.messages is None:
            raise InvalidRequestError("prompt", "is missing; allowed: prompt or messages.")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequestError("messages", "is not allowed together with prompt.")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens", "is not allowed with messages; their template adds its own."
            )

    def template_messages(self) -> list[dict[str, Any]]:
        return _template_messages(self.messages or ())

    def template_options(self) -> dict[str, Any]:
        return _template_options(
            self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message or None,
        )


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Count]


class StrictChatRequest(ChatRequest, forbid_unknown_fields=True):
    """With --strict-fields."""


class StrictCompletionRequest(CompletionRequest, forbid_unknown_fields=True):
    """With --strict-fields."""


class StrictTokenizeRequest(TokenizeRequest, forbid_unknown_fields=True):
    """With --strict-fields."""


class StrictDetokenizeRequest(DetokenizeRequest, forbid_unknown_fields=True):
    """With --strict-fields."""


def for_choice(params: SamplingParams, k: int) -> SamplingParams:
    """Parameters of choice k of n. Choice 0 keeps the seed, so that n = 1 is the first of n = 2."""
    if params.seed is None or k == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed} {k}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, signed=True))


def scored_room(params: SamplingParams, num_prompt_tokens: int, num_choices: int) -> int:
    """How many tokens a choice may have, so that the answer holds at most MAX_SCORES logprobs.

    `num_prompt_tokens` are those of all choices. Raises InvalidRequestError if they are too many.
    """
    room = MAX_SCORES
    if params.prompt_logprobs is not None:
        room -= num_prompt_tokens * (1 + params.prompt_logprobs)
        if room < 0:
            raise InvalidRequestError(
                "logprobs",
                f"{SCORES_LIMIT}, and those of the prompts alone would be {MAX_SCORES - room}; "
                "send fewer prompts at once or ask for fewer logprobs.",
            )
    return MAX_INTEGER if params.logprobs is None else room // (num_choices * (1 + params.logprobs))


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """`params` with max_tokens shortened to `room`. Without room they are left as they are."""
    if params.max_tokens is None or params.max_tokens <= room or room < 1:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def truncated(prompt: list[int], num_kept: int | None, most: int) -> list[int]:
    """The last `num_kept` tokens of a prompt, for -1 the last `most`, or one at least."""
    if num_kept is None:
        return prompt
    return prompt[-(max(most, 1) if num_kept == -1 else num_kept) :]


def decode(body: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequestError with the dotted path of the field, or CallerError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _decode_again(body, kind, str(error))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _decode_again(body: bytes, kind: type[Body], complaint: str) -> Body:
    """Look at all of a body, of which the decoder names the first thing that it dislikes.

    A field that is not supported explains more than what comes with it, as `tools` with
    `tool_choice`; and 5.0 is an integer to JSON Schema.
    """
    refusal = field_error(complaint, kind)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for field in msgspec.structs.fields(kind):
            if field.type is NoneType and bytes(fields.get(field.name, b"null")) != b"null":
                raise InvalidRequestError(field.name, f"{NOT_SUPPORTED}.")
        if GOT_FLOAT not in complaint:
            raise refusal
        values = {name: _with_integers(msgspec.json.decode(raw)) for name, raw in fields.items()}
    except msgspec.ValidationError:  # no object, or a number beyond all bounds
        raise refusal from None
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None


def _with_integers(value: object) -> object:
    """With whole numbers as integers, in lists too. No object has a field for an integer."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return [*map(_with_integers, value)] if isinstance(value, list) else value


def _not_json(error: Exception) -> CallerError:
    return CallerError(f"The body is not valid JSON: {error}")
