"""What a caller asks for and what comes back."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_repr

from minisgl.errors import InvalidRequestError
from minisgl.events import Event

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024  # entries, stop_token_ids included
# Tokens of a request that are biased or masked: logit_bias, stop_token_ids and the model's EOS set.
MAX_EDITS = MAX_LOGIT_BIAS + 64
MAX_INTEGER = 2**31 - 1  # what a device table holds
MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Raises InvalidRequestError, naming the field.

    The order of operations on a row of logits: logprobs are read from the raw float32 logits; then
    logit_bias, repetition, frequency and presence penalty, masking until min_tokens, temperature,
    min_p, top_k, top_p. A token is the Gumbel-max of what is left, or its argmax at temperature 0.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    max_tokens: int | None = None  # None: the room that the prompt leaves
    min_tokens: int = 0  # until then EOS and stop_token_ids are masked, stop strings not matched
    stop: Sequence[str] = ()
    include_stop: bool = False  # leave the matched stop string in the text
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: one is drawn at submission
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # 0: of the sampled token; n: of the n likeliest as well
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

        self._check_number("temperature", self.temperature, 0, 2)
        self._check_number("top_p", self.top_p, 0, 1)
        self._check_number("min_p", self.min_p, 0, 1)
        self._check_number("presence_penalty", self.presence_penalty, -2, 2)
        self._check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        # Wider than anyone needs, and still far from 0 and infinity in float32.
        self._check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        self._check_integer("top_k", self.top_k, -1, MAX_INTEGER)
        self._check_integer("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        if self.max_tokens is not None:
            self._check_integer("max_tokens", self.max_tokens, 0, MAX_INTEGER)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise InvalidRequestError(
                    "max_tokens", "must be at least 1 (0 is only allowed with prompt_logprobs)."
                )
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}."
                )
        if self.seed is not None:
            self._check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                self._check_integer(name, count, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings are allowed.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequestError("stop", "must be non-empty strings.")
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                "logit_bias", f"with stop_token_ids at most {MAX_LOGIT_BIAS} entries are allowed."
            )
        for index, token_id in enumerate(self.stop_token_ids):
            self._check_integer("stop_token_ids", token_id, 0, MAX_INTEGER, f"entry {index} ")
        for token_id, bias in self.logit_bias.items():
            self._check_integer("logit_bias", token_id, 0, MAX_INTEGER, "each key ")
            self._check_number("logit_bias", bias, -100, 100, f"the bias of token {token_id} ")

    @staticmethod
    def _check_number(name: str, value: object, low: float, high: float, what: str = "") -> None:
        """`what` of the field has this value, if not the field itself."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(name, f"{what}must be a number, not {short_repr(value)}.")
        if not low <= value <= high:  # NaN fails too
            raise InvalidRequestError(
                name, f"{what}must be from {low:g} to {high:g}, not {short_repr(value)}."
            )

    @staticmethod
    def _check_integer(name: str, value: object, low: int, high: int, what: str = "") -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(name, f"{what}must be an integer, not {short_repr(value)}.")
        if not low <= value <= high:
            raise InvalidRequestError(
                name, f"{what}must be from {low} to {high}, not {short_repr(value)}."
            )

    @property
    def greedy(self) -> bool:
        """Below 1e-5 a division by the temperature would only lose precision."""
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request is from, where callers are told apart. The names are opaque.

    Clients take turns in the queue and share no cached prefixes; the users of one client take turns
    within its turns.
    """

    client: str = ""
    user: str = ""


EVERYONE = Tenant()


def cache_namespace(tenant: Tenant, cache_salt: str | None) -> bytes:
    """Requests with the same namespace share cached prefixes. Raises InvalidRequestError."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError("cache_salt", "must be a text.")
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters.")
    if not tenant.client and cache_salt is None:
        return b""
    # A digest, so that what the cache keeps is short and does not show the salt.
    parts = repr((tenant.client, cache_salt)).encode()
    return hashlib.blake2b(parts, digest_size=16).digest()


def check_token_ids(
    name: str, token_ids: Collection[int], vocab_size: int, *, of: str = ""
) -> None:
    """Raise InvalidRequestError for field `name` with the first id outside of the vocabulary.

    Its position is counted within `of`, the field itself if not given.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return
    position, wrong = next(
        (position, token_id)
        for position, token_id in enumerate(token_ids)
        if not 0 <= token_id < vocab_size
    )
    raise InvalidRequestError(
        name,
        f"the token id {short_repr(wrong)} at position {position}{of} is outside of the "
        f"vocabulary; allowed: 0 to {vocab_size - 1}.",
    )


class RequestStatus(enum.Enum):
    """The only states of a request. RUNNING goes back to WAITING when it is retracted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """One sequence, from submission to its end. Made by the engine, changed by the scheduler only.

    `token_ids` are the tokens known on the host: the prompt and the settled output. What launched
    steps are still computing is the scheduler's business. The times are seconds of
    `time.monotonic`, of when the event loop had a token.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "first_token_s",
        "id",
        "last_token_s",
        "logprobs",
        "max_len",
        "max_tokens",
        "namespace",
        "num_cached_tokens",
        "num_prompt_tokens",
        "params",
        "prompt_logprobs",
        "seed",
        "status",
        "stop_token_ids",
        "submitted_s",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        tenant: Tenant = EVERYONE,
        cache_salt: str | None = None,
    ) -> None:
        """`max_tokens` is what `params` asks for or the room left, never None; `seed` likewise.

        Raises InvalidRequestError for a `cache_salt` that is empty or too long.
        """
        self.id = id
        self.tenant = tenant
        self.namespace = cache_namespace(tenant, cache_salt)  # of the prefix cache
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_len = self.num_prompt_tokens + max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids).union(
            () if params.ignore_eos else eos_token_ids
        )
        self.token_ids = list(prompt_token_ids)
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.logprobs: list[TokenLogprobs] = []  # of the output tokens, if asked for
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1.., if asked for
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens still have to be scored."""
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status.value}, {len(self.token_ids)} tokens)"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the raw logits, of one token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(slots=True)
class RequestOutput:
    """A finished request, as `LLM.generate` returns it."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none


@dataclass(slots=True)
class OutputDelta:
    """What a running request has produced since its last delta: `AsyncEngine.generate` yields it.

    `text` lags behind `token_ids` while a character or a possible stop string is incomplete. The
    last delta, and only it, has a finish_reason.
    """

    token_ids: list[int]
    text: str
    num_output_tokens: int  # in all, this delta included
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    # Only of an answer that is parsed; its `text` is the content alone.
    events: Sequence[Event] = ()
    num_reasoning_tokens: int = 0  # in all
