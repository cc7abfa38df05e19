"""/metrics: the counters of the engine and the routes, in a text format of Prometheus.

prometheus_client runs only during a scrape, so metrics cost nothing per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minisgl import __version__
from minisgl.engine.stats import EngineStats, Histogram, HostStats
from minisgl.server.engine_state import EngineState
from minisgl.server.history import buckets
from minisgl.server.http.access_log import Answered, Usage
from minisgl.server.metrics_format import Format

UNITS = frozenset({"bytes", "ratio", "seconds", "tokens"})


class MetricsPage(Collector):
    """Metrics on a page of their own, with those of the process, and the HTTP responses counted for
    it."""

    def __init__(self) -> None:
        self.responses: Counter[Answered] = Counter()
        # Not the library's global registry, which would add up the servers of a process.
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, format: Format) -> bytes:
        return format.encode(self._registry)

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
        self.usage: dict[str, Usage] = {}  # by the name of the key
        self._state = state

    def count_tool_call(self) -> None:
        self.num_tool_calls += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry at each scrape."""
        labels = {
            "version": __version__,
            "model": self._state.first_name() or "",
        }
        yield InfoMetricFamily("minisgl", "The version, and the model once it is known.", labels)
        yield self._responses(
            "minisgl_http_responses",
            "HTTP responses started; status 499: the client disconnected before.",
        )
        yield counter("tool_calls", self.num_tool_calls)
        yield from self._of_keys()
        if (loading := self._state.loading) is not None:
            yield gauge("loading_ratio", {loading.phase: loading.fraction}, "phase")
        stats = self._state.stats()
        if stats is not None:
            yield gauge("kv_capacity_tokens", self._state.num_cache_tokens)
            yield from _figures(stats)
            yield from _parts(stats)
            yield from _histograms(stats)
        if (memory := self._state.gpu_memory()) is not None:
            yield gauge("gpu_memory_used_bytes", memory.used)
            yield gauge("gpu_memory_total_bytes", memory.total)

    def _of_keys(self) -> Iterator[Metric]:
        usage = self.usage
        if usage:
            requests = {name: each.num_requests for name, each in usage.items()}
            yield counter("key_requests", requests, "key")
            prompts = {name: each.num_prompt_tokens for name, each in usage.items()}
            yield counter("key_prompt_tokens", prompts, "key")
            answers = {name: each.num_output_tokens for name, each in usage.items()}
            yield counter("key_generated_tokens", answers, "key")


ABOUT = {
    "tool_calls": "Tool calls in answers.",
    "key_requests": "Requests that have ended, by the name of their key.",
    "key_prompt_tokens": "Prompt tokens of these.",
    "key_generated_tokens": "Generated tokens of these.",
    "loading_ratio": "While the model loads: how much of the phase is done, 0 to 1; 0 if that is "
    "unknown.",
    "running_requests": "Number of requests currently running.",
    "queued_requests": "Number of requests waiting to run.",
    "kv_capacity_tokens": "Tokens that the KV cache has room for.",
    "token_usage_ratio": "Fraction of the KV cache's pages held by requests, 0 to 1.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Generated tokens.",
    "retractions": "Number of times that a running request was requeued because the KV cache was "
    "full.",
    "graph_steps": "Steps that ran as a CUDA graph.",
    "cached_grammars": "Constraints of requests whose grammar had been compiled before.",
    "masked_rows": "Tokens that were sampled under a mask of a grammar.",
    "requests_finished": "Requests that have ended.",
    # For a KV cache of more than one tier.
    "tier_tokens": "Tokens that a tier of the KV cache holds.",
    "tier_hit_tokens": "Prompt tokens found in the prefix cache, by the tier that held them.",
    "tier_copied_bytes": "Bytes of KV copied between device, host memory and disk, on one rank.",
    "tier_copy_seconds": "Time in which such copies were under way, on one rank.",
    # For prefixes that engines send each other.
    "kv_transfers": "Prefixes sent to other engines, and received from them.",
    "kv_transfers_direct": "Of these, prefixes that went from device to device.",
    "kv_transfer_bytes": "Bytes of KV in such transfers.",
    "kv_transfer_seconds": "Time that such transfers took.",
    "kv_transfer_fallbacks": "Prefixes that this engine computed, or their ends, because they did "
    "not come.",
    # For a model that keeps a state of each request.
    "snapshots": "Snapshots of states of requests that fit into memory.",
    "snapshots_cached": "Snapshots of states from which requests may go on behind a cached prefix.",
    # For speculation.
    "drafted_tokens": "Guesses of tokens that were verified.",
    "accepted_draft_tokens": "Of these, those that were right: tokens that took no step of their "
    "own.",
    "decode_rows": "Requests in decode steps, counted in each step: each got a token, and one more "
    "for each accepted draft.",
    "draft_length": "Guesses for each request that the last step verified, at most.",
    # Histograms.
    "step_seconds": "Duration of a step, from its launch or the end of the previous step.",
    "time_to_first_token_seconds": "Time from a request's submission to its first token.",
    "inter_token_seconds": "Time from one token of a request to its next.",
    "request_seconds": "Time from submission to the end of requests that finished with stop or "
    "length.",
    "request_queue_seconds": "Time from submission until a request first ran, or ended before.",
    "request_prefill_seconds": "Time from when a request first ran to its first token, of requests "
    "that finished with stop or length.",
    "request_decode_seconds": "Time from the first token to the last, of requests that finished "
    "with stop or length.",
    "request_prompt_tokens": "Prompt tokens of requests that finished with stop or length.",
    "request_generated_tokens": "Generated tokens of requests that finished with stop or length.",
    "grammar_compile_seconds": "Time to compile a grammar, or to refuse it; cached ones are not "
    "counted.",
    "mask_seconds": "Time to fill the token masks of one step.",
    # Where there is a GPU.
    "gpu_memory_used_bytes": "Memory of the GPU of rank 0 that is in use, by all processes.",
    "gpu_memory_total_bytes": "Memory of the GPU of rank 0.",
}
Values: TypeAlias = float | Mapping[str, float]  # one, or one for each value of a label


