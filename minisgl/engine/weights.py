"""The weights of an engine, which may be replaced while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from minisgl.distributed.addresses import GROUP_BACKENDS, GroupAddress
from minisgl.engine.changes import in_turn
from minisgl.engine.delivery import Delivery
from minisgl.engine.loop import StepLoop
from minisgl.engine.startup import Loaded
from minisgl.errors import (
    CheckpointError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    MinisglError,
    in_one_line,
)
from minisgl.models.filling import InMemory, tensors_of
from minisgl.models.hub import safetensors_files
from minisgl.models.reading import joined
from minisgl.models.refilling import TensorInfo, WeightTaker
from minisgl.parts.weights.host import MAX_VERSION_CHARS, WeightVersions
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

MAX_GROUP_RANKS = 1 << 16

# What becomes of requests that have arrived: those that have begun go on with the KV of the old
# weights, or compute all KV anew; or all end with the tokens that they have.
InFlight: TypeAlias = Literal["keep", "recompute", "abort"]
_Hold: TypeAlias = Literal["pause", "update"]  # why no step is computed, unless all sleeps
Tag: TypeAlias = Literal["weights", "kv_cache"]  # what sleeps
NamedTensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


class WeightsError(MinisglError):
    """A request is refused, or was ended, because of what is done with the weights."""

    http_status = 503
    type = "service_unavailable"


class WeightsIncompleteError(WeightsError):
    """An update of the weights has failed in its middle."""

    code = "weights_incomplete"


class WeightsReplacedError(WeightsError):
    """The weights that answered the request are replaced."""

    code = "weights_replaced"


class PausedError(WeightsError):
    """The engine is paused."""

    code = "paused"


class AsleepError(WeightsError):
    """The engine has given its memory back."""

    code = "asleep"


class Weights:
    """Replaces the weights between two steps, one update at a time. Used on the engine's loop.

    All is checked before the first number changes. An update that fails after that leaves the
    engine without whole weights: it refuses requests until an update of what is lacking succeeds.
    Meanwhile it computes nothing.
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
        self._num_nodes, self._num_ranks = loaded.config.nnodes, loaded.config.num_ranks
        self._scheduler, self._delivery, self._steps = scheduler, delivery, steps
        self._refuse, self._check_open = refuse, check_open
        self._versions = next(p for p in scheduler.parts if isinstance(p, WeightVersions))
        self.changing = asyncio.Lock()
        self._holds: set[_Hold] = set()
        self._asleep: set[Tag] = set()
        self._incomplete: WeightsError | None = None

    @property
    def version(self) -> str:
        """Of the weights; empty: those that were loaded at the start."""
        return self._versions.version

    @property
    def kv_of(self) -> bytes:
        """What tells the weights, and the KV that they compute, from others, also of this version;
        empty: those that were loaded at the start."""
        return self._versions.kv_of

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    @property
    def refusal(self) -> WeightsError | None:
        """Why requests are refused, if it is because of the weights."""
        if self._asleep:
            asleep = " and ".join(sorted(self._asleep))
            return AsleepError(f"The model is asleep: {asleep}. Allowed: to wake it up.")
        return self._incomplete

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
        becomes of requests that have arrived. Raises CheckpointError and UnsupportedModelError;
        nothing has changed then, unless a number is not finite. Raises ConfigError on several
        nodes, and EngineStoppedError.
        """
        if self._num_nodes > 1:
            reason = "tensors in memory reach the ranks of one machine; allowed: files, or 1"
            raise ConfigError("--nnodes", self._num_nodes, reason)
        given = dict(tensors)
        infos = [TensorInfo.of(name, InMemory(tensor)) for name, tensor in given.items()]
        return await self._update(
            infos,
            lambda taker: taker.take(given.items()),
            version,
            partial=partial,
            in_flight=in_flight,
        )

    async def update_from_files(
        self,
        folder: str,
        *,
        version: str | None = None,
        in_flight: InFlight = "keep",
    ) -> str:
        """The same from the safetensors files of a folder, which all machines have."""
        paths, infos = await asyncio.to_thread(_read, folder)
        return await self._update(
            infos, lambda taker: taker.take_files(paths), version, in_flight=in_flight
        )

    @in_turn
    async def _update(
        self,
        infos: Sequence[TensorInfo],
        take: Callable[[WeightTaker], None],
        version: str | None,
        *,
        partial: bool = False,
        in_flight: InFlight = "keep",
    ) -> str:
        taker = self._open_taker()
        version = secrets.token_hex(8) if version is None else version
        _check_version(version)
        _check_in_flight(in_flight)
        self._check_awake()
        await asyncio.to_thread(taker.begin, infos, partial)
        async with self._between_steps():
            try:
                await asyncio.to_thread(take, taker)
                await asyncio.to_thread(taker.end)
            except BaseException as error:
                if self._incomplete is None and await self._lacks(taker, error):
                    self._fail(error)
                raise
            lacks = await self._lacks(taker)
            self._disturb(in_flight, WeightsReplacedError("The weights were replaced."))
            self._take_version(version, secrets.token_bytes(16))
            if not lacks:
                self._incomplete = None
                self._judge()
        return version

    @in_turn
    async def begin(self) -> None:
        """Compute nothing until `finish`, so that updates meanwhile are seen all at once."""
        self._holds.add("update")
        async with self._between_steps():
            pass

    @in_turn
    async def finish(self, version: str | None = None) -> None:
        """Go on after `begin`. version: another name for the weights that have come."""
        if version is not None:
            await self._rename(version, "keep")
        self._release("update")

    @in_turn
    async def rename(self, version: str, in_flight: InFlight = "keep") -> None:
        """Give the weights another name, from the next token on. They and what is cached stay."""
        await self._rename(version, in_flight)

    async def _rename(self, version: str, in_flight: InFlight) -> None:
        _check_version(version)
        _check_in_flight(in_flight)
        async with self._between_steps():
            self._disturb(in_flight, WeightsReplacedError("The weights have another name."))
            self._take_version(version, self.kv_of)

    @in_turn
    async def read(self, name: str, num_rows: int) -> Any:
        """The first rows of a tensor, by its name in a checkpoint, as nested lists. Raises
        CheckpointError if there is none, or if it is kept in another form."""
        self._check_awake()
        return joined(name, await asyncio.to_thread(self._open_taker().read, name, num_rows))

    # -- groups ------------------------------------------------------------------------------------

    @in_turn
    async def join_group(self, address: GroupAddress) -> None:
        """Have all ranks join the group of a trainer. Raises InvalidRequestError for a place that
        is none, and CheckpointError if they cannot join."""
        if address.backend not in GROUP_BACKENDS:
            raise InvalidRequestError("backend", f"allowed: {' and '.join(GROUP_BACKENDS)}.")
        # The trainer is rank 0.
        for name, least, most in (
            ("master_port", 1, (1 << 16) - 1),
            ("world_size", 1 + self._num_ranks, MAX_GROUP_RANKS),
            ("rank_offset", 1, address.world_size - self._num_ranks),
        ):
            if not least <= getattr(address, name) <= most:
                raise InvalidRequestError(name, f"allowed: {least} to {most}.")
        await asyncio.to_thread(self._open_taker().join, address)

    @in_turn
    async def leave_group(self, name: str) -> None:
        """Leave a group, if it is one."""
        await asyncio.to_thread(self._open_taker().leave, name)

    async def update_from_group(
        self,
        group: str,
        infos: Sequence[TensorInfo],
        *,
        version: str | None = None,
        in_flight: InFlight = "keep",
        packed: bool = False,
    ) -> str:
        """Replace the weights that the trainer of a group sends, in the order of `infos`; the
        others stay. packed: as the bytes of several. Raises as `update` does."""
        return await self._update(
            infos,
            lambda taker: taker.take_group(group, infos, packed),
            version,
            partial=True,
            in_flight=in_flight,
        )

    def reset_cache(self) -> None:
        """Let no request match what is cached now. Updates do this themselves."""
        self._check_alive()
        self._take_version(self.version, secrets.token_bytes(16))

    # -- pauses ------------------------------------------------------------------------------------

    @in_turn
    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Compute nothing until `resume`; requests that arrive meanwhile wait. Raises
        EngineStoppedError."""
        _check_in_flight(in_flight)
        self._holds.add("pause")
        async with self._between_steps():
            self._disturb(in_flight, PausedError("The server is paused."))

    @in_turn
    async def resume(self) -> None:
        self._release("pause")

    @contextlib.asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Let no step run inside. Raises EngineStoppedError."""
        self._check_alive()
        await self._steps.pause()
        try:
            self._check_alive()
            yield
        finally:
            self._go_on()

    def _release(self, reason: _Hold) -> None:
        self._holds.discard(reason)
        self._go_on()

    def _go_on(self) -> None:
        """Compute steps again, unless something else holds them, sleeps or is not whole."""
        if not (self._holds or self._asleep or self._incomplete):
            self._steps.resume()

    # -- sleep -------------------------------------------------------------------------------------

    @in_turn
    async def sleep(self, level: int = 1, in_flight: InFlight = "recompute") -> None:
        """Give the memory of weights and KV cache back until `wake`; requests are refused.

        level: 1 keeps the weights in memory of the host; 2 drops them, and a whole update must
        follow. in_flight: requests that have arrived and "keep" or "recompute" wait, and compute
        their KV anew; else they end. No later request matches what was cached.
        Raises ConfigError if other engines share the pages, UnsupportedModelError for weights that
        cannot be replaced, DeviceMemoryError, and EngineStoppedError; what was awake is then awake
        again, if it has room.
        """
        _check_in_flight(in_flight)
        if level not in (1, 2):
            raise InvalidRequestError("level", "allowed: 1 and 2.")
        if self._steps.moves.is_shared:
            reason = "other engines may read the KV cache at any time; allowed: to sleep unshared"
            raise ConfigError("address", self._steps.moves.exchange.address, reason)
        taker, all_tags = self._open_taker(), {*get_args(Tag)}
        if "weights" in self._asleep:
            level = 1  # they are kept or dropped already
        async with self._between_steps():
            awake, self._asleep = all_tags - self._asleep, all_tags
            if level == 2:
                self._incomplete = WeightsIncompleteError(
                    "The weights were dropped. Allowed: an update of all of them."
                )
            self._judge()
            try:
                await asyncio.to_thread(taker.sleep, level == 2)
            except BaseException as error:
                if not await self._lacks(taker, error):
                    self._incomplete = None
                self._drop_kv("recompute")  # some ranks may have slept
                await self._wake(taker, awake)
                raise
            self._drop_kv(in_flight)

    def _drop_kv(self, in_flight: InFlight) -> None:
        in_flight = "recompute" if in_flight == "keep" else in_flight
        self._disturb(in_flight, AsleepError("The model was put to sleep."))
        self._scheduler.kv.drop_written_since(0)

    @in_turn
    async def wake(self, tags: Iterable[str] = ()) -> None:
        """Take the memory of "weights" or "kv_cache" again, by default of both; once both are
        awake, requests are computed again. Raises DeviceMemoryError if there is too little, and
        the model sleeps on."""
        wanted = {*tags} or {*get_args(Tag)}
        if not wanted <= {*get_args(Tag)}:
            raise InvalidRequestError("tags", f"allowed: {' and '.join(get_args(Tag))}.")
        await self._wake(self._open_taker(), self._asleep & wanted)
        self._go_on()

    async def _wake(self, taker: WeightTaker, tags: set[Tag]) -> None:
        await asyncio.to_thread(taker.wake, sorted(tags))
        if tags == self._asleep:
            await asyncio.to_thread(taker.capture)
        self._asleep -= tags
        self._judge()

    def _check_awake(self) -> None:
        if "weights" in self._asleep:
            raise AsleepError("The weights are asleep. Allowed: to wake them up first.")

    def _open_taker(self) -> WeightTaker:
        self._check_alive()
        assert self._taker is not None, "the weights were loaded"
        return self._taker

    def _check_alive(self) -> None:
        with contextlib.suppress(WeightsError):
            self._check_open()

    async def _lacks(self, taker: WeightTaker, error: BaseException | None = None) -> bool:
        """Whether the weights are not whole; supposed so after an error that lets no one ask."""
        if isinstance(error, EngineStoppedError | asyncio.CancelledError):
            return True
        return await asyncio.to_thread(taker.lacks)

    def _fail(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, MinisglError) else type(error).__name__
        self._incomplete = WeightsIncompleteError(
            f"An update of the weights has failed, which are incomplete: {reason} Allowed: another "
            "update, at least of what was to come."
        )
        self._judge()
        for stream in [*self._delivery.streams.values()]:
            self._delivery.cancel(stream.request, self._incomplete)

    def _judge(self) -> None:
        self._refuse(self.refusal)

    def _take_version(self, version: str, kv_of: bytes) -> None:
        requests = [stream.request for stream in self._delivery.streams.values()]
        self._versions.change(version, kv_of, requests)

    def _disturb(self, in_flight: InFlight, error: WeightsError) -> None:
        """error: of requests that are to end and generate nothing, which have no part to answer."""
        if in_flight == "recompute":
            self._scheduler.retract_all()
        elif in_flight == "abort":
            for stream in [*self._delivery.streams.values()]:
                if stream.detokenizer is not None:
                    stream.text.append(stream.detokenizer.flush(natural=False))
                self._delivery.cancel(stream.request, None if stream.request.max_tokens else error)


def _check_version(version: str) -> None:
    if not (isinstance(version, str) and 1 <= len(version) <= MAX_VERSION_CHARS):
        allowed = f"allowed: a name of 1 to {MAX_VERSION_CHARS} characters"
        raise InvalidRequestError("version", f"{allowed}.")


def _check_in_flight(in_flight: str) -> None:
    if in_flight not in get_args(InFlight):
        raise InvalidRequestError("in_flight", f"allowed: {', '.join(get_args(InFlight))}.")


def _read(folder: str) -> tuple[list[str], list[TensorInfo]]:
    """The safetensors files of a folder, and what is in them. Raises CheckpointError."""
    try:
        files = safetensors_files(Path(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder!r:.200} cannot be read: {in_one_line(error)}.") from error
    infos = [TensorInfo.of(name, stored) for file in files for name, stored in tensors_of(file)]
    return [str(file) for file in files], infos
