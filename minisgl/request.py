"""Requests: sampling parameters, the state of a request, and its outputs."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from reprlib import repr as short_repr
from typing import Any, ClassVar, TypeVar

from minisgl.errors import InvalidRequestError
from minisgl.events import Event
from minisgl.parameters import Role, check_number, checks_names, number, parameters_of
from minisgl.printable import counted

E = TypeVar("E", bound="Extra")

MAX_LOGPROBS = 128
DEFAULT_LOGPROBS = 20  # the most without --max-logprobs, as in OpenAI's API
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024  # entries, stop_token_ids included
# Maximum number of biased or masked tokens: logit_bias, stop_token_ids and the model's EOS tokens.
MAX_EDITS = MAX_LOGIT_BIAS + 64
MAX_ALLOWED_IDS = 1 << 15
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORDS_CHARS = 8192  # of all words: they are tokenized on the event loop
MAX_CHOICES = 8192  # of a StructuredOutput
MAX_INTEGER = 2**31 - 1  # the maximum of a device table
MAX_SALT_CHARS = 256
MAX_SHOWN = 80  # characters of a text in the repr of its output
NO_PARAMETER = "is no sampling parameter"


@checks_names("is no field of a StructuredOutput")
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the output must look like: exactly one constraint. Raises InvalidRequestError.

    strict: refuse a JSON schema that cannot be enforced completely; otherwise its unsupported
    keywords are ignored. whitespace_pattern: a regex for the blanks between the parts of a JSON
    text, which matches nothing else, "" for none; None: a space, or a line break and its
    indentation.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None  # a str is a schema as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # in the syntax of Rust's regex crate; the whole output matches
    grammar: str | None = None  # Lark as llguidance extends it, or GBNF
    choice: Sequence[str] | None = None  # one of these texts
    structural_tag: Mapping[str, Any] | str | None = None  # vLLM's legacy form; a str is JSON
    tool_calls: ToolCallGrammar | None = None
    strict: bool = False
    whitespace_pattern: str | None = None
    field: str = ""  # the name of the constraint in errors; "": its name here

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if self.json_schema is False:  # a schema that nothing satisfies
            given.insert(0, "json_schema")
        if len(given) != 1:
            *kinds, _ = CONSTRAINTS  # the last one is made by minisgl alone
            found = f"{len(given)} were given: {', '.join(given)}" if given else "none was given"
            raise InvalidRequestError(
                self.field or "structured", f"takes one of {', '.join(kinds)}; {found}."
            )
        [kind] = given
        if not self.field:
            object.__setattr__(self, "field", f"structured.{kind}")
        value = getattr(self, kind)
        types, said = CONSTRAINTS[kind]
        if not isinstance(value, types):
            raise InvalidRequestError(self.field, f"must be {said}.")
        if kind == "choice":
            texts = () if isinstance(value, str) else tuple(value)
            if not texts or not all(isinstance(text, str) for text in texts):
                raise InvalidRequestError(self.field, "must be a list of one or more texts.")
            if len(texts) > MAX_CHOICES:
                raise InvalidRequestError(self.field, f"must have at most {MAX_CHOICES} entries.")
            object.__setattr__(self, "choice", texts)
        if not isinstance(self.whitespace_pattern, str | None):
            raise InvalidRequestError("whitespace_pattern", "must be a text, which is a regex.")


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """A grammar of tool calls, made by `minisgl.grammar.tool_grammars`."""

    text: str  # in llguidance's own form
    parts: tuple[StructuredOutput, ...]  # from which it is made, to say which of them is wrong


NOT_BESIDE_A_CONSTRAINT = (
    "is not allowed beside what constrains the answer (structured output, tools that are required "
    "or strict, a thinking budget), which may need other tokens."
)
# The fields of StructuredOutput that are constraints: their types, and these in words.
CONSTRAINTS: Mapping[str, tuple[Any, str]] = {
    "json_schema": (Mapping | str | bool, "a JSON schema: an object, or its JSON text"),
    "json_object": (bool, "true or false"),
    "regex": (str, "a text"),
    "grammar": (str, "a text: a grammar in Lark, or GBNF"),
    "choice": (Sequence, "a list of one or more texts"),
    "structural_tag": (Mapping | str, "an object, or its JSON text"),
    "tool_calls": (ToolCallGrammar, "a ToolCallGrammar"),
}


# The fields of SamplingParams that hold several values. Callers may give None for none.
COLLECTIONS: Mapping[str, type[tuple[Any, ...]] | type[dict[Any, Any]]] = {
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "allowed_token_ids"), tuple),
    "logprob_token_ids": tuple,
    "logit_bias": dict,
}


def _collected(name: str, given: Any, kind: type[Any]) -> Any:
    """The values of a field of COLLECTIONS; a text is one value."""
    try:
        return kind((given,) if isinstance(given, str) else given)
    except (TypeError, ValueError) as error:
        wanted = "a list" if kind is tuple else "an object with the bias of each token id"
        raise InvalidRequestError(name, f"must be {wanted}, not {given!r}.") from error


@checks_names(NO_PARAMETER, {"n": "LLM.generate and LLM.chat take it beside sampling_params"})
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. Raises InvalidRequestError, naming the field.

    The order of operations on a row of logits: logprobs are computed from raw float32 logits; then
    logit_bias, repetition, frequency and presence penalty, masking, temperature,
    top_n_sigma, min_p, top_k, top_p. The token is the Gumbel-max of those left; at temperature 0,
    the argmax. With --logprobs-mode processed_logprobs, logprobs are computed from those left, at
    temperature 0 from those before temperature; those of prompts stay raw.

    top_n_sigma keeps the tokens whose logit is at least max - n·σ (Tang et al., "Top-nσ", arXiv
    2411.07641). As in llama.cpp, σ is the standard deviation of the logits before temperature, so
    that temperature does not change what is kept, and of the tokens that may be sampled: masked
    ones do not count.
    """

    temperature: float = number(1.0, 0, 2, column=0)
    """0 takes the likeliest token; more makes others likelier. Example: `0.7`"""
    top_p: float = number(1.0, 0, 1, column=1, role=Role.FILTER)
    """Keeps the likeliest tokens that together have this probability. Example: `0.9`"""
    top_k: int = number(0, -1, MAX_INTEGER, kind=int, column=1, role=Role.FILTER)
    """Keeps so many of the likeliest tokens; 0 and -1 keep all. Example: `40`"""
    min_p: float = number(0.0, 0, 1, column=2, role=Role.FILTER)
    """Keeps tokens with at least this share of the likeliest one's probability. Example: `0.05`"""
    top_n_sigma: float = number(0.0, -1, 100, column=6, role=Role.RARE_FILTER)
    """Keeps tokens whose logit is at most so many standard deviations below the largest; 0 or less
    turns it off. Example: `1.0`"""
    max_tokens: int | None = number(None, 0, MAX_INTEGER, kind=int)  # None: the rest of the context
    # Before it, EOS and stop_token_ids are masked, and stop strings ignored.
    min_tokens: int = number(0, 0, MAX_INTEGER, kind=int, column=2)
    stop: Sequence[str] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = number(None, -(2**63), 2**63 - 1, kind=int)
    """The same seed gives the same answer to the same request. Default: drawn. Example: `42`"""
    # Over generated tokens.
    presence_penalty: float = number(0.0, -2, 2, column=5, role=Role.PENALTY)
    """Lowers the logits of tokens that the answer has. Example: `0.5`"""
    frequency_penalty: float = number(0.0, -2, 2, column=4, role=Role.PENALTY)
    """Lowers the logits of tokens by how often the answer has them. Example: `0.5`"""
    # Over prompt and generated tokens. The bounds are wider than any use, and safe from underflow
    # and overflow in float32.
    repetition_penalty: float = number(1.0, 1e-6, 1e6, column=3, role=Role.PENALTY)
    """Divides the logits of tokens that the prompt or the answer has; 1 turns it off. Example:
    `1.1`"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None  # all others are masked, EOS as well
    bad_words: Sequence[str] = ()  # the last token of each is masked behind those before it
    # 0: of the sampled token; n: also of the n likeliest
    logprobs: int | None = number(None, 0, MAX_LOGPROBS, kind=int)
    prompt_logprobs: int | None = number(None, 0, MAX_LOGPROBS, kind=int)
    logprob_token_ids: Sequence[int] = ()  # also of these tokens; logprobs is then at least 0
    return_routed_experts: bool = False  # the experts that each token takes in each layer
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None  # the tokens that would violate it are masked

    def __post_init__(self) -> None:
        for name, kind in COLLECTIONS.items():
            given = getattr(self, name)
            if given is None and name != "allowed_token_ids":  # where None is not the same as none
                given = ()
            if given is not None:
                object.__setattr__(self, name, _collected(name, given, kind))
        self._check_rules()
        for name, parameter in PARAMETERS.items():
            parameter.check(getattr(self, name))
        if self.max_tokens is not None:
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise InvalidRequestError(
                    "max_tokens", "must be at least 1 (0 is only allowed with prompt_logprobs)."
                )
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}."
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings are allowed.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequestError("stop", "must be non-empty strings.")
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                "logit_bias", f"with stop_token_ids at most {MAX_LOGIT_BIAS} entries are allowed."
            )
        for index, token_id in enumerate(self.stop_token_ids):
            check_number("stop_token_ids", token_id, int, 0, MAX_INTEGER, f"entry {index} ")
        if not isinstance(self.structured, StructuredOutput | None):
            raise InvalidRequestError("structured", "must be a StructuredOutput.")
        if len(self.logprob_token_ids) > MAX_LOGPROBS:
            reason = f"at most {MAX_LOGPROBS} tokens are allowed."
            raise InvalidRequestError("logprob_token_ids", reason)
        for index, token_id in enumerate(self.logprob_token_ids):
            check_number("logprob_token_ids", token_id, int, 0, MAX_INTEGER, f"entry {index} ")
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        for token_id, bias in self.logit_bias.items():
            check_number("logit_bias", token_id, int, 0, MAX_INTEGER, "each key ")
            check_number("logit_bias", bias, float, -100, 100, f"the bias of token {token_id} ")

    def _check_rules(self) -> None:
        """Check allowed_token_ids and bad_words."""
        if (ids := self.allowed_token_ids) is not None:
            if len(ids) > MAX_ALLOWED_IDS:
                raise InvalidRequestError(
                    "allowed_token_ids", f"at most {MAX_ALLOWED_IDS} entries are allowed."
                )
            if not ids or {*map(type, ids)} != {int}:
                raise InvalidRequestError(
                    "allowed_token_ids", "must be a list of one or more integers."
                )
            if self.structured is not None:
                raise InvalidRequestError("allowed_token_ids", NOT_BESIDE_A_CONSTRAINT)
        words = self.bad_words
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError("bad_words", f"at most {MAX_BAD_WORDS} words are allowed.")
        for word in words:
            if not (isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARS):
                raise InvalidRequestError(
                    "bad_words",
                    f"must be texts of 1 to {MAX_BAD_WORD_CHARS} characters, not only blanks.",
                )
        if sum(map(len, words)) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequestError(
                "bad_words", f"at most {MAX_BAD_WORDS_CHARS} characters are allowed in all."
            )

    @property
    def greedy(self) -> bool:
        """True if the token is the argmax: dividing by less than 1e-5 would only lose precision."""
        return self.temperature < 1e-5

    @property
    def num_scores(self) -> int:
        """Logprobs of each token of the output."""
        return 0 if self.logprobs is None else 1 + self.logprobs + len(self.logprob_token_ids)

    @property
    def computes_prompt(self) -> bool:
        """True if rows of the whole prompt are asked for, which no cache has."""
        return self.prompt_logprobs is not None or self.return_routed_experts

    def for_choice(self, k: int) -> SamplingParams:
        """The parameters of answer k to a prompt, which has a seed of its own. Answer 0 keeps this
        one, so that n = 1 is the first of n = 2."""
        if self.seed is None or k == 0:
            return self
        digest = hashlib.blake2b(f"{self.seed} {k}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, signed=True))


PARAMETERS = parameters_of(SamplingParams)
# Those that have a column in the slot tables, numbers first.
SAMPLED = tuple(
    parameter
    for kind in (float, int)
    for parameter in PARAMETERS.values()
    if parameter.kind is kind and parameter.column is not None
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The origin of a request, if callers are distinguished. The names are opaque.

    Clients take turns in the queue and share no cached prefixes; the users of one client take turns
    within its turns.
    """

    client: str = ""
    user: str = ""


