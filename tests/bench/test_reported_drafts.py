"""What benchmarks report of drafts."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from minisgl.bench.figures import Figures
from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.online.load_config import Point
from minisgl.bench.report.tables import PointResult, print_figures, sweep_tables

ONE = RequestRecord(
    submitted_s=0.0,
    first_token_s=0.5,
    last_token_s=2.0,
    num_prompt_tokens=4,
    num_cached_tokens=0,
    num_output_tokens=10,
)
DRAFTED = replace(ONE, num_drafted_tokens=12, num_accepted_tokens=6)


def figures(*requests: RequestRecord) -> Figures:
    return Figures.of(RunRecord([*requests], num_steps=9, num_retractions=0))


def printed(*shown: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=300)
    for one in shown:
        console.print(one)
    return file.getvalue()


def point(of: Figures) -> PointResult:
    return PointResult(point=Point(None, None), limit=None, repetitions=[of], requests=[])


def test_the_accepted_share_and_the_tokens_of_a_step_are_of_all_requests() -> None:
    found = figures(DRAFTED, ONE)
    assert found.draft_acceptance == pytest.approx(6 / 12)
    assert found.tokens_per_step == pytest.approx(20 / 14)
    none = figures(ONE)
    assert none.draft_acceptance is None and none.tokens_per_step == 1


def test_tables_have_them_where_there_were_drafts() -> None:
    with_drafts, without = figures(DRAFTED), figures(ONE)
    for found, is_shown in ((with_drafts, True), (without, False)):
        file = io.StringIO()
        print_figures(Console(file=file, width=300), found, None)
        assert ("drafts accepted" in file.getvalue()) == is_shown
        assert ("2.50" in file.getvalue()) == is_shown
    assert "tokens/step" not in printed(*sweep_tables([point(without)], 300))
    rows = printed(*sweep_tables([point(with_drafts), point(without)], 300)).splitlines()
    cells = [[cell.strip() for cell in row.split("│")[-3:-1]] for row in rows if "│" in row]
    assert cells == [["50.0%", "2.50"], ["-", "1.00"]]
