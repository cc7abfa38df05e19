"""The result of a measurement, and figures as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from minisgl.bench.figures import SPREAD_FIGURES, Figures, Limit, Spread, spreads
from minisgl.bench.offline_run import RequestRecord
from minisgl.bench.online.load_config import Point
from minisgl.bench.online.metrics_poller import Sample
from minisgl.printable import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One point of a sweep; figures, requests and timeline are of the last repetition."""

    point: Point
    limit: Limit | None
    repetitions: list[Figures]
    requests: list[RequestRecord]
    itls_s: list[float] = field(default_factory=list)  # empty if tokens are not consumed one by one
    failures: dict[str, int] = field(default_factory=dict)
    timeline: list[Sample] = field(default_factory=list)

    @property
    def figures(self) -> Figures:
        return self.repetitions[-1]

    @property
    def spreads(self) -> dict[str, Spread]:
        return spreads(self.repetitions)

    def as_json(self) -> dict[str, Any]:
        """The result without the times of single tokens, of which there may be millions."""
        shown = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        del shown["point"], shown["itls_s"]
        found = {"figures": self.figures, "spreads": self.spreads}
        return self.point._asdict() | found | shown


def sweep_tables(found: Sequence[PointResult], width: int) -> list[Table]:
    """A sweep as a table with a row for each point; see `run_tables`."""
    return run_tables([_sweep_row(one) for one in found], [one.figures for one in found], width)


def run_tables(
    rows: Sequence[Mapping[str, str]], figures: Sequence[Figures], width: int
) -> list[Table]:
    """Rows of cells by heading as a table, with the energy and the drafts of any runs.

    figures: of each row. Where the table is wider than `width` columns of the terminal, it is one
    with a column for each row, or several of them.
    """
    with_energy = any(each.energy for each in figures)
    with_drafts = has_drafts(figures)
    cells: list[list[str]] = []
    for row, each in zip(rows, figures, strict=True):
        energy = each.energy
        whole = dict(row)
        if with_energy:
            whole["watts"] = f"{energy.mean_watts:,.0f}" if energy else "-"
            joules = energy.joules_per_output_token if energy else None
            whole["joules/token"] = _known(joules, ",.3f") or "-"
        if with_drafts:
            whole["drafts accepted"] = _known(each.draft_acceptance, ".1%") or "-"
            whole["tokens/step"] = f"{each.tokens_per_step:.2f}"
        headings = [*whole]
        cells.append([*whole.values()])
    if _width(headings, cells) <= width:
        return [_table(headings, cells)]
    tables = []
    while cells:
        num = len(cells)
        while num > 1 and _width(*_turned(headings, cells[:num])) > width:
            num -= 1
        tables.append(_table(*_turned(headings, cells[:num])))
        cells = cells[num:]
    return tables


def _sweep_row(one: PointResult) -> dict[str, str]:
    figures, (rate, most) = one.figures, one.point
    row = {
        "requests/s sent": "inf" if rate is None else f"{rate:g}",
        "at once": "any" if most is None else f"{most}",
        "output tok/s": f"{figures.output_tokens_per_s:,.1f}",
        "requests/s": f"{figures.requests_per_s:,.2f}",
    }
    latencies = {"TTFT": figures.ttft_s, "TPOT": figures.tpot_s, "E2E": figures.e2e_s}
    for name, latency in latencies.items():
        for part in ("p50", "p99"):
            found = f"{getattr(latency, part) * 1e3:,.1f}" if latency else "-"
            row[f"{name} ms {part}"] = found
    if good := figures.goodput:
        return row | {"good requests/s": f"{good.requests_per_s:,.2f}"}
    return row | {"failed": f"{figures.num_failed:,}"}


def _turned(
    headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """A column for each row; the first of each is its heading."""
    columns = list(map(list, zip(headings, *rows, strict=True)))
    return columns[0], columns[1:]


def _width(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The columns of the terminal that a table takes: cells with a blank at both sides, and lines
    between them."""
    columns = zip(headings, *rows, strict=True)
    return 1 + sum(3 + max(map(len, column)) for column in columns)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def has_drafts(figures: Sequence[Figures]) -> bool:
    return any(each.draft_acceptance is not None for each in figures)


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


def print_figures(console: Console, figures: Figures, limit: Limit | None) -> None:
    console.print(_totals(figures))
    console.print(_latencies(figures))
    if limit is not None:
        console.print(_explain(figures, limit))
    num_tokens = figures.num_output_tokens or figures.num_prompt_tokens
    console.print(
        f"{figures.headline}: {counted(num_tokens, 'token')} "
        f"of {counted(figures.num_requests, 'request')} in {figures.elapsed_s:.2f} s"
    )


def _explain(figures: Figures, limit: Limit) -> str:
    work, peak = limit.work, limit.peak
    reached = (work.prefill_operations + work.decode_operations) / figures.elapsed_s
    return (
        f"{limit.share:.1%} of the hardware's limit of "
        f"{figures.num_output_tokens / work.seconds:,.0f} output tok/s, "
        f"with {reached / 1e12:,.0f} TFLOP/s done: "
        f"{work.weight_bytes / 1e12:.2f} TB of weights and {work.kv_bytes / 1e12:.2f} TB of KV "
        f"cache, {work.prefill_operations / 1e15:.2f} POP of prefill and "
        f"{work.decode_operations / 1e15:.2f} of decoding, at {peak}"
    )


def _totals(figures: Figures) -> Table:
    goodput, energy = figures.goodput, figures.energy
    has_output = figures.num_output_tokens > 0
    rows = {
        "output tokens per second": has_output and f"{figures.output_tokens_per_s:,.1f}",
        "prompt tokens per second": f"{figures.input_tokens_per_s:,.1f}",
        "prompt and output tokens per second": has_output and f"{figures.total_tokens_per_s:,.1f}",
        "requests per second": f"{figures.requests_per_s:,.2f}",
        "of them within the limits": goodput and f"{goodput.requests_per_s:,.2f}",
        "share within the limits": goodput and f"{goodput.share:.1%}",
        "requests that failed": figures.num_failed and f"{figures.num_failed:,}",
        "share under a JSON schema": figures.structured_share and f"{figures.structured_share:.1%}",
        "prompt tokens": f"{figures.num_prompt_tokens:,}",
        "of them cached": _known(figures.cache_hit_rate, ".1%"),
        "of them from host memory": figures.host_hit_rate and f"{figures.host_hit_rate:.1%}",
        "of them from disk": figures.disk_hit_rate and f"{figures.disk_hit_rate:.1%}",
        "output tokens": has_output and f"{figures.num_output_tokens:,}",
        "drafts accepted": _known(figures.draft_acceptance, ".1%"),
        "output tokens of a request a step": figures.draft_acceptance is not None
        and f"{figures.tokens_per_step:.2f}",
        "steps": _known(figures.num_steps, ","),
        "of them as CUDA graphs": _known(figures.graph_share, ".1%"),
        "retractions": _known(figures.num_retractions, ","),
        "mean watts of the GPUs": energy and f"{energy.mean_watts:,.0f}",
        "joules per output token": energy and _known(energy.joules_per_output_token, ",.3f"),
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
        "time to first token": figures.ttft_s if figures.num_output_tokens else None,
        "time per output token": figures.tpot_s,
        "between events with text": figures.itl_s,
        "end to end": figures.e2e_s,
    }
    for name, values in rows.items():
        if values is not None:
            cells = (values.mean, values.p50, values.p90, values.p99)
            table.add_row(name, *(f"{seconds * 1e3:,.2f}" for seconds in cells))
    return table
