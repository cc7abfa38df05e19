"""The bodies of requests: their types are what is honoured, anything else is refused by name.

A field declared as `None` is known and not supported: null passes, a value gets a 400. A field
that is not declared at all is ignored, unless the server runs with --strict-fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.request import (
    EVERYONE,
    MAX_INTEGER,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Tenant,
)
from minisgl.server.service import Defaults
from minisgl.server.wording import NOT_SUPPORTED, field_error

MAX_N = 128
MAX_CHOICES = 1024  # of one request: prompts times n
MAX_STOP_CHARS = 256  # of one stop string; each choice makes a matcher of its own
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

Body = TypeVar("Body", bound=Struct)
Unsupported: TypeAlias = None
Ignored: TypeAlias = Any
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumKept = Annotated[int, Meta(ge=-1, le=MAX_INTEGER, extra_json_schema={"not": {"const": 0}})]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# What a template knows besides its own options: a field of the request says it, or nobody.
TEMPLATE_FIELDS = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _range(low: float, high: float) -> Meta:
    """For the description only: SamplingParams checks it, in words for people."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


Share = Annotated[float, _range(0, 1)]
Penalty = Annotated[float, _range(-2, 2)]
# Known and honoured where it says no, which some clients do in every request.
Off = Annotated[bool, Meta(extra_json_schema={"const": False})]


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
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, _range(-(2**63), 2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, _range(1e-6, 1e6)] | None = None
    logit_bias: dict[int, Annotated[float, _range(-100, 100)]] | None = None
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
    json_schema: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: Unsupported = None
    length_penalty: Unsupported = None
    use_beam_search: Off | None = None

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
        _check_off(use_beam_search=self.use_beam_search)

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
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_fields(self) -> dict[str, Any]:
        """What the request says about sampling, by the names of SamplingParams."""
        given = {name: getattr(self, name) for name in SHARED_FIELDS}
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


class ContentPart(Struct):
    type: Literal["text"]
    text: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: Unsupported = None

    def for_template(self, path: str) -> dict[str, Any]:
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self._text(f"{path}.content"), **named}

    def _text(self, path: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None and self.role != "assistant":
            raise InvalidRequestError(path, "must be a text or at least one text part.")
        return "".join(part.text for part in self.content or ())


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template(f"messages.{index}") for index, message in enumerate(messages)]


def _template_options(chosen: dict[str, Any] | None, **fields: object) -> dict[str, Any]:
    """What goes to the chat template besides the messages: null says nothing."""
    chosen = chosen or {}
    for name in chosen.keys() & TEMPLATE_FIELDS:
        raise InvalidRequestError("chat_template_kwargs", f"{name} cannot be set.")
    return {name: value for name, value in fields.items() if value is not None} | chosen


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveCount | None = None
    max_tokens: PositiveCount | None = None  # its older name
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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

    def sampling(self, defaults: Defaults) -> SamplingParams:
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

    def sampling(self, defaults: Defaults) -> SamplingParams:
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
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
        raise field_error(str(error), kind) from None
    except (ValueError, RecursionError) as error:
        raise CallerError(f"The body is not valid JSON: {error}") from None
