"""The weights of an engine, which may be replaced while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from minisgl.engine.delivery import Delivery
from minisgl.engine.loop import StepLoop
from minisgl.engine.startup import Loaded
from minisgl.errors import ConfigError, InvalidRequestError, MinisglError
from minisgl.models.filling import InMemory, tensors_of
from minisgl.models.hub import safetensors_files
from minisgl.models.refilling import TensorInfo, WeightTaker
from minisgl.parts.weights.host import WeightVersions
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

MAX_VERSION_CHARS = 256

# What becomes of requests in flight: they go on with the KV of the old weights, compute all KV
# anew, or end with an error.
InFlight: TypeAlias = Literal["keep", "recompute", "abort"]
NamedTensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


class WeightsIncompleteError(MinisglError):
    """An update of the weights has failed in its middle."""

    http_status = 503
    type = "service_unavailable"
    code = "weights_incomplete"


class WeightsReplacedError(MinisglError):
    """A request was ended because the weights that answered it are replaced."""

    http_status = 503
    type = "service_unavailable"
    code = "weights_replaced"


class Weights:
    """Replaces the weights between two steps, one update at a time. Used on the engine's loop.

    All is checked before the first number changes. An update that fails after that leaves the
    engine without whole weights: it refuses requests until another one, of all weights, succeeds.
    """

    def __init__(
        self,
        loaded: Loaded[Any],
        scheduler: Scheduler,
        delivery: Delivery,
        steps: StepLoop,
        refuse: Callable[[MinisglError | None], object],
        check_open: Callable[[], object],
    ) -> None:
        """refuse: from now on refuses new requests with the error, if there is one. check_open:
        raises EngineStoppedError, or what `refuse` was told."""
        self._taker = loaded.weights
        self._num_nodes = loaded.config.nnodes
        self._scheduler, self._delivery, self._steps = scheduler, delivery, steps
        self._refuse, self._check_open = refuse, check_open
        self._versions = next(p for p in scheduler.parts if isinstance(p, WeightVersions))
        self._updating = asyncio.Lock()
        self._is_whole = True

    @property
    def version(self) -> str:
        """Of the weights; empty: those that were loaded at the start."""
        return self._versions.version

    async def update(
        self,
        tensors: NamedTensors,
        *,
        version: str | None = None,
        partial: bool = False,
        in_flight: InFlight = "keep",
    ) -> str:
        """Replace the weights by tensors with the names of the checkpoint; returns their version.

        tensors: of the dtypes of a checkpoint, on any device. version: a name for the weights, by
        default a random one. partial: the others stay; else all must be there. in_flight: what
        becomes of requests that have begun. Raises CheckpointError and UnsupportedModelError;
        nothing has changed then, unless a number is not finite. Raises WeightsIncompleteError for
        a part where the rest is not whole, ConfigError on several nodes, and EngineStoppedError.
        """
        if self._num_nodes > 1:
            reason = "tensors in memory reach the ranks of one machine; allowed: files, or 1"
            raise ConfigError("--nnodes", self._num_nodes, reason)
        given = dict(tensors)
        infos = [TensorInfo.of(name, InMemory(tensor)) for name, tensor in given.items()]
        return await self._in_turn(
            self._update(
                infos,
                lambda taker: taker.take(given.items()),
                version,
                partial=partial,
                in_flight=in_flight,
            )
        )

    async def update_from_files(
        self,
        folder: str,
        *,
        version: str | None = None,
        in_flight: InFlight = "keep",
    ) -> str:
        """The same from the safetensors files of a folder, which all machines have."""
        files = await asyncio.to_thread(safetensors_files, Path(folder))
        infos = await asyncio.to_thread(_infos_of, files)
        paths = [str(file) for file in files]
        return await self._in_turn(
            self._update(infos, lambda taker: taker.take_files(paths), version, in_flight=in_flight)
        )

    async def _in_turn(self, update: Coroutine[Any, Any, str]) -> str:
        """Make one update after the other. Who has asked may leave meanwhile."""

        async def updated() -> str:
            async with self._updating:
                return await update

        return await asyncio.shield(asyncio.ensure_future(updated()))

    async def _update(
        self,
        infos: Sequence[TensorInfo],
        take: Callable[[WeightTaker], None],
        version: str | None,
        *,
        partial: bool = False,
        in_flight: InFlight = "keep",
    ) -> str:
        self._check_alive()
        taker, version = self._taker, secrets.token_hex(8) if version is None else version
        assert taker is not None, "the weights were loaded"
        if not (isinstance(version, str) and 1 <= len(version) <= MAX_VERSION_CHARS):
            allowed = f"allowed: a name of 1 to {MAX_VERSION_CHARS} characters"
            raise InvalidRequestError("version", f"{allowed}.")
        if in_flight not in get_args(InFlight):
            raise InvalidRequestError("in_flight", f"allowed: {', '.join(get_args(InFlight))}.")
        if partial and not self._is_whole:
            raise WeightsIncompleteError("The weights are incomplete; allowed: an update of all.")
        await asyncio.to_thread(taker.begin, infos, partial)
        await self._steps.pause()
        try:
            self._check_alive()
            try:
                await asyncio.to_thread(take, taker)
                await asyncio.to_thread(taker.end)
            except BaseException as error:
                self._fail(error)
                raise
            self._change(version, in_flight)
        finally:
            self._steps.resume()
        return version

    def _check_alive(self) -> None:
        with contextlib.suppress(WeightsIncompleteError):
            self._check_open()

    def _fail(self, error: BaseException) -> None:
        self._is_whole = False
        reason = str(error) if isinstance(error, MinisglError) else type(error).__name__
        incomplete = WeightsIncompleteError(
            f"An update of the weights has failed, which are incomplete: {reason} Only another "
            "update, of all weights, is allowed."
        )
        self._refuse(incomplete)
        self._end_requests(incomplete)

    def _change(self, version: str, in_flight: InFlight) -> None:
        if in_flight == "abort":
            self._end_requests(WeightsReplacedError("The weights of the model were replaced."))
        elif in_flight == "recompute":
            self._scheduler.retract_all()
        requests = [stream.request for stream in self._delivery.streams.values()]
        self._versions.change(version, secrets.token_bytes(16), requests)
        self._is_whole = True
        self._refuse(None)

    def _end_requests(self, error: MinisglError) -> None:
        for stream in [*self._delivery.streams.values()]:
            self._delivery.cancel(stream.request, error)


def _infos_of(files: Sequence[Path]) -> list[TensorInfo]:
    return [TensorInfo.of(name, stored) for file in files for name, stored in tensors_of(file)]
