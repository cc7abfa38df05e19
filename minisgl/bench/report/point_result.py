"""What a benchmark found, at one point of a sweep or at several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from minisgl.bench.offline_run import RequestRecord
from minisgl.bench.online.config import Point
from minisgl.bench.online.metrics_poller import Sample
from minisgl.bench.report.figures import Figures, Limit, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One point of a sweep; figures, requests and timeline are of the last repetition."""

    point: Point
    figures: Figures
    limit: Limit | None
    repetitions: list[Figures]
    spreads: dict[str, Spread]
    requests: list[RequestRecord]
    itls_s: list[float] = field(default_factory=list)  # none where tokens are not taken one by one
    failures: dict[str, int] = field(default_factory=dict)
    timeline: list[Sample] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Without the times of single tokens, which are millions."""
        return {
            "request_rate": self.point.request_rate,
            "max_concurrency": self.point.max_concurrency,
            "figures": self.figures,
            "limit": self.limit,
            "repetitions": self.repetitions,
            "spreads": self.spreads,
            "requests": self.requests,
            "failures": self.failures,
            "timeline": self.timeline,
        }


def sweep_table(found: Sequence[PointResult]) -> Table:
    """A row for each point."""
    table = Table()
    headings = ("requests/s sent", "at once", "output tok/s", "requests/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name in ("TTFT", "TPOT", "E2E"):
        table.add_column(f"{name} ms p50", justify="right")
        table.add_column("p99", justify="right")
    with_goodput = found[0].figures.goodput is not None
    table.add_column("good requests/s" if with_goodput else "failed", justify="right")
    for one in found:
        figures, (rate, most) = one.figures, one.point
        cells = [
            "inf" if rate is None else f"{rate:g}",
            "any" if most is None else f"{most}",
            f"{figures.output_tokens_per_s:,.1f}",
            f"{figures.requests_per_s:,.2f}",
        ]
        for latency in (figures.ttft_s, figures.tpot_s, figures.e2e_s):
            cells += [f"{latency.p50 * 1e3:,.1f}", f"{latency.p99 * 1e3:,.1f}"] if latency else "--"
        good = figures.goodput
        cells.append(f"{good.requests_per_s:,.2f}" if good else f"{figures.num_failed:,}")
        table.add_row(*cells)
    return table
