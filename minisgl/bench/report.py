"""From the record of a run to figures, a table in the terminal and a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from minisgl.bench.driver import RunRecord
from minisgl.bench.limits import Peak, Work
from minisgl.bench.setting import Setting


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Between the two nearest of the values, which are sorted, in proportion to the distance."""
    index, hundredths = divmod((len(ordered) - 1) * percent, 100)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    return low + (high - low) * hundredths / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run comes to. Rates are per second of its whole length."""

    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_steps: int
    num_retractions: int
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    requests_per_s: float
    cache_hit_rate: float  # of the prompt tokens
    ttft_s: Distribution
    tpot_s: Distribution | None  # None if no output has two tokens
    e2e_s: Distribution

    @classmethod
    def of(cls, run: RunRecord) -> Figures:
        requests, elapsed_s = run.requests, run.elapsed_s
        num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
        num_cached_tokens = sum(request.num_cached_tokens for request in requests)
        num_output_tokens = sum(request.num_output_tokens for request in requests)
        tpots_s = [request.tpot_s for request in requests if request.tpot_s is not None]
        return cls(
            elapsed_s=elapsed_s,
            num_requests=len(requests),
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_steps=run.num_steps,
            num_retractions=run.num_retractions,
            output_tokens_per_s=num_output_tokens / elapsed_s,
            total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / elapsed_s,
            requests_per_s=len(requests) / elapsed_s,
            cache_hit_rate=num_cached_tokens / num_prompt_tokens,
            ttft_s=Distribution.of([request.ttft_s for request in requests]),
            tpot_s=Distribution.of(tpots_s) if tpots_s else None,
            e2e_s=Distribution.of([request.e2e_s for request in requests]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the hardware would have allowed. There is none on a CPU (see `engine_peak`)."""

    peak: Peak
    work: Work
    seconds: float
    share: float  # of it that the run reached

    @classmethod
    def of(cls, figures: Figures, peak: Peak, work: Work) -> Limit:
        seconds = work.seconds(peak)
        return cls(peak=peak, work=work, seconds=seconds, share=seconds / figures.elapsed_s)


def write_report(path: Path, setting: Setting, **results: Any) -> None:
    """Everything about a measurement, as JSON; the results are dataclasses, or lists of them."""
    report = {field.name: getattr(setting, field.name) for field in fields(setting)} | results
    path.write_text(json.dumps(report, indent=1, default=asdict) + "\n")


def print_figures(console: Console, figures: Figures, limit: Limit | None) -> None:
    console.print(_totals(figures))
    console.print(_latencies(figures))
    if limit is not None:
        console.print(_explain(figures, limit))
    console.print(
        f"{figures.output_tokens_per_s:,.1f} output tok/s: {figures.num_output_tokens:,} tokens "
        f"of {figures.num_requests} requests in {figures.elapsed_s:.2f} s"
    )


def _explain(figures: Figures, limit: Limit) -> str:
    work, peak = limit.work, limit.peak
    return (
        f"{limit.share:.1%} of the hardware's limit of "
        f"{figures.num_output_tokens / limit.seconds:,.0f} output tok/s: "
        f"{work.weight_bytes / 1e12:.2f} TB of weights and {work.kv_bytes / 1e12:.2f} TB of KV "
        f"cache at {peak.bytes_per_s / 1e12:.2f} TB/s, "
        f"{work.prefill_operations / 1e15:.2f} POP of prefill at "
        f"{peak.operations_per_s / 1e12:.0f} TFLOP/s"
    )


def _totals(figures: Figures) -> Table:
    rows = {
        "output tokens per second": f"{figures.output_tokens_per_s:,.1f}",
        "prompt and output tokens per second": f"{figures.total_tokens_per_s:,.1f}",
        "requests per second": f"{figures.requests_per_s:,.2f}",
        "prompt tokens": f"{figures.num_prompt_tokens:,}",
        "of them cached": f"{figures.cache_hit_rate:.1%}",
        "output tokens": f"{figures.num_output_tokens:,}",
        "steps": f"{figures.num_steps:,}",
        "retractions": f"{figures.num_retractions:,}",
    }
    table = Table(Column(), Column(justify="right"), show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _latencies(figures: Figures) -> Table:
    table = Table("milliseconds")
    for heading in ("mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    rows = {
        "time to first token": figures.ttft_s,
        "time per output token": figures.tpot_s,
        "end to end": figures.e2e_s,
    }
    for name, values in rows.items():
        if values is not None:
            cells = (values.mean, values.p50, values.p90, values.p99)
            table.add_row(name, *(f"{seconds * 1e3:,.2f}" for seconds in cells))
    return table
