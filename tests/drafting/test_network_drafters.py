"""The whole engine with networks that draft, in float32: tokens do not change, and drafts are those
of plain torch over whole sequences."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.checkpoints import load_reference
from support.drafters import Head, HeadReference, drafts_after, save_head
from support.parity import FEW_PAGES, batch, case_of, load_engine

from minisgl.engine import AsyncEngine
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import StepResult
from minisgl.scheduler.scheduler import Scheduler

_FOLDER = TemporaryDirectory()
PATH = Path(_FOLDER.name)
CASE = "qwen3"  # of three layers
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"page_size": 1, "max_prefill_length": 7},
    "padded": {"padded": 4},
    "no-overlap": {"overlap": False},
    "few-pages": FEW_PAGES,
}


@dataclass
class Verified:
    """What the steps of an engine have verified."""

    num_drafted: int = 0
    num_accepted: int = 0
    retractions: int = 0
    answers: list[list[int]] = field(default_factory=list)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: Any, **options: Any) -> Verified:
    found, settle = Verified(), Scheduler.settle

    def noting(scheduler: Scheduler, result: StepResult) -> Any:
        for length, drafted in zip(
            result.run_lengths or (), result.num_drafted or (), strict=True
        ):
            found.num_drafted += drafted
            found.num_accepted += length - 1
        return settle(scheduler, result)

    async def answer() -> None:
        async with AsyncEngine(load_engine(folder, **options)) as engine:
            params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
            outputs = await batch(engine, prompts, params)
            found.answers = [output.token_ids for output in outputs]
            found.retractions = engine.stats().counters.num_retractions

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "settle", noting)
        asyncio.run(answer())
    return found


@cache
def head() -> Path:
    return save_head(Head(case_of(CASE).spec, taps=(0, 1, 2)), PATH / "head")


@cache
def small() -> Path:
    return case_of("qwen3-biased").folder


def drafter(kind: str) -> str:
    return str(head() if kind == "eagle3" else small())


@pytest.mark.parametrize("kind", ["eagle3", "model"])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_drafter_changes_a_token(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_drafts: int, name: str
) -> None:
    case = case_of(CASE)
    expected = run(monkeypatch, case.folder, case.prompts)
    found = run(
        monkeypatch,
        case.folder,
        case.prompts,
        speculative=drafter(kind),
        draft_tokens=num_drafts,
        **OPTIONS[name],
    )
    assert found.answers == expected.answers
    assert found.num_drafted > 0
    assert (found.retractions > 0) == (name == "few-pages")


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_all_drafts_of_the_model_itself_are_accepted(
    monkeypatch: pytest.MonkeyPatch, num_drafts: int, name: str
) -> None:
    case = case_of(CASE)
    found = run(
        monkeypatch,
        case.folder,
        case.prompts,
        speculative=str(case.folder),
        draft_tokens=num_drafts,
        **OPTIONS[name],
    )
    assert found.num_drafted == found.num_accepted > 40
