"""The process of a rank other than 0: loads its part of the model, then runs rank 0's plans.

It ends after the close message, when rank 0's process has died, and on any error. After an error it
exits at once, because other ranks may wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_type_hints

import msgspec
import torch

from minisgl.distributed.group import join_group
from minisgl.distributed.interfaces import LOOPBACK
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.pipeline import Pipeline
from minisgl.errors import MinisglError, in_one_line, without_words
from minisgl.kvcache.moves import Move
from minisgl.matcher import MaskRows
from minisgl.models.refilling import WeightTaker
from minisgl.parts.copies.host import CopyPlan
from minisgl.parts.images.host import encoded_in
from minisgl.parts.masks.host import MaskPlan
from minisgl.ranks.processes.channel import (
    HEARTBEAT_S,
    Answered,
    Encoded,
    Failed,
    Landed,
    RankEnd,
    RankMoved,
    Ready,
)
from minisgl.ranks.processes.plan_codec import CALL, MOVE, SAMPLE, PlanDecoder, unpacked
from minisgl.ranks.processes.rank_log import LogForm, begin_log, own_form
from minisgl.ranks.processes.rendezvous import Rendezvous
from minisgl.runner.load import Report, load_runner, no_report
from minisgl.runner.queued_step import StepHandle
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import Setup
from minisgl.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The parameters of a rank, the same for all ranks of a machine except `rank`."""

    rank: int  # among all ranks
    setup: Setup
    rendezvous: Rendezvous
    interface: str | None = LOOPBACK  # on which ranks listen for each other; None: they choose
    log_form: LogForm = field(default_factory=own_form)


def run_rank(spec: RankSpec, end: RankEnd) -> None:
    """Run plans until the close message. Exits the process on an error or if rank 0 has died."""
    begin_log(spec.rank, spec.log_form)
    threading.Thread(target=_beat, args=(end,), name="minisgl-heartbeat", daemon=True).start()
    try:
        runner, pipeline = join_and_load(spec)
        end.report(Ready())
        is_last = pipeline.stage == pipeline.size - 1
        own = spec.rank if spec.setup.config.dp_attention and is_last else None
        _run_plans(runner, end, pipeline.size, own)
        runner.close()
        pipeline.close()
    except EOFError:  # rank 0 has died
        os._exit(1)
    except BaseException as error:
        exit_with(end, error)


def _beat(end: RankEnd) -> None:
    while True:
        end.beat()
        time.sleep(HEARTBEAT_S)


def exit_with(end: RankEnd, error: BaseException) -> None:
    """Report the error and exit at once; an orderly exit could hang in a collective."""
    message = str(error) if isinstance(error, MinisglError) else without_words(error)
    with contextlib.suppress(OSError):
        end.report(Failed(type(error).__name__, message))
    sys.stderr.flush()
    os._exit(1)


