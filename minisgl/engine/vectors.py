"""Vectors of texts, and scores of documents: what is computed of prompts that nothing follows."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.engine.startup import Loaded
from minisgl.engine.stream import OutputStream
from minisgl.errors import ConfigError, ContextLengthError, InvalidRequestError
from minisgl.request import EVERYONE, PooledRows, Pooling, Request, SamplingParams, Tenant
from minisgl.text.tokenizer import Tokenizer

# Of the card of Qwen3-Reranker.
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BODY = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ANSWERS = ("no", "yes")

_NOT_SAMPLED = SamplingParams(temperature=0, max_tokens=1)

Input = str | Sequence[int]


class Encode(Protocol):
    """`AsyncEngine.encode`."""

    def __call__(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> Awaitable[list[int]]: ...


class Submit(Protocol):
    """`AsyncEngine.submit`, for a request of which no token is sampled."""

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None,
        tenant: Tenant,
        pooling: Pooling,
    ) -> OutputStream: ...


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of a text."""

    vector: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document answers a query, 0 to 1."""

    score: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """prompt_name: of the checkpoint's prompts, for its default one None. instruction: what a query
    is about, instead of a prompt. dimensions: first numbers of each vector that are kept.
    truncate_prompt_tokens: tokens to which longer texts are cut, -1 for the longest sequence; None
    refuses texts that are too long."""

    prompt_name: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None


NO_OPTIONS = EmbedOptions()


def check_task(loaded: str, needed: str) -> None:
    """Raise InvalidRequestError if the model was loaded for another task."""
    if loaded != needed:
        raise InvalidRequestError(
            "task", f"the model was loaded with --task {loaded}; this needs {needed}."
        )


class Vectors:
    """Makes prompts of inputs, and vectors of what is computed of them. Used on the engine's
    loop."""

    def __init__(self, loaded: Loaded[Any], encode: Encode, submit: Submit) -> None:
        """Raises ConfigError for a reranker without the tokens of its answers."""
        self._encode = encode
        self._submit = submit
        self._task = loaded.config.task
        self._rules = loaded.embedding
        self._tokenizer = loaded.tokenizer
        self._max_seq_len = loaded.capacity.max_seq_len
        self._page_size = loaded.capacity.page_size
        self._width = loaded.hidden_size
        self._answers: tuple[int, ...] = ()
        self._before: list[int] = []
        self._after: list[int] = []
        if loaded.config.task == "rerank":
            if loaded.tokenizer is None:
                raise ConfigError("--task", "rerank", "needs a checkpoint with a tokenizer")
            self._answers = _answers(loaded.tokenizer)
            self._before = loaded.tokenizer.encode(_BEFORE, add_special_tokens=False)
            self._after = loaded.tokenizer.encode(_AFTER, add_special_tokens=False)
        self._end = self._find_end()

    async def embed(
        self,
        inputs: Sequence[Input],
        options: EmbedOptions = NO_OPTIONS,
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> list[Embedding]:
        """The vectors of texts, or of token ids, which are taken as they are; in their order.

        Raises as `AsyncEngine.submit` and `encode` do, after aborting the others.
        """
        check_task(self._task, "embed")
        self._check(options)
        before = self._prompt_text(options)
        pooling = Pooling(self._rules.rows)
        if before and self._rules.rows is PooledRows.MEAN and not self._rules.with_prompt:
            pooling = Pooling(self._rules.rows, num_skipped=await self._num_of(before))
        prompts = [
            await self._prompt(each, before, options.truncate_prompt_tokens) for each in inputs
        ]
        submit = partial(self._pool, cache_salt=cache_salt, tenant=tenant)
        with ExitStack() as open_streams:
            streams = [_submitted(submit(each, pooling), open_streams) for each in prompts]
            for stream in streams:
                await stream.wait_finished()
        return [
            Embedding(
                self._vector(stream.request, options.dimensions),
                stream.request.num_prompt_tokens,
                stream.request.num_cached_tokens,
            )
            for stream in streams
        ]

    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> list[Score]:
        """The scores of pairs of a query and a document, in their order; as LLM.rerank."""
        check_task(self._task, "rerank")
        prompts = [
            await self._question(query, document, instruction, truncate_prompt_tokens)
            for query, document in pairs
        ]
        submit = partial(self._pool, cache_salt=cache_salt, tenant=tenant)
        pooling = Pooling(PooledRows.LAST, token_ids=self._answers)
        with ExitStack() as open_streams:
            streams: list[OutputStream] = []
            for prompt in prompts:
                streams.append(_submitted(submit(prompt, pooling), open_streams))
                if len(streams) == 1 < len(prompts) and self._share_pages(*prompts[:2]):
                    await streams[0].wait_finished()  # the others find their beginning cached
            for stream in streams:
                await stream.wait_finished()
        return [
            Score(
                _probability(stream.request.pooled[-1]),
                stream.request.num_prompt_tokens,
                stream.request.num_cached_tokens,
            )
            for stream in streams
        ]

    def _pool(
        self, token_ids: Sequence[int], pooling: Pooling, *, cache_salt: str | None, tenant: Tenant
    ) -> OutputStream:
        return self._submit(
            token_ids, _NOT_SAMPLED, cache_salt=cache_salt, tenant=tenant, pooling=pooling
        )

    def _share_pages(self, one: list[int], other: list[int]) -> bool:
        """Whether two prompts begin with the same page."""
        page = self._page_size
        return min(len(one), len(other)) > page and one[:page] == other[:page]

    # -- prompts -----------------------------------------------------------------------------------

    def _check(self, options: EmbedOptions) -> None:
        dimensions = options.dimensions
        if dimensions is not None and not 1 <= dimensions <= self._width:
            raise InvalidRequestError("dimensions", f"allowed: 1 to {self._width}.")

    def _prompt_text(self, options: EmbedOptions) -> str:
        """What precedes each text."""
        rules, name = self._rules, options.prompt_name
        if options.instruction is not None:
            if name is not None:
                raise InvalidRequestError("instruction", "is not allowed with prompt_name.")
            if rules.instruct is None:
                raise InvalidRequestError(
                    "instruction", "the model has no form for instructions; use prompt_name."
                )
            return rules.instruct.replace("{instruction}", options.instruction)
        name = rules.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in rules.prompts:
            known = ", ".join(rules.prompts) or "none; the model has no prompts"
            raise InvalidRequestError("prompt_name", f"allowed: {known}.")
        return rules.prompts[name]

    def _find_end(self) -> list[int]:
        """The tokens after each text, which remain when it is cut."""
        if self._tokenizer is None:
            return []
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        end: list[int] = []
        for start in range(len(whole)):
            if whole[start : start + len(bare)] == bare:
                end = whole[start + len(bare) :]
        if self._rules.end_token is not None:
            token_id = self._tokenizer.added_token_id(self._rules.end_token)
            if token_id is not None and end[-1:] != [token_id]:
                end = [*end, token_id]
        return end

    async def _num_of(self, before: str) -> int:
        """Number of tokens of what precedes a text, counted as sentence-transformers does: with
        what begins each text, without what ends it."""
        token_ids = await self._encode(before)
        end = self._end
        return len(token_ids) - (len(end) if end and token_ids[-len(end) :] == end else 0)

    async def _prompt(self, given: Input, before: str, cut_to: int | None) -> list[int]:
        if not isinstance(given, str):
            return self._fitted(list(given), [], cut_to)
        if self._tokenizer is None:
            raise InvalidRequestError("input", "the model has no tokenizer; send token ids.")
        token_ids = await self._encode(before + given, any_length=cut_to is not None)
        end = self._end
        for size in range(len(end), 0, -1):  # the tokenizer may have appended some of it
            if token_ids[-size:] == end[:size]:
                token_ids = token_ids[:-size]
                break
        return self._fitted(token_ids, end, cut_to)

    async def _question(
        self, query: str, document: str, instruction: str | None, cut_to: int | None
    ) -> list[int]:
        chosen = RERANK_INSTRUCTION if instruction is None else instruction
        body = _BODY.format(instruction=chosen, query=query, document=document)
        token_ids = await self._encode(
            body, add_special_tokens=False, any_length=cut_to is not None
        )
        return self._fitted([*self._before, *token_ids], self._after, cut_to)

    def _fitted(self, token_ids: list[int], end: list[int], cut_to: int | None) -> list[int]:
        """A prompt that is cut before its end to `cut_to` tokens. Raises ContextLengthError."""
        limit = self._max_seq_len
        size = len(token_ids) + len(end)
        if cut_to is not None:
            limit = limit if cut_to == -1 else min(limit, cut_to)
            if limit <= len(end):
                raise InvalidRequestError(
                    "truncate_prompt_tokens", f"allowed: more than {len(end)}, or -1."
                )
            return [*token_ids[: limit - len(end)], *end]
        if size > limit:
            raise ContextLengthError(size, 0, limit, prompt_field="input")
        return [*token_ids, *end]

    # -- vectors -----------------------------------------------------------------------------------

    def _vector(self, request: Request, dimensions: int | None) -> list[float]:
        """The vector of a request that has ended: cut first, and then normalised."""
        assert request.pooling is not None
        vector = np.sum(np.array(request.pooled, dtype=np.float64), axis=0)
        if request.pooling.rows is PooledRows.MEAN:
            vector = vector / max(1, request.num_prompt_tokens - request.pooling.num_skipped)
        vector = vector[:dimensions]
        if self._rules.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        floats: list[float] = vector.astype(np.float32).tolist()
        return floats


def _submitted(stream: OutputStream, open_streams: ExitStack) -> OutputStream:
    open_streams.callback(stream.abort)
    return stream


def _answers(tokenizer: Tokenizer) -> tuple[int, ...]:
    token_ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
    if any(len(each) != 1 for each in token_ids):
        reason = "needs a tokenizer with a token for each of yes and no"
        raise ConfigError("--task", "rerank", reason)
    return tuple(each[0] for each in token_ids)


def _probability(logits: NDArray[np.float32]) -> float:
    """P(yes) / (P(yes) + P(no)) of logits of no and yes."""
    no, yes = map(float, logits)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))
