"""What the routes serve: an engine that is loading, ready, draining or dead."""

from __future__ import annotations

from minisgl.errors import EngineStoppedError, ModelNotFoundError
from minisgl.server.config import ServerConfig
from minisgl.server.served_engine import ServedEngine
from minisgl.stats import EngineStats


class NotReadyError(EngineStoppedError):
    """The server answers, but has no engine that takes work: loading, draining or dead."""

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.code = phase


class EngineState:
    """Owned by the process, which moves it from phase to phase; the routes only look."""

    def __init__(self, config: ServerConfig, engine: ServedEngine | None = None) -> None:
        self.config = config
        self._engine = engine
        self._draining = False

    def start(self, engine: ServedEngine) -> None:
        self._engine = engine

    def drain(self) -> None:
        self._draining = True

    def engine(self) -> ServedEngine:
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