def join_and_load(spec: RankSpec, report: Report = no_report) -> tuple[ModelRunner, Pipeline]:
    """Join the groups and load this rank's part of the model. Every rank calls it, rank 0 too.

    Blocks for seconds or minutes, until all ranks have loaded.
    """
    config = spec.setup.config
    layout = RankLayout.of(config)
    device = torch.device("cpu")
    if config.device == "cpu":
        # With more threads than cores all ranks of a machine are slower.
        num_threads = max(1, (os.cpu_count() or 1) // layout.ranks_per_node)
        torch.set_num_threads(min(torch.get_num_threads(), num_threads))
    else:
        device = torch.device("cuda", layout.local_rank(spec.rank))
        torch.cuda.set_device(device)
    ranks, pipeline = join_group(
        spec.rendezvous.store(),
        spec.rank,
        layout,
        device,
        hidden_size=spec.setup.model.hidden_size,
        dtype=getattr(torch, config.dtype),
        plain=config.disable_pynccl,
        interface=spec.interface,
    )
    try:
        runner = load_runner(spec.setup, report, ranks, pipeline, device)
    except BaseException:
        if device.type == "cpu":
            pipeline.abandon()
        raise
    return runner, pipeline


def _run_plans(runner: ModelRunner, end: RankEnd, num_stages: int, own: int | None) -> None:
    """Launch the plans of rank 0 until the close message, and wait for their steps. own: the place
    of this rank among those that divide the requests, if it reports the loads of its own."""
    launched: queue.SimpleQueue[tuple[StepPlan, StepHandle] | None] = queue.SimpleQueue()
    reporting = threading.Lock()

    def collect() -> None:
        """Collect every step and drop its tokens, to detect steps that fail on this rank. Report
        the images that it has encoded, which another rank may not have."""
        runner.lanes.enter_thread()
        while (step := launched.get()) is not None:
            plan, handle = step
            try:
                result = runner.collect(handle)
            except BaseException as error:
                exit_with(end, error)
            for number, why in encoded_in(plan, result):
                with reporting, contextlib.suppress(OSError):  # rank 0 has died
                    end.report(Encoded(number, why))

    loading: queue.SimpleQueue[StepHandle | None] = queue.SimpleQueue()

    def follow() -> None:
        """Report the loads of this rank, for which nobody else can wait."""
        runner.lanes.enter_thread()
        while (handle := loading.get()) is not None:
            for load in runner.loads(handle):
                with reporting, contextlib.suppress(OSError):  # rank 0 has died
                    end.report(Landed(load))

    def moved(move: int, num_pages: int) -> None:
        with reporting, contextlib.suppress(OSError):  # rank 0 has died
            end.report(RankMoved(move, num_pages))

    def answer(name: str, arguments: Sequence[Any]) -> None:
        answered = _called(runner, end.rank, name, arguments)
        with reporting, contextlib.suppress(OSError):
            end.report(answered)

    collector = threading.Thread(target=collect, name="minisgl-collector", daemon=True)
    collector.start()
    follower = threading.Thread(target=follow, name="minisgl-landings", daemon=True)
    follower.start()

    def masks_of(plan: StepPlan) -> MaskRows | None:
        masked = plan.part(MaskPlan)
        return None if masked is None else end.masks.rows(plan.step, len(masked.slots))

    decoder = PlanDecoder(num_stages)
    deferred: tuple[StepPlan, StepHandle] | None = None
    while (data := end.receive()) is not None:
        if data.startswith(MOVE):
            runner.move(unpacked(data, list[Move]), moved)
            continue
        if data.startswith(CALL):
            name, arguments = unpacked(data, tuple[str, list[Any]])
            call = threading.Thread(target=answer, args=(name, arguments), daemon=True)
            call.start()  # in a thread of its own, so that no plan waits for it
            continue
        if data == SAMPLE:
            assert deferred is not None, "what is to be sampled was launched"
            plan, handle = deferred
            masks = masks_of(plan)
            assert masks is not None, "only masks defer a plan"
            runner.sample(handle, masks)
        else:
            plan = decoder.decode(data)
            handle = runner.launch(plan, None if plan.deferred else masks_of(plan))
            if plan.deferred:
                deferred = plan, handle
                continue
        launched.put((plan, handle))
        copies = plan.part(CopyPlan)
        if own is not None and copies is not None and copies.of_ranks[own].loads:
            loading.put(handle)
    launched.put(None)
    loading.put(None)
    collector.join()
    follower.join()


def _read_adapter(runner: ModelRunner, number: int, folder: str, root: str | None) -> bytes:
    assert runner.adapters is not None, "there is room for adapters"
    return runner.adapters.read(number, folder, root).digest


def _of_weights(method: str, runner: ModelRunner, *arguments: object) -> object:
    """What a WeightTaker does; the arguments come back to the types that it declares."""
    assert runner.weights is not None, "they were loaded"
    kinds = get_type_hints(getattr(WeightTaker, method)).values()
    return getattr(runner.weights, method)(*map(msgspec.convert, arguments, kinds))


_METHODS = (
    *("begin", "take_files", "end", "lacks", "read", "sleep", "wake", "capture"),
    *("join", "take_group", "leave"),
)
# What rank 0 can have called on all ranks. Each may run beside the plans.
CALLS: Mapping[str, Callable[..., object]] = {
    "listen": ModelRunner.listen,
    "read_adapter": _read_adapter,
    **{method: partial(_of_weights, method) for method in _METHODS},
}


def _called(runner: ModelRunner, rank: int, name: str, arguments: Sequence[Any]) -> Answered:
    try:
        return Answered(rank, msgspec.msgpack.encode(CALLS[name](runner, *arguments)))
    except (MinisglError, OSError) as error:
        return Answered(rank, obstacle=str(error), kind=type(error).__name__)
    except Exception as error:
        return Answered(rank, obstacle=in_one_line(error))
