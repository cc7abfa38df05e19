"""Computes figures from the record of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minisgl.bench.energy import Energy, Spent
from minisgl.bench.offline_run import RequestRecord, RunRecord, StepCounts
from minisgl.bench.peak import Peak
from minisgl.bench.roofline import Work
from minisgl.config import ModelFacts, ResolvedConfig


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        return cls(statistics.fmean(values), *np.percentile(values, (50, 90, 99)).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput: the requests that met every latency limit."""

    limits_s: Mapping[str, float]  # of ttft, tpot, itl (a request's longest) and e2e
    requests_per_s: float
    share: float  # of the requests sent, the failed ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results of a run. Rates are per second of its whole length; None: unknown."""

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
    host_hit_rate: float = 0.0  # of the prompt tokens, those loaded from host memory
    disk_hit_rate: float = 0.0  # of the prompt tokens, those read from disk
    # Of the guesses of output tokens that were verified, those that were right; None without any.
    draft_acceptance: float | None = None
    tokens_per_step: float = 1.0  # output tokens of a request in a step that samples one
    graph_share: float | None  # of the steps, those that ran as a CUDA graph
    ttft_s: Distribution
    tpot_s: Distribution | None  # None if no output has two tokens
    itl_s: Distribution | None = None  # None where tokens are not taken one by one
    e2e_s: Distribution
    structured_share: float = 0.0  # of the requests, those whose output followed a schema
    goodput: Goodput | None = None
    energy: Energy | None = None  # None where no GPU counts it

    @property
    def headline(self) -> str:
        """The rate that a run is about: of tokens generated or, if there are none, of prompts."""
        if self.num_output_tokens:
            return f"{self.output_tokens_per_s:,.1f} output tok/s"
        return f"{self.input_tokens_per_s:,.1f} prompt tok/s, {self.requests_per_s:,.2f} requests/s"

    @classmethod
    def of(cls, run: RunRecord) -> Figures:
        return cls.of_requests(run.requests, run.elapsed_s, run)

    @classmethod
    def of_requests(
        cls, requests: Sequence[RequestRecord], elapsed_s: float, counts: StepCounts | None
    ) -> Figures:
        """counts: None where the engine does not tell them."""
        num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
        num_cached_tokens = sum(request.num_cached_tokens for request in requests)
        num_output_tokens = sum(request.num_output_tokens for request in requests)
        num_drafted = sum(request.num_drafted_tokens for request in requests)
        num_accepted = sum(request.num_accepted_tokens for request in requests)
        tpots_s = [request.tpot_s for request in requests if request.tpot_s is not None]
        return cls(
            elapsed_s=elapsed_s,
            num_requests=len(requests),
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_steps=counts.num_steps if counts else None,
            num_retractions=counts.num_retractions if counts else None,
            input_tokens_per_s=num_prompt_tokens / elapsed_s,
            output_tokens_per_s=num_output_tokens / elapsed_s,
            total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / elapsed_s,
            requests_per_s=len(requests) / elapsed_s,
            cache_hit_rate=num_cached_tokens / num_prompt_tokens,
            host_hit_rate=sum(request.num_host_tokens for request in requests) / num_prompt_tokens,
            disk_hit_rate=sum(request.num_disk_tokens for request in requests) / num_prompt_tokens,
            draft_acceptance=num_accepted / num_drafted if num_drafted else None,
            tokens_per_step=num_output_tokens / max(1, num_output_tokens - num_accepted),
            graph_share=counts.graph_share if counts else None,
            ttft_s=Distribution.of([request.ttft_s for request in requests]),
            tpot_s=Distribution.of(tpots_s) if tpots_s else None,
            e2e_s=Distribution.of([request.e2e_s for request in requests]),
            structured_share=sum(request.structured for request in requests) / len(requests),
        )

    def with_energy(self, spent: Spent) -> Figures:
        """The same with the energy of the run."""
        return replace(self, energy=spent.energy(self.num_output_tokens))


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of one figure over repetitions."""

    median: float
    low: float
    high: float


# The figures whose spread is reported, with labels and factors.
SPREAD_FIGURES = {
    "output_tokens_per_s": ("output tok/s", 1.0),
    "ttft_s": ("TTFT p50 ms", 1e3),
    "tpot_s": ("TPOT p50 ms", 1e3),
    "e2e_s": ("E2E p50 ms", 1e3),
}


def spreads(repetitions: Sequence[Figures]) -> dict[str, Spread]:
    """Spreads over the repetitions after the first, which warms up; empty for fewer than two."""
    found: dict[str, Spread] = {}
    for name in SPREAD_FIGURES:
        values = [getattr(figures, name) for figures in repetitions[1:]]
        numbers = [v.p50 if isinstance(v, Distribution) else v for v in values if v is not None]
        if len(numbers) > 1 and any(numbers):
            found[name] = Spread(statistics.median(numbers), min(numbers), max(numbers))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The hardware's limit for a run (not on a CPU, see `engine_peak`)."""

    peak: Peak
    work: Work
    share: float  # of it that the run reached

    @classmethod
    def of(
        cls,
        run: RunRecord,
        elapsed_s: float,
        model: ModelFacts,
        peak: Peak,
        config: ResolvedConfig,
        max_concurrency: int | None = None,
    ) -> Limit:
        """The limit for a run that took `elapsed_s` on an engine with these options.

        max_concurrency: of the requests that the engine gets; None: any number at once.
        """
        most = config.max_running_requests
        work = Work.of(
            run,
            model,
            peak,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            max_running=min(most, max_concurrency or most),
        )
        return cls(peak=peak, work=work, share=work.seconds / elapsed_s)
