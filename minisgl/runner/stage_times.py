"""When a pipeline stage computes, for measurements (scripts/bench/bench_pipeline.py)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

# Names a folder, into which each rank of a pipeline writes its times when it is closed.
STAGE_TIMES = "MINISGL_STAGE_TIMES"


class StageTimes:
    """Records the begin and the end of each step, on the compute lane."""

    def __init__(self, file: Path, device: torch.device) -> None:
        self._file = file
        self._on_gpu = device.type == "cuda"
        self._steps: list[int] = []
        self._events: list[torch.cuda.Event] = []  # two a step, on a GPU
        self._times: list[float] = []  # the same in milliseconds, elsewhere

    @staticmethod
    def of_rank(stage: int, rank: int, device: torch.device) -> StageTimes | None:
        """Those of a rank of a stage, if the environment asks for them."""
        folder = os.environ.get(STAGE_TIMES)
        return StageTimes(Path(folder, f"{stage}-{rank}.json"), device) if folder else None

    def began(self, step: int) -> None:
        self._steps.append(step)
        self._mark()

    def ended(self) -> None:
        self._mark()

    def write(self) -> None:
        """Write [step, begin, end] of each step, in milliseconds since the first began, and forget
        them. All work must be done."""
        times = [time - self._times[0] for time in self._times]
        times += [self._events[0].elapsed_time(event) for event in self._events]
        rows = zip(self._steps, times[::2], times[1::2], strict=False)  # the last may have failed
        self._file.write_text(json.dumps([*rows]))
        self._steps, self._events, self._times = [], [], []

    def _mark(self) -> None:
        if not self._on_gpu:
            self._times.append(time.perf_counter() * 1000)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
