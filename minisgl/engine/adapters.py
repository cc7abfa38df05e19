"""The adapters of an engine by their names, which come and go while it runs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl.engine.changes import in_turn
from minisgl.engine.delivery import Delivery
from minisgl.engine.startup import Loaded
from minisgl.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from minisgl.lora.files import AdapterError, AdapterFacts
from minisgl.parts.adapters.host import Adapted, Adapters
from minisgl.scheduler.scheduler import Scheduler

MAX_NAME_CHARS = 256
logger = logging.getLogger(__name__)


class AdapterExistsError(InvalidRequestError):
    """Another adapter has this name already."""

    http_status = 409
    code = "adapter_exists"


class LoadedAdapters(dict[str, Adapted]):
    """What asks for each adapter, by its name. Used on the engine's loop.

    Each load has a number of its own, so that a number means one adapter or none, whatever is on
    its way.
    """

    def __init__(
        self,
        loaded: Loaded[Any],
        scheduler: Scheduler,
        delivery: Delivery,
        check_open: Callable[[], object],
        wake: Callable[[], None],
    ) -> None:
        """check_open: raises EngineStoppedError. wake: soon launches the plans that there are."""
        self._reader = loaded.adapters
        parts = (part for part in scheduler.parts if isinstance(part, Adapters))
        self._part = next(parts, None)
        self._delivery, self._check_open, self._wake = delivery, check_open, wake
        self._model = loaded.model_name
        self._numbers = itertools.count()
        for name, facts in ({} if self._reader is None else self._reader.first).items():
            self._add(name, next(self._numbers), facts)
        self.changing = asyncio.Lock()

    @property
    def loaded(self) -> str:
        """What messages say of them."""
        return f"loaded: {', '.join(self) or 'none'}."

    def named(self, name: object) -> Adapted:
        """What asks for an adapter. Raises InvalidRequestError."""
        if not isinstance(name, str):
            raise InvalidRequestError("lora", f"must be the name of an adapter; {self.loaded}")
        if name not in self:
            raise InvalidRequestError("lora", f"there is no adapter {name:.80}; {self.loaded}")
        return self[name]

    async def load(self, name: str, folder: str, *, root: str | None = None) -> None:
        """Load an adapter on all ranks, beside the steps. The same once more changes nothing.

        root: a folder outside of which nothing is read. Raises ConfigError where there is no room
        for adapters, InvalidRequestError for the name, AdapterExistsError, AdapterError for the
        files, and EngineStoppedError; then nothing has changed.
        """
        if self._part is None:
            raise ConfigError("--max-loras", 0, "there is no room for adapters; allowed: 1 or more")
        texts = isinstance(name, str) and isinstance(folder, str) and folder
        if not (texts and name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARS):
            allowed = f"a name of 1 to {MAX_NAME_CHARS} printable characters, and a folder"
            raise InvalidRequestError("lora", f"allowed: {allowed}; {self.loaded}")
        await self._load(self._part, name, folder, root)

    @in_turn
    async def _load(self, part: Adapters, name: str, folder: str, root: str | None) -> None:
        self._check_open()
        assert self._reader is not None, "there is room"
        number = next(self._numbers)
        try:
            facts = await asyncio.to_thread(self._reader.read, number, folder, root)
            self._check_open()
            if name not in self:
                self._add(name, number, facts)
            elif self[name].kv_of != facts.digest:
                reason = f"{name} is another adapter; unload that first, or give another name"
                raise AdapterExistsError("lora", f"{reason}; {self.loaded}")
        except AdapterError as error:
            raise AdapterError(f"{str(error).removesuffix('.')}; {self.loaded}") from error
        finally:
            if name not in self or self[name].number != number:
                part.unload(number, ())
                self._wake()

    def _add(self, name: str, number: int, facts: AdapterFacts) -> None:
        assert self._part is not None, "there is room"
        self._part.load(number)
        self[name] = Adapted(number, facts.digest)
        logger.info("Loaded the adapter %s", name)
        base, own = facts.base, self._model
        if base and Path(base).name.lower() != Path(own).name.lower():
            logger.warning("The adapter %s was trained for %.200r, not for %s", name, base, own)

    @in_turn
    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter from now on. Its memory is free after the last that
        has it. Raises ModelNotFoundError and EngineStoppedError."""
        self._check_open()
        if self._part is None or not isinstance(name, str) or name not in self:
            raise ModelNotFoundError(f"There is no adapter {name!r:.80}; {self.loaded}")
        adapted = self.pop(name)
        logger.info("Unloaded the adapter %s", name)
        requests = (stream.request for stream in self._delivery.streams.values())
        self._part.unload(
            adapted.number, [each for each in requests if each.extra(Adapted) == adapted]
        )
        self._wake()
