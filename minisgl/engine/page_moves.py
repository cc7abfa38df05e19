"""Pages that travel between the tiers of one engine, and between engines, beside its steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from hashlib import blake2b
from typing import Any

from minisgl.config import EngineConfig, ResolvedConfig, page_bytes
from minisgl.distributed.addresses import check_address
from minisgl.engine.prefix_exchange import OwnSide, PrefixExchange
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import HostStats, TransferStats
from minisgl.engine.waiting_thread import WaitingThread
from minisgl.errors import ConfigError, EngineStoppedError
from minisgl.kvcache.copies import HostTraffic
from minisgl.parts.copies.host import CopyPlan
from minisgl.runner.setup import read_setup
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler


def check_sharing(config: EngineConfig) -> None:
    """Raise MinisglError if an engine with these options cannot share pages. Reads what the model
    is, but not its weights. Blocks."""
    _check(read_setup(config).config)


def _check(config: ResolvedConfig) -> None:
    if not config.num_host_pages:
        reason = "sharing pages between engines needs a host cache; allowed: GB above 0"
        raise ConfigError("--host-cache", 0, reason)
    if config.nnodes > 1:
        reason = "engines that exchange pages are on one node each; allowed: 1"
        raise ConfigError("--nnodes", config.nnodes, reason)


class PageMoves:
    """Starts moves and tells the scheduler of their ends. Used on the engine's loop."""

    def __init__(
        self, loaded: Loaded[Any], scheduler: Scheduler, launch: Callable[[], None]
    ) -> None:
        """launch: soon launches the plans that there are."""
        self._config = loaded.config
        self._model = loaded.model
        self._runner = loaded.runner
        self._fingerprint = loaded.fingerprint
        self._has_disk = loaded.disk is not None
        self._kv = scheduler.kv
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._landings: WaitingThread[Any] | None = None
        if self._config.num_host_pages:
            self._landings = WaitingThread("minisgl-landings", self._wait_for)
            if loaded.ranks is not None:
                loaded.ranks.landed = partial(self._ends_soon, self._landed)
        self._ended = asyncio.Event()  # a move, or all of this
        self._exchange: PrefixExchange | None = None
        self._closed = False

    # -- between tiers -----------------------------------------------------------------------------

    def launched(self, plan: StepPlan, handle: Any) -> None:
        """Follow the loads of a launched plan that rank 0 has."""
        if self._landings is None:
            return
        planned = plan.part(CopyPlan)
        if planned is not None and planned.of_ranks[0].loads:
            self._landings.add(handle)

    def _wait_for(self, handle: Any) -> None:
        """Wait for the loads of a launched plan. Called by a thread of their own."""
        for load in self._runner.loads(handle):
            self._ends_soon(self._landed, load)

    def _landed(self, load: int) -> None:
        for cache in self._kv.of_ranks:
            cache.loads.landed(load)

    def start(self) -> None:
        """Start the moves that have begun. If the runner has stopped, end them and raise
        EngineStoppedError."""
        moves = self._kv.moves.take()
        if not moves:
            return
        try:
            self._runner.move(moves, partial(self._ends_soon, self._kv.moves.end))
        except EngineStoppedError:
            for move in moves:
                self._kv.moves.end(move.id, 0)
            raise

    def _ends_soon(self, end: Callable[..., None], *what: int) -> None:
        """Have the loop end a load or a move. Called by any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
            self._loop.call_soon_threadsafe(self._end, end, *what)

    def _end(self, end: Callable[..., None], *what: int) -> None:
        """End a load or a move, and let the requests run that have waited for it."""
        if not self._closed:
            end(*what)
            self._ended.set()
            self._launch()

    async def store_all(self) -> None:
        """Write to disk what host memory holds. Nothing may be in flight."""
        for cache in self._kv.of_ranks:
            if cache.disk is not None:
                cache.disk.store_all()
        self.start()
        while not self._closed and any(move.uses_disk for move in self._kv.moves.under_way):
            self._ended.clear()
            await self._ended.wait()

    # -- between engines ---------------------------------------------------------------------------

    async def share(
        self, address: str, *, always_load: bool, check_open: Callable[[], object]
    ) -> str:
        """Let other engines find this one; see SharedPages. Raises what `check_open` raises, where
        the engine stops meanwhile."""
        config = self._config
        _check(config)
        check_open()
        place, token = await asyncio.to_thread(check_address, address, config)
        fingerprint = await asyncio.to_thread(self._fingerprint)
        # What decides which layers have windows beside pages, and what a state keeps of runs.
        window = None if config.windows is None else config.windows.window
        beside = (window, config.max_run if self._model.states else None)
        fingerprint = blake2b(fingerprint + repr(beside).encode(), digest_size=32).digest()
        layers = self._model.on_rank(config.tp).layer_specs(config.kv_dtype)
        num_parts = config.tp // config.num_attending
        num_bytes = num_parts * page_bytes(config.whole_layers(layers), config.page_size)
        try:
            listening = await asyncio.to_thread(self._runner.listen, address, token)
            check_open()
            own = OwnSide(place, token, listening, fingerprint, num_bytes)
            self._exchange = PrefixExchange(self._kv, own, self.start, self._launch)
        except OSError as error:
            reason = f"KV pages cannot be exchanged here: {error.strerror or error}"
            raise ConfigError("address", address, reason) from error
        if always_load:
            for cache in self._kv.of_ranks:
                cache.tiers.load_always()
        return self._exchange.address

    @property
    def is_shared(self) -> bool:
        """Whether other engines may find this one."""
        return self._exchange is not None

    @property
    def exchange(self) -> PrefixExchange:
        """Not before `share`."""
        assert self._exchange is not None, "share comes first"
        return self._exchange

    # -- the end, and figures ----------------------------------------------------------------------

    def close(self) -> None:
        """Take part in no more moves; nothing waits for those under way. Idempotent."""
        self._closed = True
        self._ended.set()
        if self._exchange is not None:
            self._exchange.close()

    def end(self) -> None:
        """End the thread that waits for loads. Any thread may call it."""
        if self._landings is not None:
            self._landings.end()

    def transfer_stats(self) -> TransferStats | None:
        return None if self._exchange is None else deepcopy(self._exchange.stats)

    def host_stats(self) -> HostStats | None:
        if not self._config.num_host_pages:
            return None
        return HostStats(
            page_size=self._config.page_size,
            num_pages=self._config.num_host_pages * self._config.num_attending,
            num_used_pages=sum(cache.tiers.host.pool.num_used for cache in self._kv.of_ranks),
            traffic=self._runner.traffic() or HostTraffic(),
            has_disk=self._has_disk,
        )