def figure(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    values: Values,
    label: str = "",
    about: str = "",
) -> Metric:
    """A metric; about: what ABOUT says, if it is one of the engine's."""
    labels = [label] if label else []
    family = kind(f"minisgl_{name}", about or ABOUT[name], labels=labels, unit=unit_of(name))
    for key, value in (values if isinstance(values, Mapping) else {"": values}).items():
        family.add_metric([key] if label else [], value)
    return family


def unit_of(name: str) -> str:
    """The unit that the name of a metric ends with; empty if it has none."""
    unit = name.rpartition("_")[2]
    return unit if unit in UNITS else ""


counter = partial(figure, CounterMetricFamily)
gauge = partial(figure, GaugeMetricFamily)


def _both_ways(name: str, sent: float, received: float) -> Metric:
    return counter(name, {"sent": sent, "received": received}, "direction")


def _figures(stats: EngineStats) -> Iterator[Metric]:
    counters, totals = stats.counters, stats.totals
    yield gauge("running_requests", stats.num_running)
    yield gauge("queued_requests", stats.num_queued)
    yield gauge("token_usage_ratio", stats.token_usage)
    yield counter("prompt_tokens", counters.num_prompt_tokens)
    yield counter("cached_prompt_tokens", counters.num_cached_tokens)
    yield counter("generated_tokens", totals.num_output_tokens)
    yield counter("retractions", counters.num_retractions)
    yield counter("graph_steps", totals.num_graph_steps)
    yield counter("cached_grammars", totals.num_cached_grammars)
    yield counter("masked_rows", totals.num_masked_rows)
    finished = {reason.value: count for reason, count in totals.num_finished.items()}
    yield counter("requests_finished", finished, "reason")


def _parts(stats: EngineStats) -> Iterator[Metric]:
    """What only some engines have."""
    if stats.host is not None:
        yield from _tiers(stats, stats.host)
    if stats.transfers is not None:
        sent, received = stats.transfers.sent, stats.transfers.received
        yield _both_ways("kv_transfers", sent.num_transfers, received.num_transfers)
        yield _both_ways("kv_transfers_direct", sent.num_direct, received.num_direct)
        yield _both_ways("kv_transfer_bytes", sent.num_bytes, received.num_bytes)
        yield _both_ways("kv_transfer_seconds", sent.seconds, received.seconds)
        yield counter("kv_transfer_fallbacks", stats.transfers.num_failed)
    if stats.snapshots is not None:
        yield gauge("snapshots", stats.snapshots.num)
        yield gauge("snapshots_cached", stats.snapshots.num_cached)
    if stats.drafts is not None:
        yield counter("drafted_tokens", stats.drafts.num_drafted)
        yield counter("accepted_draft_tokens", stats.drafts.num_accepted)
        yield counter("decode_rows", stats.drafts.num_rows)
        yield gauge("draft_length", stats.drafts.num_in_use)


def _tiers(stats: EngineStats, host: HostStats) -> Iterator[Metric]:
    """Where the KV cache is, for an engine with more than one tier."""
    counters, traffic = stats.counters, host.traffic
    held = {
        "device": (stats.num_pages - stats.num_free_pages) * host.page_size,
        "host": host.num_used_pages * host.page_size,
    }
    num_elsewhere = counters.num_host_tokens + counters.num_disk_tokens
    hits = {
        "device": counters.num_cached_tokens - num_elsewhere,
        "host": counters.num_host_tokens,
    }
    copies = {"offload": traffic.offloads, "load": traffic.loads}
    if host.has_disk:
        hits["disk"] = counters.num_disk_tokens
        copies |= {"write": traffic.writes, "read": traffic.reads}
    yield gauge("tier_tokens", held, "tier")
    yield counter("tier_hit_tokens", hits, "tier")
    num_bytes = {direction: each.num_bytes for direction, each in copies.items()}
    yield counter("tier_copied_bytes", num_bytes, "direction")
    seconds = {direction: each.seconds for direction, each in copies.items()}
    yield counter("tier_copy_seconds", seconds, "direction")


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    totals = stats.totals
    histograms: dict[str, Histogram] = {
        "step_seconds": totals.step_s,
        "time_to_first_token_seconds": totals.ttft_s,
        "inter_token_seconds": totals.itl_s,
        "request_seconds": totals.e2e_s,
        "request_queue_seconds": totals.queue_s,
        "request_prefill_seconds": totals.prefill_s,
        "request_decode_seconds": totals.decode_s,
        "request_prompt_tokens": totals.prompt_lengths,
        "request_generated_tokens": totals.answer_lengths,
        "grammar_compile_seconds": totals.compile_s,
        "mask_seconds": totals.mask_s,
    }
    for name, histogram in histograms.items():
        yield HistogramMetricFamily(
            f"minisgl_{name}",
            ABOUT[name],
            buckets(histogram),
            histogram.sum,
            unit=unit_of(name),
        )
