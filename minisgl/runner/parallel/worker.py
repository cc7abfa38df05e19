"""The life of a rank other than 0, in a process of its own.

It loads its part of the model and then launches what rank 0 launches. It ends when it is told to,
when rank 0's process is gone, and when anything goes wrong; the last in a hurry, because the others
may be in a collective that waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minisgl.config import ResolvedConfig
from minisgl.distributed.communicator import Communicator
from minisgl.distributed.group import join_group
from minisgl.errors import MinisglError, without_words
from minisgl.models.config import ModelConfig
from minisgl.runner.load import Report, load_runner, rank_device
from minisgl.runner.parallel.plan_codec import PlanDecoder
from minisgl.runner.runner import ModelRunner, StepHandle

HEARTBEAT_S = 1.0
CLOSE = b"\1"  # no plan: drain and leave
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank has to know, from rank 0."""

    rank: int
    config: ResolvedConfig
    model_config: ModelConfig
    folder: Path
    meeting: Path  # a private folder, for the file through which the ranks meet
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """To rank 0: loaded, and waiting for plans."""


@dataclass(frozen=True, slots=True)
class Failed:
    """To rank 0: the reason why this rank ends."""

    kind: str  # of the error
    message: str


def run_rank(spec: RankSpec, connection: Connection, heartbeats: Any) -> None:
    """The main function of the process. heartbeats: shared, one time of time.monotonic a rank."""
    _end_with_parent(spec.parent_pid)
    # Ctrl-C and a supervisor's SIGTERM go to all processes; rank 0 says when it is time.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"rank {spec.rank}: %(message)s")
    beat = partial(_beat, heartbeats, spec.rank)
    threading.Thread(target=beat, name="minisgl-heartbeat", daemon=True).start()
    try:
        _serve(spec, connection)
    except EOFError:  # rank 0 is gone
        os._exit(1)
    except BaseException as error:
        leave(connection, error)


def _beat(heartbeats: Any, rank: int) -> None:
    while True:
        heartbeats[rank] = time.monotonic()
        time.sleep(HEARTBEAT_S)


def leave(connection: Connection, error: BaseException) -> None:
    """Say why, and end at once: whatever is waited for in an orderly way out may never come."""
    message = str(error) if isinstance(error, MinisglError) else without_words(error)
    with contextlib.suppress(OSError):
        connection.send(Failed(type(error).__name__, message))
    sys.stderr.flush()
    os._exit(1)


def _serve(spec: RankSpec, connection: Connection) -> None:
    runner, ranks = join_and_load(spec)
    connection.send(Ready())
    _run_plans(runner, connection)
    runner.close()
    ranks.close()


def join_and_load(spec: RankSpec, report: Report | None = None) -> tuple[ModelRunner, Communicator]:
    """What every rank does, in whichever process."""
    config = spec.config
    if config.device == "cpu":
        # More threads than cores slow all ranks down.
        share = max(1, (os.cpu_count() or 1) // config.tp)
        torch.set_num_threads(min(torch.get_num_threads(), share))
    device = rank_device(config, spec.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_group(
        # A file has no socket that strangers could write to. -1 leaves it to us to delete it.
        FileStore(str(spec.meeting / "store"), -1),
        spec.rank,
        config.tp,
        device,
        hidden_size=spec.model_config.hidden_size,
        dtype=getattr(torch, config.dtype),
        plain=config.disable_pynccl,
    )
    try:
        return load_runner(config, spec.model_config, spec.folder, report, ranks), ranks
    except BaseException:
        if device.type == "cpu":
            ranks.close()
        raise


def _run_plans(runner: ModelRunner, connection: Connection) -> None:
    """Until rank 0 says that there are no more."""
    launched: queue.SimpleQueue[StepHandle | None] = queue.SimpleQueue()

    def collect() -> None:
        """Nobody here wants the tokens, but a step that fails must be noticed."""
        runner.lanes.enter_thread()
        while (handle := launched.get()) is not None:
            try:
                runner.collect(handle)
            except BaseException as error:
                leave(connection, error)

    collector = threading.Thread(target=collect, name="minisgl-collector", daemon=True)
    collector.start()
    decoder = PlanDecoder()
    while (data := connection.recv_bytes()) != CLOSE:
        launched.put(runner.launch(decoder.decode(data)))
    launched.put(None)
    collector.join()


def _end_with_parent(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends, which it does with its process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before that was said
        os._exit(1)
