"""The parts of `AsyncEngine` that the server uses, as protocols: tests pass a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from minisgl.config import Capacity
from minisgl.engine.conversation import CompiledGrammar, TemplatedEngine
from minisgl.engine.stats import EngineStats
from minisgl.engine.vector_types import Embedding, EmbedOptions, Input, RerankOptions, Score
from minisgl.request import EVERYONE, Extra, OutputDelta, SamplingParams, StructuredOutput, Tenant
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.selection import Vocabulary


class ServedTokenizer(Vocabulary, Protocol):
    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int, /) -> str: ...
    @property
    def drops_first_space(self) -> bool: ...


class SamplingDefaults(Protocol):
    def sampling(self, **overrides: Any) -> SamplingParams: ...


class ServedStream(Protocol):
    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...
    def abort(self) -> None: ...


class ServedVectors(Protocol):
    @property
    def task(self) -> str: ...
    async def embed(
        self,
        inputs: Sequence[Input],
        options: EmbedOptions,
        *,
        cache_salt: str | None,
        tenant: Tenant,
    ) -> list[Embedding]: ...
    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        options: RerankOptions,
        *,
        cache_salt: str | None,
        tenant: Tenant,
    ) -> list[Score]: ...


class ServedEngine(TemplatedEngine, Protocol):
    @property
    def vectors(self) -> ServedVectors: ...
    @property
    def model_name(self) -> str: ...
    @property
    def tokenizer(self) -> ServedTokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def defaults(self) -> SamplingDefaults: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def stalled(self) -> str | None: ...

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]: ...
    async def compile(
        self, structured: StructuredOutput | None, client: str = ""
    ) -> CompiledGrammar: ...
    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        parser: AnswerParser | None = None,
        extras: Sequence[Extra] = (),
    ) -> ServedStream: ...
    def stats(self) -> EngineStats: ...
    def warm(self) -> None: ...
    async def drain(self, seconds: float, /) -> None: ...
    async def close(self) -> None: ...

    # Pages of others, see handover.py.
    async def share_pages(self, address: str, *, always_load: bool) -> str: ...
    async def offer_pages(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool: ...
    async def fetch_pages(
        self,
        address: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool: ...
