"""From the record of a run to figures, a table in the terminal and a file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.roofline import Peak, Work
from minisgl.bench.run_info import RunInfo


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
class Goodput:
    """The requests that kept all of some limits."""

    limits_s: Mapping[str, float]  # of ttft, tpot, itl (a request's longest) and e2e
    requests_per_s: float
    share: float  # of the requests sent, the failed ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run comes to. Rates are per second of its whole length; None: not known."""

    elapsed_s: float
    num_requests: int
    num_failed: int = 0
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    num_steps: int | None
    num_retractions: int | None
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    requests_per_s: float
    cache_hit_rate: float | None  # of the prompt tokens
    graph_share: float | None  # of the steps, those that ran as a CUDA graph
    ttft_s: Distribution
    tpot_s: Distribution | None  # None if no output has two tokens
    itl_s: Distribution | None = None  # None where tokens are not taken one by one
    e2e_s: Distribution
    goodput: Goodput | None = None

    @classmethod
    def of(cls, run: RunRecord) -> Figures:
        figures = cls.of_requests(run.requests, run.elapsed_s)
        return replace(
            figures,
            num_steps=run.num_steps,
            num_retractions=run.num_retractions,
            graph_share=run.num_graph_steps / run.num_steps if run.num_steps else None,
        )

    @classmethod
    def of_requests(cls, requests: Sequence[RequestRecord], elapsed_s: float) -> Figures:
        """Without what only the engine knows."""
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
            num_steps=None,
            num_retractions=None,
            input_tokens_per_s=num_prompt_tokens / elapsed_s,
            output_tokens_per_s=num_output_tokens / elapsed_s,
            total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / elapsed_s,
            requests_per_s=len(requests) / elapsed_s,
            cache_hit_rate=num_cached_tokens / num_prompt_tokens,
            graph_share=None,
            ttft_s=Distribution.of([request.ttft_s for request in requests]),
            tpot_s=Distribution.of(tpots_s) if tpots_s else None,
            e2e_s=Distribution.of([request.e2e_s for request in requests]),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure, over repetitions."""

    median: float
    low: float
    high: float


# What is said about repetitions, and how.
SPREAD_FIGURES = {
    "output_tokens_per_s": ("output tok/s", 1.0),
    "ttft_s": ("TTFT p50 ms", 1e3),
    "tpot_s": ("TPOT p50 ms", 1e3),
    "e2e_s": ("E2E p50 ms", 1e3),
}


def spreads(repetitions: Sequence[Figures]) -> dict[str, Spread]:
    """Of the repetitions after the first, which warms up; nothing if they are fewer than two."""
    found: dict[str, Spread] = {}
    for name in SPREAD_FIGURES:
        values = [getattr(figures, name) for figures in repetitions[1:]]
        numbers = [v.p50 if isinstance(v, Distribution) else v for v in values if v is not None]
        if len(numbers) > 1:
            found[name] = Spread(statistics.median(numbers), min(numbers), max(numbers))
    return found


def print_spreads(console: Console, repetitions: Sequence[Figures]) -> None:
    found = spreads(repetitions)
    if found:
        parts = []
        for name, spread in found.items():
            label, factor = SPREAD_FIGURES[name]
            median, low, high = (
                f"{value * factor:,.2f}" for value in (spread.median, spread.low, spread.high)
            )
            parts.append(f"{label} {median} ({low} to {high})")
        console.print(
            f"median (and range) of repetitions 2 to {len(repetitions)}: {'; '.join(parts)}"
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


def write_report(path: Path, run_info: RunInfo, **results: Any) -> None:
    """Everything about a measurement, as JSON; the results are dataclasses, or lists of them."""
    report = {field.name: getattr(run_info, field.name) for field in fields(run_info)} | results
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
    goodput = figures.goodput
    rows = {
        "output tokens per second": f"{figures.output_tokens_per_s:,.1f}",
        "prompt tokens per second": f"{figures.input_tokens_per_s:,.1f}",
        "prompt and output tokens per second": f"{figures.total_tokens_per_s:,.1f}",
        "requests per second": f"{figures.requests_per_s:,.2f}",
        "of them within the limits": goodput and f"{goodput.requests_per_s:,.2f}",
        "share within the limits": goodput and f"{goodput.share:.1%}",
        "requests that failed": figures.num_failed and f"{figures.num_failed:,}",
        "prompt tokens": f"{figures.num_prompt_tokens:,}",
        "of them cached": _known(figures.cache_hit_rate, ".1%"),
        "output tokens": f"{figures.num_output_tokens:,}",
        "steps": _known(figures.num_steps, ","),
        "of them as CUDA graphs": _known(figures.graph_share, ".1%"),
        "retractions": _known(figures.num_retractions, ","),
    }
    table = Table(Column(), Column(justify="right"), show_header=False)
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _latencies(figures: Figures) -> Table:
    table = Table("milliseconds")
    for heading in ("mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    rows = {
        "time to first token": figures.ttft_s,
        "time per output token": figures.tpot_s,
        "between events with text": figures.itl_s,
        "end to end": figures.e2e_s,
    }
    for name, values in rows.items():
        if values is not None:
            cells = (values.mean, values.p50, values.p90, values.p99)
            table.add_row(name, *(f"{seconds * 1e3:,.2f}" for seconds in cells))
    return table
