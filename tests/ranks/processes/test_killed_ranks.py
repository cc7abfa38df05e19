"""A rank that is killed in any phase is named, ends every request, and leaves no process."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.checkpoints import make_checkpoint, spec_named
from support.forked_ranks import forked_ranks
from support.parity import load_engine
from support.waiting import until, wait_until

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import load
from minisgl.errors import EngineStoppedError
from minisgl.ranks.processes.launcher import RANK_NAME
from minisgl.ranks.processes.remote_ranks import RemoteRanks
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import StepPlan

# Nothing but the end of the process tells: no step is ever late.
TWO: dict[str, Any] = {"tp": 2, "step_timeout": math.inf}
LAYOUTS: dict[str, dict[str, Any]] = {
    "--dp-attention": {**TWO, "dp_attention": True},
    "--ep": {**TWO, "ep": True},
    "both, and --pp": {**TWO, "dp_attention": True, "ep": True, "pp": 2},
}
LONG = SamplingParams(temperature=0, max_tokens=40)
# Prompts in chunks, fewer slots than requests, and so few pages that requests are retracted.
CROWDED: dict[str, Any] = {
    "max_prefill_length": 16,
    "max_running_requests": 4,
    "page_size": 4,
    "num_pages": 30,
    "max_seq_len_override": 100,
    "schedule_conservativeness": 0.02,
}
PROMPTS = [[*range(40), index] for index in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(spec_named("moe-5"), tmp_path_factory.mktemp("killed"))


def kill_last() -> str:
    """Kill the rank with the highest number; returns what is said of it."""
    last = max(multiprocessing.active_children(), key=lambda process: process.name)
    assert last.pid is not None
    os.kill(last.pid, signal.SIGKILL)
    return f"Rank {last.name.removeprefix(RANK_NAME)} (process {last.pid}) was killed by SIGKILL."


# -- while steps run -------------------------------------------------------------------------------

# Whether a rank is to be killed before a plan is launched.
Phase = Callable[[AsyncEngine, StepPlan], bool]
PHASES: dict[str, Phase] = {
    "in a prompt": lambda engine, plan: any(not chunk.samples for chunk in plan.chunks),
    "where a prompt ends": lambda engine, plan: any(chunk.samples for chunk in plan.chunks),
    "in decode, while others wait": lambda engine, plan: (
        bool(plan.decode_slots) and not plan.chunks and engine.stats().num_queued > 0
    ),
    "after a retraction": lambda engine, plan: engine.stats().counters.num_retractions > 0,
}


async def reason_of_all(engine: AsyncEngine) -> str:
    """Why the answers end, the same for all."""

    async def reason(prompt: list[int]) -> str:
        with pytest.raises(EngineStoppedError) as caught:
            async for _ in engine.submit(prompt, LONG):
                engine.audit()
        return str(caught.value)

    [found] = set(await asyncio.gather(*map(reason, PROMPTS)))
    return found


async def check_dead(engine: AsyncEngine, reason: str) -> None:
    """It takes nothing, its ranks have ended, and it can be closed."""
    with pytest.raises(EngineStoppedError) as caught:
        engine.submit([1], LONG)
    assert str(caught.value) == f"The engine has failed: {reason}"
    await until(lambda: not multiprocessing.active_children())
    await engine.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_rank_killed_in_any_step_ends_all_requests(
    phase: str, layout: str, folder: Path
) -> None:
    async with AsyncEngine(load_engine(folder, **LAYOUTS[layout], **CROWDED)) as engine:
        as_it_is, reasons = engine._runner.launch, list[str]()

        def launch(plan: StepPlan, *masks: Any) -> Any:
            if not reasons and PHASES[phase](engine, plan):
                reasons.append(kill_last())
            return as_it_is(plan, *masks)

        engine._runner.launch = launch
        found = await reason_of_all(engine)
        assert [found] == reasons
        await check_dead(engine, found)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_killed_at_rest_is_noticed(layout: str, folder: Path) -> None:
    async with AsyncEngine(load_engine(folder, **LAYOUTS[layout])) as engine:
        await engine.submit([1, 2, 3], SamplingParams(max_tokens=2)).wait_finished()
        await until(lambda: not engine._scheduler.num_in_flight)
        reason = kill_last()
        await until(lambda: engine.failure)
        await check_dead(engine, reason)


# -- while they start ------------------------------------------------------------------------------


def options_of(layout: str, folder: Path) -> EngineConfig:
    small: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "num_pages": 9}
    return EngineConfig(model=str(folder), **small, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", ["loading weights", "profiling"])
def test_a_rank_killed_while_rank_0_loads_is_named(phase: str, layout: str, folder: Path) -> None:
    reasons: list[str] = []

    def report(name: str, fraction: float) -> None:
        if name.startswith(phase) and not reasons:
            reasons.append(kill_last())

    with forked_ranks(), pytest.raises(EngineStoppedError) as caught:
        load(options_of(layout, folder), report)
    assert [str(caught.value)] == reasons
    assert not multiprocessing.active_children()
    wait_until(lambda: not dist.is_initialized())  # a thread that is left to itself ends it


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_killed_when_rank_0_has_loaded_is_named(
    layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has loaded, too, and rank 0 has heard so, or not."""
    as_it_is, reasons = RemoteRanks.wait_ready, list[str]()

    def wait_ready(ranks: RemoteRanks, report: Callable[[float], None]) -> None:
        reasons.append(kill_last())
        as_it_is(ranks, report)

    monkeypatch.setattr(RemoteRanks, "wait_ready", wait_ready)
    try:
        with forked_ranks():
            loaded = load(options_of(layout, folder))
    except EngineStoppedError as error:
        found: BaseException | None = error
    else:
        found = loaded.runner.others.lost.exception()
        loaded.runner.close()
    assert [str(found)] == reasons
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()
