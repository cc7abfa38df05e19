"""Ranks for tests of what ranks compute: processes forked from one that has imported torch.

Each spawned one would import it again, which takes longer than most of these tests. How ranks start
and end is left to the tests of that, whose ranks are spawned. What a test has put in place of the
drafter of n-grams, the ranks have, too.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from minisgl.ranks.processes.channel import RankEnd
from minisgl.ranks.processes.worker import RankSpec, run_rank
from minisgl.runner import load

# What ranks need, the commands with an engine, and the processes that work for engines; also what
# these import only when they need it.
PRELOADED = [
    run_rank.__module__,
    *("minisgl.bench.latency", "minisgl.bench.offline", "minisgl.bench.serve", "minisgl_cli.main"),
    *("minisgl_cli.batch_file", "minisgl_cli.batch_post", "minisgl_cli.chat.repl"),
    *("minisgl_cli.chat.engine_model", "minisgl_cli.chat.ui.pipe", "minisgl_cli.chat.ui.terminal"),
    *("minisgl.grammar.checking", "minisgl.images.processor", "minisgl.text.rendering"),
    *("pydantic.fields", "pydantic.plugin._loader", "pydantic.type_adapter", "pydantic.types"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.qwen3"),
    *("transformers.utils.chat_template_utils", "jinja2", "uvicorn.lifespan.off", "uvloop"),
    # Of models with the code of transformers, also of their towers alone.
    *("transformers.modeling_layers", "transformers.generation.utils"),
    *("transformers.processing_utils", "transformers.image_processing_backends"),
    # What a forked process runs first.
    *("support.forked_programs", "support.forked_workers", "support.held_answers"),
]


RANK_OF = "rank of "  # of the name of a forked rank, before the number of its rank 0


def fork_server() -> ForkServerContext:
    """The context of processes forked from one with torch, which runs until the tests end. What is
    forked has others forked from the same one."""
    context = multiprocessing.get_context("forkserver")
    if forkserver.get_inherited_fds() is not None:  # this process is forked, and would start one
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        return context
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Let the ranks that are started meanwhile be forked."""
    context = fork_server()  # before the launcher blocks signals
    run = partial(run_forked_rank, drafter=load.NgramDrafter, folder=os.getcwd())
    with (
        mock.patch("multiprocessing.get_context", return_value=context),
        mock.patch("minisgl.ranks.processes.launcher.run_spawned_rank", run),
    ):
        yield


def run_forked_rank(
    spec: RankSpec, end: RankEnd, parent_pid: int, drafter: Callable[..., Any], folder: str
) -> None:
    """As `run_spawned_rank`, but it is no child of rank 0: the end of the channel ends it."""
    gc.freeze()
    os.chdir(folder)
    name_process(RANK_OF + str(parent_pid))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with mock.patch.object(load, "NgramDrafter", drafter):
        run_rank(spec, end)


def name_process(name: str) -> None:
    """Show the name, of 15 characters at most, where the system lists processes in files."""
    file = Path("/proc/self/comm")
    if file.exists():
        file.write_text(name)


def forked_ranks_of(pid: int) -> list[int]:
    """The living ranks that a process has started so."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (place / "stat").read_text()
            if f"({RANK_OF}{pid}) " in fields and f"({RANK_OF}{pid}) Z" not in fields:
                found.append(int(place.name))
    return found
