"""Loading progress: a bar on a terminal, a log line per phase elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.progress import LoadProgress


def test_a_terminal_shows_a_progress_bar(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with caplog.at_level(logging.INFO), LoadProgress(console) as progress:
        progress("loading weights", 0.5)
        progress("capturing graphs", 0.25)
        progress._bar.refresh()
    assert "Capturing graphs" in out.getvalue() and "25%" in out.getvalue()
    assert not caplog.records


def test_a_phase_without_progress_shows_no_percentage() -> None:
    out = io.StringIO()
    with LoadProgress(Console(file=out, force_terminal=True, width=80)) as progress:
        progress("loading weights", 0.5)
        progress("tuning GEMMs", 0.0)
        out.truncate(0)
        progress._bar.refresh()
    assert "Tuning GEMMs" in out.getvalue() and "%" not in out.getvalue()


async def test_on_a_cpu_graphs_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        async with await AsyncEngine.start(EngineConfig(device="cpu", num_pages=200)):
            pass
    [loaded] = [line for line in caplog.messages if line.startswith("Loaded demo")]
    assert "context" in loaded and "graph" not in loaded


def test_without_a_terminal_each_phase_is_a_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("minisgl.progress.time.monotonic", lambda: now)
    out = io.StringIO()
    with caplog.at_level(logging.INFO), LoadProgress(Console(file=out)) as progress:
        for share in (0.0, 0.25, 0.5):
            progress("loading weights", share)
        now = 5.0
        progress("loading weights", 0.75)
        progress("capturing graphs", 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "Loading weights",
        "Loading weights: 75 %",
        "Capturing graphs",
    ]
    assert out.getvalue() == ""
