"""An engine whose runner has no model; tests script each of its steps."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from support.draft_policies import drafting
from support.fake_runner import FakeRunner
from support.waiting import LIMIT_S

from minisgl.config import Capacity, EngineConfig, resolve
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.engine.stream import OutputStream
from minisgl.matcher import MaskRows
from minisgl.models.generation import GenerationDefaults
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.request import OutputDelta, SamplingParams
from minisgl.runner.facts import device_facts
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.text.tokenizer import Tokenizer

VOCAB = 50
EOS = 7


class ScriptedRunner(FakeRunner):
    """Reports when it collects, and fails on request."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size=page_size, vocab_size=VOCAB)
        self.collect_errors: dict[int, Exception] = {}
        self.is_collecting = threading.Event()
        self.may_collect = threading.Event()
        self.may_collect.set()
        self.launched: list[StepPlan] = []
        self.closed = False

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepResult:
        self.launched.append(plan)
        return super().launch(plan, masks)

    def collect(self, handle: StepResult) -> StepResult:
        self.is_collecting.set()
        assert self.may_collect.wait(LIMIT_S)
        if handle.step in self.collect_errors:
            raise self.collect_errors[handle.step]
        return handle

    def close(self) -> None:
        self.closed = True


def loaded(
    runner: ScriptedRunner, *, overlap: bool, tokenizer: bool | Tokenizer, **options: Any
) -> Loaded[Any]:
    """tokenizer: another one than the demo model's, or whether there is one."""
    facts = read_model_config(DEMO_FOLDER).facts()
    if not tokenizer:  # then nothing has more ids than the runner
        facts = replace(facts, vocab_size=VOCAB)
    options = {"device": "cpu", "num_pages": 200, "page_size": runner.page_size, **options}
    config = resolve(EngineConfig(**options), facts, device_facts(facts), overlap=overlap)
    parts: Loaded[Any] = Loaded(
        runner,
        config,
        Capacity.of(config, config.num_pages),
        facts,
        Tokenizer.load(DEMO_FOLDER) if tokenizer is True else tokenizer or None,
        GenerationDefaults(frozenset({EOS})),
        "fake",
    )
    return drafting(parts)


@asynccontextmanager
async def engine_on(
    runner: ScriptedRunner,
    *,
    overlap: bool = True,
    tokenizer: bool | Tokenizer = False,
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(
        loaded(runner, overlap=overlap, tokenizer=tokenizer, **options)
    ) as engine:
        engine._steps._masks._clock = lambda: (
            0.0
        )  # no matcher is slow, whatever the garbage collector does
        yield engine
        if engine.failure is None:
            engine.audit()
    assert runner.closed


def params(max_tokens: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, **fields)


async def deltas_of(stream: OutputStream) -> list[OutputDelta]:
    return [delta async for delta in stream]
