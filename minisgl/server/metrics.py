"""/metrics: the counters of the engine and the routes, in Prometheus' text format.

prometheus_client runs only during a scrape, so metrics cost nothing per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from minisgl.engine.stats import EngineStats, HostStats, SnapshotStats, Totals, TransferStats
from minisgl.scheduler.runs import DraftCounters
from minisgl.server.engine_state import EngineState
from minisgl.server.http.access_log import Answered

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage(Collector):
    """Metrics on a page of their own, and the HTTP responses counted for it."""

    def __init__(self) -> None:
        self.responses: Counter[Answered] = Counter()
        # Not the library's global registry, which would add up the servers of a process.
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Called at registration; an empty list keeps the library from collecting then."""
        return []

    def _responses(self, name: str, documentation: str) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=Answered._fields)
        for answered, count in self.responses.items():
            family.add_metric([answered.route, str(answered.status)], count)
        return family


class Metrics(MetricsPage):
    """The metrics of one server. Those of the engine appear once it has started."""

    def __init__(self, state: EngineState) -> None:
        super().__init__()
        self.num_tool_calls = 0
        self._state = state

    def count_tool_call(self) -> None:
        self.num_tool_calls += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        yield self._info()
        yield self._responses(
            "minisgl_http_responses",
            "HTTP responses started; status 499: the client disconnected before.",
        )
        yield CounterMetricFamily(
            "minisgl_tool_calls", "Tool calls in answers.", self.num_tool_calls
        )
        if (loading := self._state.loading) is not None:
            yield gauge(
                "minisgl_loading_ratio",
                "While the model loads: how much of the phase is done, 0 to 1; 0 if that is "
                "unknown.",
                *("phase", {loading.phase: loading.fraction}),
            )
        stats = self._state.stats()
        if stats is not None:
            yield from _figures(stats)
            if stats.host is not None:
                yield from _tiers(stats, stats.host)
            if stats.transfers is not None:
                yield from _transfers(stats.transfers)
            if stats.snapshots is not None:
                yield from _snapshots(stats.snapshots)
            if stats.drafts is not None:
                yield from _drafts(stats.drafts)
            yield from _histograms(stats.totals)

    def _info(self) -> Metric:
        labels = {
            "version": metadata.version("minisgl"),
            "model": self._state.first_name() or "",
        }
        return InfoMetricFamily("minisgl", "The version, and the model once it is known.", labels)


