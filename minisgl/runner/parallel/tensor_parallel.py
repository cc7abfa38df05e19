"""Runs several ranks through the interface of one: rank 0 here, the others in processes.

    this process                                   rank 1, 2, ...
    launch(plan) ── the encoded plan ────────────▶ launch(plan)
    collect(handle): the tokens of rank 0          (the same tokens, which are dropped)

A step that fails on one rank is fatal for all: the others hang in a collective, which on a GPU
nothing can interrupt. So a thread of this process starts and watches the other ranks; if one ends,
every caller gets an error, even if the calling thread hangs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minisgl.config import ResolvedConfig
from minisgl.distributed.communicator import Communicator
from minisgl.errors import CheckpointError, ConfigError, MinisglError
from minisgl.kvcache.copies import HostTraffic
from minisgl.kvcache.store import Transfer
from minisgl.matcher import MaskRows
from minisgl.models.config import ModelConfig
from minisgl.runner.disk_lane import Done
from minisgl.runner.load import Report
from minisgl.runner.parallel.agreement import Agreement
from minisgl.runner.parallel.channel import PipeChannel
from minisgl.runner.parallel.launcher import SpawnLauncher, spawn_obstacle
from minisgl.runner.parallel.mask_ring import MaskRing
from minisgl.runner.parallel.plan_codec import PlanEncoder
from minisgl.runner.parallel.remote_ranks import RemoteRanks
from minisgl.runner.parallel.rendezvous import FileRendezvous
from minisgl.runner.parallel.worker import RankSpec, join_and_load
from minisgl.runner.runner import ModelRunner, StepHandle
from minisgl.scheduler.plan import StepPlan, StepResult


def load_ranks(
    config: ResolvedConfig, model_config: ModelConfig, folder: Path, report: Report | None = None
) -> TensorParallelRunner:
    """Start config.tp ranks on this machine and load a shard of the model on each.

    Blocks, for seconds or minutes. Raises ConfigError if ranks cannot be started here,
    CheckpointError, DeviceMemoryError, or EngineStoppedError if a rank dies.
    """
    if reason := spawn_obstacle() or _group_obstacle():
        raise ConfigError("--tp", config.tp, reason)
    report = report or (lambda phase, fraction: None)
    try:
        rendezvous = FileRendezvous.create()
    except OSError as obstacle:
        reason = (
            "the ranks exchange addresses through a temporary file, which cannot be created: "
            f"{obstacle}"
        )
        raise ConfigError("--tp", config.tp, reason) from obstacle
    context = multiprocessing.get_context("spawn")
    launcher = SpawnLauncher(context)
    spec = launcher.placed(RankSpec(0, 0, 1, config, model_config, folder, rendezvous))
    masks = MaskRing.allocate(context, config.max_running_requests, model_config.vocab_size)
    others = RemoteRanks(spec, launcher, PipeChannel(range(1, config.tp), context, masks))
    own: tuple[ModelRunner, Communicator] | None = None
    try:
        # In a daemon thread, which is abandoned if it waits for a rank that has died.
        loading = _in_thread(lambda: join_and_load(spec, report))
        either: list[Future[Any]] = [loading, others.lost]
        wait_for_futures(either, return_when=FIRST_COMPLETED)
        if not loading.done():
            others.lost.result()
        error = loading.exception()
        if isinstance(error, CheckpointError):  # every rank raises the same
            raise error
        if isinstance(error, Exception):
            raise others.lose(error)
        own = loading.result()
        others.wait_ready(lambda fraction: report("waiting for the other ranks", fraction))
        if not others.on_gpu:
            others.close_rendezvous()
    except BaseException:
        others.kill()
        if not others.on_gpu:
            for part in own or ():
                part.close()
            others.close_rendezvous()
        raise
    return TensorParallelRunner(*own, others)


def _group_obstacle() -> str | None:
    """The reason why this process cannot form a group of ranks; None if it can."""
    if dist.is_initialized():
        return (
            "this process has ranks already, of another engine or of your own; "
            "close that engine, or use another process"
        )
    return None


def _in_thread(
    work: Callable[[], tuple[ModelRunner, Communicator]],
) -> Future[tuple[ModelRunner, Communicator]]:
    future: Future[tuple[ModelRunner, Communicator]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="minisgl-load", daemon=True).start()
    return future


class TensorParallelRunner:
    """Same interface as ModelRunner (rank 0 runs in this process); any failure raises
    EngineStoppedError.

    `lost` fails with it at once, even while `collect` hangs. If a GPU was used, the process exits a
    few seconds later.
    """

    def __init__(self, own: ModelRunner, ranks: Communicator, others: RemoteRanks) -> None:
        """own, ranks: the runner and the communicator of rank 0."""
        self.capacity = own.capacity
        self.load_rule = own.load_rule
        self.disk = own.disk
        self._transfers = Agreement(ranks.size)
        others.transferred = self._transfers.ended
        self.others = others
        self._own = own
        self._ranks = ranks
        self._encoder = PlanEncoder()
        # If the other ranks were killed during a step, neither the step nor this process would end.
        atexit.register(self.close)

    @property
    def lost(self) -> Future[None]:
        return self.others.lost

    def silence(self) -> Mapping[int, float]:
        """Seconds since the last heartbeat of each rank but 0; one per second is expected."""
        return self.others.silence

    def give_up(self, reason: MinisglError) -> None:
        """Kill the other ranks and fail with `reason`. Returns at once; any thread may call it."""
        threading.Thread(
            target=self.others.fail, args=(reason,), name="minisgl-kill", daemon=True
        ).start()

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepHandle:
        self.others.send(self._encoder.encode(plan))
        return self._own.launch(plan, masks)

    def new_masks(self, plan: StepPlan) -> MaskRows:
        return self.others.masks(plan)

    def sample(self, handle: StepHandle, masks: MaskRows) -> None:
        self.others.send_sampling()
        self._own.sample(handle, masks)

    def may_compile(self) -> bool:
        return self._own.may_compile()

    def collect(self, handle: StepHandle) -> StepResult:
        try:
            return self._own.collect(handle)
        except Exception as error:
            raise self.others.lose(error) from error
        finally:
            self.others.collected()

    def loads(self, handle: StepHandle) -> Iterator[int]:
        """As of rank 0: the others await each load on their own device."""
        return self._own.loads(handle)

    def transfer(self, transfers: Sequence[Transfer], done: Done) -> None:
        self._transfers.begin(transfers, done)
        self.others.send_transfers(transfers)
        self._own.transfer(transfers, self._transfers.ended)

    def traffic(self) -> HostTraffic | None:
        """The copies of rank 0; those of the others are as many."""
        return self._own.traffic()

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.lost.done() and self.others.on_gpu:
            return  # the steps in flight may never end
        self.others.begin_to_end()
        self._own.close()
        self._ranks.close()
        self.others.end()
        self.others.close_rendezvous()