EVERYONE = Tenant()


def cache_namespace(tenant: Tenant, cache_salt: str | None, extras: Iterable[Extra] = ()) -> bytes:
    """The namespace within which cached prefixes are shared. Raises InvalidRequestError."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError("cache_salt", "must be a text.")
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters.")
    kv_of = [extra.kv_of for extra in extras if extra.kv_of]
    if not tenant.client and cache_salt is None and not kv_of:
        return b""
    # A digest, so that the cache key is short and does not reveal the salt.
    parts = repr((tenant.client, cache_salt, *kv_of)).encode()
    return hashlib.blake2b(parts, digest_size=16).digest()


def check_token_ids(
    name: str, token_ids: Collection[int], vocab_size: int, *, of: str = ""
) -> None:
    """Raise InvalidRequestError for field `name`, naming the first id outside the vocabulary.

    of: a description of the sequence in which the id's position counts, by default the field.
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
        f"the token id {short_repr(wrong)} at position {position}{of} is out of vocabulary; "
        f"allowed: 0 to {vocab_size - 1}.",
    )


class Extra:
    """What a request asks of a part (scheduler/parts.py), and what steps have found for it.

    Each part has a class of its own. Here is what the scheduler must know of any."""

    __slots__ = ()

    samples: ClassVar[bool] = True  # tokens are to follow the prompt
    kv_of: bytes = b""  # what else the KV of the tokens depends on
    masks: ClassVar[bool] = False  # every token is sampled under a mask
    takes_drafts: ClassVar[bool] = True  # a step may sample several tokens

    @property
    def computes_all_tokens(self) -> bool:
        """Whether cached tokens do not help: rows of the whole prompt are needed."""
        return False

    def num_shared(self, num_tokens: int) -> int:
        """Of the first `num_tokens` tokens, those that the cached prefix of a later request may
        have."""
        return num_tokens

    def chunk_end(self, end: int) -> int:
        """Where a chunk of the prompt ends that may have tokens up to `end`: there or before."""
        return end

    def as_text(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt with ids of the vocabulary in the places of what it brings itself. Raises
        InvalidRequestError if that does not fit."""
        return prompt

    def retracted(self) -> None:
        """Forget what steps have found: the request begins anew."""


class RequestStatus(enum.Enum):
    """The states of a request. Retraction changes RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def with_broken_call(self) -> FinishReason:
        """The reason where a call of the answer cannot be read: it ends as one that was cut."""
        return FinishReason.LENGTH if self is FinishReason.STOP else self


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence, from submission to its end. Created by the engine, changed by the scheduler.

    `token_ids` are the tokens known on the host: the prompt and the settled output, without those
    of steps in flight. Times are in seconds of `time.monotonic`, taken when the event loop
    received a token. Raises InvalidRequestError for a `cache_salt` that is empty or too long.
    """

    id: str
    prompt_token_ids: InitVar[Sequence[int]]
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int  # that of `params`, or all that the context has room for
    seed: int  # that of `params`, or a drawn one
    eos_token_ids: InitVar[Iterable[int]] = ()
    tenant: Tenant = EVERYONE
    cache_salt: InitVar[str | None] = None
    extras: Sequence[Extra] = ()  # at most one of a kind
    namespace: bytes = field(init=False)  # of the prefix cache
    num_prompt_tokens: int = field(init=False)
    max_len: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_host_tokens: int = 0  # of these, tokens that were loaded from host memory
    num_disk_tokens: int = 0  # of the cached tokens, those that were read from disk
    num_drafted_tokens: int = 0  # guesses of output tokens that were verified
    num_accepted_tokens: int = 0  # of these, those that became output tokens
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of output tokens, if requested
    submitted_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None  # when it got a slot for the first time
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(
        self,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        cache_salt: str | None,
    ) -> None:
        self.namespace = cache_namespace(self.tenant, cache_salt, self.extras)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_len = self.num_prompt_tokens + self.max_tokens
        self.stop_token_ids = frozenset(self.params.stop_token_ids).union(
            () if self.params.ignore_eos else eos_token_ids
        )
        self.token_ids = list(prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def extra(self, kind: type[E]) -> E | None:
        """What it asks of the part of this kind; None: nothing."""
        for extra in self.extras:
            if isinstance(extra, kind):
                return extra
        return None

    @property
    def masked(self) -> bool:
        return any(extra.masks for extra in self.extras)

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may sample several of its tokens: none of them may change, by a mask or a
        penalty, what is sampled after it, and no part may be against it."""
        penalties = (spec for spec in SAMPLED if spec.role is Role.PENALTY)
        if self.masked or not all(extra.takes_drafts for extra in self.extras):
            return False
        return all(getattr(self.params, spec.name) == spec.default for spec in penalties)

    @property
    def computes_all_tokens(self) -> bool:
        """True if cached tokens do not help: rows of the whole prompt are asked for."""
        return any(extra.computes_all_tokens for extra in self.extras)

    def num_shared(self, num_tokens: int) -> int:
        """Of the first `num_tokens` tokens, those that the cached prefix of a later request may
        have."""
        return min((extra.num_shared(num_tokens) for extra in self.extras), default=num_tokens)

    def chunk_end(self, end: int) -> int:
        """Where a chunk ends that may have tokens up to `end`: there or before."""
        return min((extra.chunk_end(end) for extra in self.extras), default=end)

    def drop(self, num_tokens: int) -> None:
        """Drop the last output tokens, all of one run, which keeps its first token."""
        if num_tokens > 0:
            del self.token_ids[-num_tokens:]
            del self.logprobs[self.num_output_tokens :]
            self.num_accepted_tokens -= num_tokens  # those behind the first were drafts

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status.value}, {len(self.token_ids)} tokens)"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs (natural) of a token and of the likeliest tokens, by --logprobs-mode."""

    token_id: int
    logprob: float
    rank: int  # its place among all tokens, likeliest first, from 1 on
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
    named: tuple[tuple[int, float], ...] = ()  # the same of logprob_token_ids, in their order

    @property
    def others(self) -> dict[int, float]:
        """The logprobs of both, by token id."""
        return dict(self.top) | dict(self.named)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer."""

    name: str
    arguments: str  # JSON text, as the model wrote it; after "length" perhaps none


@dataclass(slots=True, repr=False)
class RequestOutput:
    """A finished request, as `LLM.generate` and `LLM.chat` return it."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
    num_host_tokens: int = 0  # of the cached tokens, those loaded from host memory
    num_disk_tokens: int = 0  # of the cached tokens, those read from disk
    num_drafted_tokens: int = 0  # guesses of output tokens that were verified
    num_accepted_tokens: int = 0  # of these, those that became output tokens
    parsed: Any = None  # of a JSON constraint: the value; None where the answer was cut
    # Of a conversation, whose text has neither; None and empty for a model without their formats.
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    # [tokens of prompt and output but the last, layers, experts] int16 of NumPy, if requested.
    routed_experts: Any = None
    # The versions of the weights that have sampled the tokens, each with its first token, once
    # weights were replaced.
    weight_versions: Sequence[tuple[int, str]] = ()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= MAX_SHOWN else self.text[:MAX_SHOWN] + "…"
        calls = f", {counted(len(self.tool_calls), 'tool call')}" if self.tool_calls else ""
        tokens = f"{len(self.prompt_token_ids)} + {len(self.token_ids)} tokens"
        return f"RequestOutput({text!r}, {self.finish_reason}, {tokens}{calls})"


@dataclass(slots=True)
class OutputDelta:
    """The output of a request since its previous delta, as `AsyncEngine.generate` yields it.

    `text` may end earlier than `token_ids` while a character or a possible stop string is
    incomplete. Only the last delta has a finish_reason.
    """

    token_ids: list[int]
    text: str
    num_output_tokens: int  # in total, this delta included
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    # Only of an answer that is parsed; its `text` is the content alone.
    events: Sequence[Event] = ()
    num_reasoning_tokens: int = 0  # in all
    num_host_tokens: int = 0  # of the cached tokens, those loaded from host memory
    num_disk_tokens: int = 0  # of the cached tokens, those read from disk
    # In all: guesses of output tokens that were verified, and those that became output tokens.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    # Only of the last delta: as of RequestOutput, the experts in C order.
    routed_experts: bytes = b""
    weight_versions: Sequence[tuple[int, str]] = ()