def counter(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter with one label, whose values are the keys of `values`."""
    return _filled(CounterMetricFamily(name, documentation, labels=[label]), values)


def gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one label, whose values are the keys of `values`."""
    return _filled(GaugeMetricFamily(name, documentation, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _figures(stats: EngineStats) -> Iterator[Metric]:
    counters, totals = stats.counters, stats.totals
    gauges = {
        "minisgl_running_requests": ("Number of requests currently running.", stats.num_running),
        "minisgl_queued_requests": ("Number of requests waiting to run.", stats.num_queued),
        "minisgl_token_usage_ratio": (
            "Fraction of the KV cache's pages held by requests, 0 to 1.",
            stats.token_usage,
        ),
    }
    for name, (documentation, value) in gauges.items():
        yield GaugeMetricFamily(name, documentation, value)
    counts = {
        "minisgl_prompt_tokens": (
            "Prompt tokens of admitted requests.",
            counters.num_prompt_tokens,
        ),
        "minisgl_cached_prompt_tokens": (
            "Prompt tokens found in the prefix cache.",
            counters.num_cached_tokens,
        ),
        "minisgl_generated_tokens": ("Generated tokens.", totals.num_output_tokens),
        "minisgl_retractions": (
            "Number of times that a running request was requeued because the KV cache was full.",
            counters.num_retractions,
        ),
        "minisgl_graph_steps": ("Steps that ran as a CUDA graph.", totals.num_graph_steps),
        "minisgl_cached_grammars": (
            "Constraints of requests whose grammar had been compiled before.",
            totals.num_cached_grammars,
        ),
        "minisgl_masked_rows": (
            "Tokens that were sampled under a mask of a grammar.",
            totals.num_masked_rows,
        ),
    }
    for name, (documentation, count) in counts.items():
        yield CounterMetricFamily(name, documentation, count)
    finished = {reason.value: count for reason, count in totals.num_finished.items()}
    yield counter("minisgl_requests_finished", "Requests that have ended.", "reason", finished)


def _tiers(stats: EngineStats, host: HostStats) -> Iterator[Metric]:
    """Where the KV cache is, for an engine with more than one tier."""
    counters, traffic = stats.counters, host.traffic
    held = {
        "device": (stats.num_pages - stats.num_free_pages) * host.page_size,
        "host": host.num_used_pages * host.page_size,
    }
    yield gauge("minisgl_tier_tokens", "Tokens that a tier of the KV cache holds.", "tier", held)
    num_elsewhere = counters.num_host_tokens + counters.num_disk_tokens
    hits = {
        "device": counters.num_cached_tokens - num_elsewhere,
        "host": counters.num_host_tokens,
    }
    copies = {"offload": traffic.offloads, "load": traffic.loads}
    if host.has_disk:
        hits["disk"] = counters.num_disk_tokens
        copies |= {"write": traffic.writes, "read": traffic.reads}
    yield counter(
        "minisgl_tier_hit_tokens",
        "Prompt tokens found in the prefix cache, by the tier that held them.",
        *("tier", hits),
    )
    yield counter(
        "minisgl_tier_copied_bytes",
        "Bytes of KV copied between device, host memory and disk, on one rank.",
        *("direction", {direction: each.num_bytes for direction, each in copies.items()}),
    )
    yield counter(
        "minisgl_tier_copy_seconds",
        "Time in which such copies were under way, on one rank.",
        *("direction", {direction: each.seconds for direction, each in copies.items()}),
    )


def _snapshots(stats: SnapshotStats) -> Iterator[Metric]:
    """For a model that keeps a state of each request."""
    yield GaugeMetricFamily(
        "minisgl_snapshots", "Snapshots of states of requests that fit into memory.", stats.num
    )
    yield GaugeMetricFamily(
        "minisgl_snapshots_cached",
        "Snapshots of states from which requests may go on behind a cached prefix.",
        stats.num_cached,
    )


def _drafts(drafts: DraftCounters) -> Iterator[Metric]:
    """For an engine with speculation."""
    yield CounterMetricFamily(
        "minisgl_drafted_tokens", "Guesses of tokens that were verified.", drafts.num_drafted
    )
    yield CounterMetricFamily(
        "minisgl_accepted_draft_tokens",
        "Of these, those that were right: tokens that took no step of their own.",
        drafts.num_accepted,
    )
    yield CounterMetricFamily(
        "minisgl_decode_rows",
        "Requests in decode steps, counted in each step: each got a token, and one more for each "
        "accepted draft.",
        drafts.num_rows,
    )
    yield GaugeMetricFamily(
        "minisgl_draft_length",
        "Guesses for each request that the last step verified, at most.",
        drafts.num_in_use,
    )


def _transfers(stats: TransferStats) -> Iterator[Metric]:
    """The prefixes that engines have sent each other."""
    sent, received = stats.sent, stats.received
    yield counter(
        "minisgl_kv_transfers",
        "Prefixes sent to other engines, and received from them.",
        *("direction", {"sent": sent.num_transfers, "received": received.num_transfers}),
    )
    yield counter(
        "minisgl_kv_transfers_direct",
        "Of these, prefixes that went from device to device.",
        *("direction", {"sent": sent.num_direct, "received": received.num_direct}),
    )
    yield counter(
        "minisgl_kv_transfer_bytes",
        "Bytes of KV in such transfers.",
        *("direction", {"sent": sent.num_bytes, "received": received.num_bytes}),
    )
    yield counter(
        "minisgl_kv_transfer_seconds",
        "Time that such transfers took.",
        *("direction", {"sent": sent.seconds, "received": received.seconds}),
    )
    yield CounterMetricFamily(
        "minisgl_kv_transfer_fallbacks",
        "Prefixes that this engine computed, or their ends, because they did not come.",
        stats.num_failed,
    )


def _histograms(totals: Totals) -> Iterator[Metric]:
    histograms = {
        "minisgl_step_seconds": (
            "Duration of a step, from its launch or the end of the previous step.",
            totals.step_s,
        ),
        "minisgl_time_to_first_token_seconds": (
            "Time from a request's submission to its first token.",
            totals.ttft_s,
        ),
        "minisgl_inter_token_seconds": (
            "Time from one token of a request to its next.",
            totals.itl_s,
        ),
        "minisgl_request_seconds": (
            "Time from submission to the end of requests that finished with stop or length.",
            totals.e2e_s,
        ),
        "minisgl_grammar_compile_seconds": (
            "Time to compile a grammar, or to refuse it; cached ones are not counted.",
            totals.compile_s,
        ),
        "minisgl_mask_seconds": (
            "Time to fill the token masks of one step.",
            totals.mask_s,
        ),
    }
    for name, (documentation, histogram) in histograms.items():
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        yield HistogramMetricFamily(name, documentation, buckets, histogram.sum)
