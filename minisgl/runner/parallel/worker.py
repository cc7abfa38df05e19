"""A rank other than 0: it loads its part of the model, then runs the plans that rank 0 launches.

It ends when rank 0 asks it to, when rank 0's process is gone, and on any error. After an error it
exits at once, because the other ranks may be in a collective that waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.config import ResolvedConfig
from minisgl.distributed.communicator import Communicator
from minisgl.distributed.group import join_group
from minisgl.errors import MinisglError, without_words
from minisgl.models.config import ModelConfig
from minisgl.runner.load import Report, load_runner, rank_device
from minisgl.runner.parallel.channel import HEARTBEAT_S, RankEnd, RankFailed, RankReady
from minisgl.runner.parallel.plan_codec import PlanDecoder
from minisgl.runner.parallel.rendezvous import Rendezvous
from minisgl.runner.runner import ModelRunner, StepHandle


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank needs to know before it can load; the same for all but its two numbers."""

    rank: int  # among all ranks
    local_rank: int  # among those on its machine, which is also the number of its GPU
    num_local_ranks: int  # on its machine, which share its cores
    config: ResolvedConfig
    model_config: ModelConfig
    folder: Path
    rendezvous: Rendezvous


def run_rank(spec: RankSpec, end: RankEnd) -> None:
    """Serve until rank 0 asks for the end. Exits the process if rank 0 is gone or on an error."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {spec.rank}: %(message)s")
    threading.Thread(target=_beat, args=(end,), name="minisgl-heartbeat", daemon=True).start()
    try:
        _serve(spec, end)
    except EOFError:  # rank 0 is gone
        os._exit(1)
    except BaseException as error:
        exit_with(end, error)


def _beat(end: RankEnd) -> None:
    while True:
        end.beat()
        time.sleep(HEARTBEAT_S)


def exit_with(end: RankEnd, error: BaseException) -> None:
    """Report the error and exit at once: an orderly exit may wait for what never comes."""
    message = str(error) if isinstance(error, MinisglError) else without_words(error)
    with contextlib.suppress(OSError):
        end.report(RankFailed(type(error).__name__, message))
    sys.stderr.flush()
    os._exit(1)


def _serve(spec: RankSpec, end: RankEnd) -> None:
    runner, ranks = join_and_load(spec)
    end.report(RankReady())
    _run_plans(runner, end)
    runner.close()
    ranks.close()


def join_and_load(spec: RankSpec, report: Report | None = None) -> tuple[ModelRunner, Communicator]:
    """Join the group and load this rank's part of the model; every rank does so, rank 0 too.

    Blocks, for seconds or minutes, until all ranks have done it.
    """
    config = spec.config
    if config.device == "cpu":
        # More threads than cores slow all ranks down.
        num_threads = max(1, (os.cpu_count() or 1) // spec.num_local_ranks)
        torch.set_num_threads(min(torch.get_num_threads(), num_threads))
    device = rank_device(config, spec.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_group(
        spec.rendezvous.store(),
        spec.rank,
        config.tp,
        device,
        hidden_size=spec.model_config.hidden_size,
        dtype=getattr(torch, config.dtype),
        plain=config.disable_pynccl,
    )
    try:
        runner = load_runner(
            config, spec.model_config, spec.folder, report, ranks, local_rank=spec.local_rank
        )
    except BaseException:
        if device.type == "cpu":
            ranks.close()
        raise
    return runner, ranks


def _run_plans(runner: ModelRunner, end: RankEnd) -> None:
    """Launch what rank 0 sends until it announces that there is no more, and until that is done."""
    launched: queue.SimpleQueue[StepHandle | None] = queue.SimpleQueue()

    def collect() -> None:
        """Only rank 0's tokens are used, but a step that fails here must be noticed."""
        runner.lanes.enter_thread()
        while (handle := launched.get()) is not None:
            try:
                runner.collect(handle)
            except BaseException as error:
                exit_with(end, error)

    collector = threading.Thread(target=collect, name="minisgl-collector", daemon=True)
    collector.start()
    decoder = PlanDecoder()
    while (data := end.receive()) is not None:
        launched.put(runner.launch(decoder.decode(data)))
    launched.put(None)
    collector.join()
