"""The phase of the engine behind the routes: loading, ready, draining or dead."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp, Scope

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.engine.stats import EngineStats
from minisgl.errors import ConfigError, EngineStoppedError, ModelNotFoundError
from minisgl.server.answers.reply import Reply
from minisgl.server.config import ServerConfig, check_utf8
from minisgl.server.history import History
from minisgl.text.parsing.selection import AnswerFormat, choose_format

if TYPE_CHECKING:  # they import torch
    from minisgl.device.gpu_memory import GPUMemory
    from minisgl.engine import AsyncEngine

# The application for a request, given its scope, its reply and what answers it.
Around = Callable[[Scope, Reply, ASGIApp], ASGIApp]

logger = logging.getLogger(__name__)

# The options of the engine that change its answers, if only in their rounding.
SETUP = ("dtype", "device", "quantization", "tp", "pp", "kv_cache_dtype", "dense_copies", "attn")
DEMO_NAME = "demo"  # of the demo model, as its folder is called


class NotReadyError(EngineStoppedError):
    """The engine accepts no requests: it is loading, draining, dead or stalled (`code`)."""

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.code = phase


class Loading(NamedTuple):
    phase: str  # empty before the first
    fraction: float  # 0 to 1; 0 if it is unknown

    def __str__(self) -> str:
        share = f", {100 * self.fraction:.0f} %" if self.fraction else ""
        return f" ({self.phase}{share})" if self.phase else ""


def base_names(config: ServerConfig, options: EngineConfig) -> tuple[str, ...]:
    """The names of the model itself. Raises ConfigError for adapters that do not go with them or
    that there is no room for."""
    names = config.served_model_name or (options.model or DEMO_NAME,)
    for name in options.adapters:
        check_utf8("--lora", name)
        if name in names:
            reason = "this is a name of the model itself; allowed: another name for the adapter"
            raise ConfigError("--lora", name, reason)
    if config.lora_root and not (options.lora or options.max_loras):
        reason = "there is no room for adapters; allowed: with --max-loras"
        raise ConfigError("--lora-root", config.lora_root, reason)
    return names


class EngineState:
    """The engine and its phase. The process changes the phase; the routes only read it."""

    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncEngine | None = None,
        options: EngineConfig | None = None,
    ) -> None:
        """options: of the engine; None: the defaults. Raises ConfigError for names of adapters."""
        self.config = config
        self.options = options or EngineConfig()
        base_names(config, self.options)
        self._engine = engine
        self._draining = False
        self._loading = Loading("", 0.0)
        self.replica = ""  # its name among several, in the ids of responses that it keeps
        self.history = History(self.stats)
        # See answers/handover.py; None: the engine does whole requests.
        self.around: Around | None = None

    def load(self, phase: str, fraction: float) -> None:
        """Report that `fraction` of a phase of loading is done, 0 to 1; 0 if that is unknown.

        Any thread may call it.
        """
        self._loading = Loading(phase, fraction)

    def start(self, engine: AsyncEngine) -> None:
        self._engine = engine
        if engine.vectors.task == "generate":
            logger.info("Parsing answers: %s", self.answer_format)

    def drain(self) -> None:
        self._draining = True

    def engine(self) -> AsyncEngine:
        """The engine, if it accepts requests; raises NotReadyError."""
        if self._engine is None:
            raise NotReadyError("loading", f"The model is still loading{self._loading}.")
        if self._engine.failure is not None:
            raise NotReadyError("dead", f"The engine has failed: {self._engine.failure}")
        if self._draining:
            raise NotReadyError("draining", "The server is shutting down.")
        return self._engine

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and calls; raises NotReadyError."""
        tokenizer, config = self.engine().tokenizer, self.config
        if tokenizer is None:
            return AnswerFormat(None, None)
        return choose_format(
            tokenizer,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
        )

    @property
    def fingerprint(self) -> str:
        """Another one where an equal request may get another answer; raises NotReadyError."""
        engine = self.engine()
        loaded = [(name, each.kv_of) for name, each in engine.adapters.items()]
        parts = ascii((self._setup, loaded, engine.weights.kv_of)).encode()
        return f"fp_{hashlib.blake2b(parts, digest_size=5).hexdigest()}"

    @cached_property
    def _setup(self) -> tuple[object, ...]:
        setup = (getattr(self.options, name) for name in SETUP)
        return __version__, self.engine().model_name, *setup

    @property
    def loading(self) -> Loading | None:
        """How far loading is; None once the engine is there."""
        return self._loading if self._engine is None else None

    def stats(self) -> EngineStats | None:
        """Statistics of the engine in any phase; None while it is loading."""
        return None if self._engine is None else self._engine.stats()

    @property
    def num_cache_tokens(self) -> int:
        """That the KV cache has room for, on all ranks; 0 while the model is loading."""
        return 0 if self._engine is None else self._engine.capacity.num_tokens

    def gpu_memory(self) -> GPUMemory | None:
        """The memory of the GPU of rank 0; None without one, and while the model is loading."""
        if self._engine is None or self._engine.config.device != "cuda":
            return None
        from minisgl.device.gpu_memory import gpu_memory  # here, because it imports torch

        return gpu_memory()

    @property
    def dead(self) -> bool:
        return self._engine is not None and self._engine.failure is not None

    def model_names(self) -> tuple[str, ...]:
        """The names of the model itself; the first is used if a request gives none."""
        return self.config.served_model_name or (self.engine().model_name,)

    def first_name(self) -> str | None:
        """The first name of the model, in any phase; None while it is unknown."""
        if self.config.served_model_name:
            return self.config.served_model_name[0]
        return None if self._engine is None else self._engine.model_name

    def model_name(self, wanted: str | None) -> str:
        """The name, of the model itself or of an adapter, that the answer to a request for `wanted`
        has. Raises ModelNotFoundError."""
        names, adapters = self.model_names(), self.engine().adapters
        if wanted is None:
            return names[0]
        if wanted not in names and wanted not in adapters:
            more = f"; adapters: {', '.join(adapters)}" if adapters else ""
            error = ModelNotFoundError(
                f"The model {wanted!r} does not exist; available: {', '.join(names)}{more}."
            )
            error.param = "model"
            raise error
        return wanted
