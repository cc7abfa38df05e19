"""Computes figures from the record of a run over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from minisgl.bench.figures import Distribution, Figures, Goodput
from minisgl.bench.offline_run import StepCounts
from minisgl.bench.online.run import OnlineRun, StreamedRequest


def online_figures(
    run: OnlineRun, counts: StepCounts | None, limits_s: Mapping[str, float]
) -> Figures:
    """Figures as seen by the clients; `counts` is from the server's metrics."""
    requests, elapsed_s = run.requests, run.elapsed_s
    figures = Figures.of_requests([request.record for request in requests], elapsed_s, counts)
    itls_s = [*chain.from_iterable(request.itls_s for request in requests)]
    told = any(request.tells_cached for request in requests)
    num_failed = run.failures.total()
    return replace(
        figures,
        num_failed=num_failed,
        num_cached_tokens=figures.num_cached_tokens if told else None,
        cache_hit_rate=figures.cache_hit_rate if told else None,
        itl_s=Distribution.of(itls_s) if itls_s else None,
        goodput=goodput(requests, num_failed, elapsed_s, limits_s) if limits_s else None,
    )


def goodput(
    requests: Sequence[StreamedRequest],
    num_failed: int,
    elapsed_s: float,
    limits_s: Mapping[str, float],
) -> Goodput:
    """Goodput: requests that met every latency limit; failed requests never do."""
    num_good = sum(_keeps(request, limits_s) for request in requests)
    return Goodput(
        limits_s=dict(limits_s),
        requests_per_s=num_good / elapsed_s,
        share=num_good / (len(requests) + num_failed),
    )


def _keeps(request: StreamedRequest, limits_s: Mapping[str, float]) -> bool:
    record = request.record
    found = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0.0,  # a single token meets any limit
        "itl": max(request.itls_s, default=0.0),
        "e2e": record.e2e_s,
    }
    return all(found[name] <= limit for name, limit in limits_s.items())
