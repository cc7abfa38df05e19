"""An engine in a process of its own, which is killed while it writes to its disk."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from support.forked_ranks import fork_server

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.models.generation import GenerationDefaults
from minisgl.request import SamplingParams
from minisgl.runner.load import load_runner
from minisgl.runner.setup import read_setup
from minisgl.tiers.disk.page_files import PageFiles

if TYPE_CHECKING:  # the process need not import transformers
    from support.parity import Case


def killed_while_writing(case: Case, num_files: int, options: Mapping[str, Any]) -> None:
    """Let an engine answer the prompts of a case, whose process is killed in the middle of the file
    behind the first `num_files`."""
    given = (str(case.folder), case.prompts, num_files, options)
    process = fork_server().Process(target=_answer, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def _answer(
    folder: str, prompts: Sequence[Sequence[int]], num_files: int, options: Mapping[str, Any]
) -> None:
    write_file, names = PageFiles._write_file, list[str]()

    def write_or_die(self: PageFiles, name: str, parts: Sequence[memoryview]) -> None:
        names.append(name)
        if len(names) <= num_files:
            write_file(self, name, parts)
            return
        content = b"".join(parts)
        (self._folder / f"{name}.part").write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    PageFiles._write_file = write_or_die  # type: ignore[method-assign]

    setup = read_setup(EngineConfig(model=folder, device="cpu", dtype="float32", **options))
    runner = load_runner(setup)
    loaded = Loaded(
        runner=runner,
        config=setup.config,
        capacity=runner.capacity,
        model=setup.facts,
        tokenizer=None,
        defaults=GenerationDefaults(frozenset()),
        model_name="test",
        disk=runner.disk,
    )

    async def run() -> None:
        async with AsyncEngine(loaded) as engine:
            for prompt in prompts:
                stream = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=4))
                await stream.wait_finished()

    asyncio.run(run())
