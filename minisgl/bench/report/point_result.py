"""The result of a benchmark at one point of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.bench.figures import Figures, Limit, Spread
from minisgl.bench.offline_run import RequestRecord
from minisgl.bench.online.load_config import Point
from minisgl.bench.online.metrics_poller import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One point of a sweep; figures, requests and timeline are of the last repetition."""

    point: Point
    figures: Figures
    limit: Limit | None
    repetitions: list[Figures]
    spreads: dict[str, Spread]
    requests: list[RequestRecord]
    itls_s: list[float] = field(default_factory=list)  # empty if tokens are not consumed one by one
    failures: dict[str, int] = field(default_factory=dict)
    timeline: list[Sample] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The result without the times of single tokens, of which there may be millions."""
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
