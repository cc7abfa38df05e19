"""What the routes serve: an engine that is loading, ready, draining or dead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from minisgl.config import Capacity
from minisgl.engine.stats import EngineStats
from minisgl.errors import EngineStoppedError, ModelNotFoundError
from minisgl.request import EVERYONE, OutputDelta, SamplingParams, Tenant
from minisgl.server.config import ServerConfig


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int, /) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def byte_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]: ...
    @property
    def drops_first_space(self) -> bool: ...


class Defaults(Protocol):
    def sampling(self, **overrides: Any) -> SamplingParams: ...


class OutputStream(Protocol):
    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...
    def abort(self) -> None: ...


class Engine(Protocol):
    """The part of `AsyncEngine` that the server uses; tests put a scripted one in its place."""

    @property
    def model_name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def defaults(self) -> Defaults: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def stalled(self) -> str | None: ...

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]: ...
    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        /,
        **template_options: Any,
    ) -> list[int]: ...
    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> OutputStream: ...
    def stats(self) -> EngineStats: ...
    def warm(self) -> None: ...
    async def drain(self, seconds: float, /) -> None: ...
    async def close(self) -> None: ...


class NotReadyError(EngineStoppedError):
    """The server answers, but has no engine that takes work: loading, draining or dead."""

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.code = phase


class Service:
    """Owned by the process, which moves it from phase to phase; the routes only look."""

    def __init__(self, config: ServerConfig, engine: Engine | None = None) -> None:
        self.config = config
        self._engine = engine
        self._draining = False

    def start(self, engine: Engine) -> None:
        self._engine = engine

    def drain(self) -> None:
        self._draining = True

    def engine(self) -> Engine:
        """The engine, if it takes work; raises NotReadyError."""
        if self._engine is None:
            raise NotReadyError("loading", "The model is still loading.")
        if self._engine.failure is not None:
            raise NotReadyError("dead", f"The engine has failed: {self._engine.failure}")
        if self._draining:
            raise NotReadyError("draining", "The server is shutting down.")
        return self._engine

    def stats(self) -> EngineStats | None:
        """Of the engine in any phase; None while it is loading."""
        return None if self._engine is None else self._engine.stats()

    @property
    def dead(self) -> bool:
        return self._engine is not None and self._engine.failure is not None

    def model_names(self) -> tuple[str, ...]:
        """What the model is called here; the first is its name where a request gives none."""
        return self.config.served_model_name or (self.engine().model_name,)

    def first_name(self) -> str | None:
        """Of the model, in any phase; None while that is not known."""
        if self.config.served_model_name:
            return self.config.served_model_name[0]
        return None if self._engine is None else self._engine.model_name

    def model_name(self, wanted: str | None) -> str:
        """The name to answer under; raises ModelNotFoundError."""
        names = self.model_names()
        if wanted is None:
            return names[0]
        if wanted not in names:
            error = ModelNotFoundError(
                f"The model {wanted!r} does not exist; there is {' and '.join(names)}."
            )
            error.param = "model"
            raise error
        return wanted
