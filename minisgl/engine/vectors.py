"""Vectors of texts, and scores of documents: what is computed of prompts that nothing follows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from minisgl.engine.startup import Loaded
from minisgl.engine.stream import OutputStream
from minisgl.engine.turns import Turn
from minisgl.engine.vector_types import Embedding, EmbedOptions, Input, RerankOptions, Score
from minisgl.errors import ConfigError, ContextLengthError, InvalidRequestError, TextTooLongError
from minisgl.parts.vectors.host import PromptVector, check_task
from minisgl.pooling import PooledRows, Pooling
from minisgl.request import EVERYONE, Extra, Request, SamplingParams, Tenant, check_token_ids
from minisgl.text.tokenizer import Tokenizer

# Of the card of Qwen3-Reranker.
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_HEAD = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ANSWERS = ("no", "yes")

_NOT_SAMPLED = SamplingParams(temperature=0, max_tokens=1)
Made = TypeVar("Made")


def ignored(_: Request) -> None:
    """Do nothing with the first request."""


NO_OPTIONS = EmbedOptions()
AS_THE_CARD = RerankOptions()


class Vectors:
    """Makes prompts of inputs, and vectors of what is computed of them. Used on the engine's
    loop."""

    def __init__(
        self,
        loaded: Loaded[Any],
        encode: Callable[..., Awaitable[list[int]]],
        submit: Callable[..., OutputStream],
    ) -> None:
        """encode, submit: `AsyncEngine.encode` and `submit`. Raises ConfigError for a reranker
        without the tokens of its answers.
        """
        self._encode = encode
        self._submit = submit
        self.task = loaded.config.task
        self._rules = loaded.embedding
        self._tokenizer = loaded.tokenizer
        self._max_seq_len = loaded.capacity.max_seq_len
        self._page_size = loaded.capacity.page_size
        self._vocab_size = loaded.model.vocab_size
        # Of one call: the others find room in the queue.
        self._most_open = (
            loaded.config.max_running_requests + loaded.config.max_queued_requests // 2
        )
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
        extras: Sequence[Extra] = (),
        submitted: Callable[[Request], None] = ignored,
    ) -> list[Embedding]:
        """The vectors of texts, or of token ids, which are taken as they are; in their order.

        extras: what each asks of parts besides, such as `AsyncEngine.adapter`. submitted: called
        with the first request.
        Raises as `AsyncEngine.submit` and `encode` do, after aborting the others.
        """
        check_task(self.task, "embed")
        dimensions = options.dimensions
        if dimensions is not None and not 1 <= dimensions <= self._width:
            raise InvalidRequestError("dimensions", f"allowed: 1 to {self._width}.")
        before = self._prompt_text(options)
        pooling = Pooling(self._rules.rows)
        if before and self._rules.rows is PooledRows.MEAN and not self._rules.with_prompt:
            pooling = Pooling(self._rules.rows, num_skipped=await self._num_of(before))
        prompts: list[list[int]] = []
        turn = Turn()
        for index, given in enumerate(inputs):
            field = f"input[{index}]" if len(inputs) > 1 else "input"
            prompts.append(await self._prompt(given, field, before, options.truncate_prompt_tokens))
            await turn.share()

        def embedding(request: Request) -> Embedding:
            vector = self._vector(request, dimensions)
            return Embedding(vector, request.num_prompt_tokens, request.num_cached_tokens)

        return await self._compute(
            prompts, pooling, embedding, cache_salt, tenant, extras, submitted
        )

    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        options: RerankOptions = AS_THE_CARD,
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        extras: Sequence[Extra] = (),
        submitted: Callable[[Request], None] = ignored,
    ) -> list[Score]:
        """The scores of pairs of a query and a document, in their order; raises as `embed` does."""
        check_task(self.task, "rerank")
        prompts: list[list[int]] = []
        turn = Turn()
        for index, (query, document) in enumerate(pairs):
            prompts.append(await self._question(query, document, f"documents[{index}]", options))
            await turn.share()
        pooling = Pooling(PooledRows.LAST, token_ids=self._answers)

        def score(request: Request) -> Score:
            no, yes = map(float, _wanted(request).vector)
            probability = 1 / (1 + math.exp(min(no - yes, 700.0)))  # P(yes) / (P(yes) + P(no))
            return Score(probability, request.num_prompt_tokens, request.num_cached_tokens)

        # If so, the others find their beginning cached.
        first_alone = len(prompts) > 1 and self._share_pages(*prompts[:2])
        return await self._compute(
            prompts, pooling, score, cache_salt, tenant, extras, submitted, first_alone=first_alone
        )

    async def logits(
        self,
        prompts: Sequence[list[int]],
        token_ids: tuple[int, ...],
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        extras: Sequence[Extra] = (),
        submitted: Callable[[Request], None] = ignored,
    ) -> list[Embedding]:
        """The logits of some tokens behind each prompt, in their order; raises as `embed` does."""
        check_task(self.task, "generate")
        for prompt in prompts:
            if len(prompt) > self._max_seq_len:
                raise ContextLengthError(len(prompt), 0, self._max_seq_len, prompt_field="input")

        def vector(request: Request) -> Embedding:
            found = [*map(float, _wanted(request).vector)]
            return Embedding(found, request.num_prompt_tokens, request.num_cached_tokens)

        first_alone = len(prompts) > 1 and self._share_pages(*prompts[:2])
        pooling = Pooling(PooledRows.LAST, token_ids=token_ids)
        return await self._compute(
            prompts, pooling, vector, cache_salt, tenant, extras, submitted, first_alone=first_alone
        )

    async def _compute(
        self,
        prompts: Sequence[list[int]],
        pooling: Pooling,
        make: Callable[[Request], Made],
        cache_salt: str | None,
        tenant: Tenant,
        extras: Sequence[Extra],
        submitted: Callable[[Request], None],
        *,
        first_alone: bool = False,
    ) -> list[Made]:
        """What `make` makes of the request of each prompt; the others are aborted if one fails.

        first_alone: submit the others when the first one has ended.
        """
        open_streams: deque[OutputStream] = deque()
        made: list[Made] = []
        turn = Turn()

        async def take() -> None:
            await open_streams[0].wait_finished()
            made.append(make(open_streams.popleft().request))
            await turn.share()

        try:
            for prompt in prompts:
                if len(open_streams) == self._most_open or (first_alone and len(open_streams) == 1):
                    await take()
                    first_alone = False
                wanted = PromptVector(pooling, len(prompt))
                open_streams.append(
                    self._submit(
                        prompt,
                        _NOT_SAMPLED,
                        cache_salt=cache_salt,
                        tenant=tenant,
                        extras=(wanted, *extras),
                    )
                )
                if prompt is prompts[0]:
                    submitted(open_streams[0].request)
                await turn.share()
            while open_streams:
                await take()
        finally:
            for stream in open_streams:
                stream.abort()
        return made

    def _share_pages(self, one: list[int], other: list[int]) -> bool:
        """Whether two prompts begin with the same page."""
        page = self._page_size
        return min(len(one), len(other)) > page and one[:page] == other[:page]

    # -- prompts -----------------------------------------------------------------------------------

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
        _, end = self._tokenizer.special_around()
        if self._rules.end_token is not None:
            token_id = self._tokenizer.added_token_id(self._rules.end_token)
            if token_id is not None and end[-1:] != [token_id]:
                end = [*end, token_id]
        return end

    async def _num_of(self, before: str) -> int:
        """Number of tokens of what precedes a text, counted as sentence-transformers does: with
        what begins each text, without what ends it."""
        token_ids = await self._encoded(before, "input")
        end = self._end
        return len(token_ids) - (len(end) if end and token_ids[-len(end) :] == end else 0)

    async def _prompt(self, given: Input, field: str, before: str, cut_to: int | None) -> list[int]:
        if not isinstance(given, str):
            check_token_ids(field, given, self._vocab_size)
            return self._fitted(list(given), [], cut_to, field)
        if self._tokenizer is None:
            raise InvalidRequestError(field, "the model has no tokenizer; send token ids.")
        token_ids = await self._encoded(before + given, field, cut=cut_to is not None)
        end = self._end
        for size in range(len(end), 0, -1):  # the tokenizer may have appended some of it
            if token_ids[-size:] == end[:size]:
                token_ids = token_ids[:-size]
                break
        return self._fitted(token_ids, end, cut_to, field)

    async def _question(
        self, query: str, document: str, field: str, options: RerankOptions
    ) -> list[int]:
        instruction, cut_to = options.instruction, options.truncate_prompt_tokens
        head = _HEAD.format(
            instruction=RERANK_INSTRUCTION if instruction is None else instruction, query=query
        )
        is_cut = cut_to is not None or options.max_tokens_per_doc is not None
        token_ids = await self._encoded(f"{head} {document}", field, special=False, cut=is_cut)
        if options.max_tokens_per_doc is not None:
            num_head = len(await self._encoded(head, "query", special=False))
            token_ids = token_ids[: num_head + options.max_tokens_per_doc]
        prompt = [*self._before, *token_ids]
        if cut_to is None and len(prompt) + len(self._after) > self._max_seq_len:
            num_tokens = len(await self._encoded(head, "query", special=False))
            size = len(self._before) + num_tokens + len(self._after)
            if size >= self._max_seq_len:  # so that no document would fit
                raise ContextLengthError(size, 0, self._max_seq_len, prompt_field="query")
        return self._fitted(prompt, self._after, cut_to, field)

    async def _encoded(
        self, text: str, field: str, *, special: bool = True, cut: bool = False
    ) -> list[int]:
        """The tokens of a text, of any length if it will be cut."""
        try:
            return await self._encode(text, add_special_tokens=special, any_length=cut)
        except ContextLengthError as error:
            raise error.with_names(prompt_field=field) from None
        except TextTooLongError as error:
            error.param = field
            raise

    def _fitted(
        self, token_ids: list[int], end: list[int], cut_to: int | None, field: str
    ) -> list[int]:
        """A prompt that is cut before its end to `cut_to` tokens. Raises ContextLengthError."""
        limit = self._max_seq_len
        if cut_to is not None:
            limit = limit if cut_to == -1 else min(limit, cut_to)
            if limit <= len(end):
                raise InvalidRequestError(
                    "truncate_prompt_tokens", f"allowed: more than {len(end)}, or -1."
                )
            token_ids = token_ids[: limit - len(end)]
        size = len(token_ids) + len(end)
        if size > limit:
            raise ContextLengthError(size, 0, limit, prompt_field=field)
        if not size:
            raise InvalidRequestError(field, "must have at least one token.")
        return [*token_ids, *end]

    # -- vectors -----------------------------------------------------------------------------------

    def _vector(self, request: Request, dimensions: int | None) -> list[float]:
        """The vector of a request that has ended: cut first, and then normalised."""
        vector = _wanted(request).vector[:dimensions]
        if self._rules.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        floats: list[float] = vector.astype(np.float32).tolist()
        return floats


def _wanted(request: Request) -> PromptVector:
    wanted = request.extra(PromptVector)
    assert wanted is not None
    return wanted


def _answers(tokenizer: Tokenizer) -> tuple[int, ...]:
    token_ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
    if any(len(each) != 1 for each in token_ids):
        reason = "needs a tokenizer with a token for each of yes and no"
        raise ConfigError("--task", "rerank", reason)
    return tuple(each[0] for each in token_ids)
