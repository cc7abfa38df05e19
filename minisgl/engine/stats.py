"""Counts and measurements of the engine: plain numbers, for logs and metrics.

Everything here is updated once a step or once a request. Times are seconds of `time.monotonic`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from minisgl.kvcache.copies import HostTraffic
from minisgl.kvcache.snapshots import SnapshotStats
from minisgl.request import FinishReason, Request
from minisgl.scheduler.runs import DraftCounters
from minisgl.scheduler.state import SchedulerCounters

# Upper bounds of the buckets in seconds, for durations of one step and of many steps.
STEP_BOUNDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
REQUEST_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)
# Upper bounds in tokens, for prompts and answers.
TOKEN_BOUNDS = tuple(float(1 << power) for power in range(21))
# Of the masks of one step.
MASK_BOUNDS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
)


@dataclass(slots=True)
class Histogram:
    """A histogram: counts per bucket, and the sum of the values."""

    bounds: tuple[float, ...]  # ascending, inclusive
    counts: list[int] = field(init=False)  # one per bucket; the last bucket is unbounded
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


_of_steps = partial(Histogram, STEP_BOUNDS)
_of_requests = partial(Histogram, REQUEST_BOUNDS)
_of_tokens = partial(Histogram, TOKEN_BOUNDS)
_of_masks = partial(Histogram, MASK_BOUNDS)


@dataclass(slots=True)
class Totals:
    """Totals since the start. Times are when the event loop handled an event."""

    num_output_tokens: int = 0
    num_graph_steps: int = 0  # replayed as a CUDA graph
    num_finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    num_cached_grammars: int = 0  # constraints whose grammar was compiled before
    num_masked_rows: int = 0  # masks that were filled
    step_s: Histogram = field(default_factory=_of_steps)  # on the device, from launch to tokens
    ttft_s: Histogram = field(default_factory=_of_requests)  # from submission to the first token
    itl_s: Histogram = field(default_factory=_of_steps)  # from one token of a request to its next
    e2e_s: Histogram = field(default_factory=_of_requests)  # of completed requests
    queue_s: Histogram = field(default_factory=_of_requests)  # until admitted, or until the end
    prefill_s: Histogram = field(default_factory=_of_requests)  # of completed requests
    decode_s: Histogram = field(default_factory=_of_requests)  # of those that have tokens
    prompt_lengths: Histogram = field(default_factory=_of_tokens)  # of completed requests
    answer_lengths: Histogram = field(default_factory=_of_tokens)  # of completed requests
    compile_s: Histogram = field(default_factory=_of_requests)  # of grammars
    mask_s: Histogram = field(default_factory=_of_masks)  # of a step with masked rows


class Meter:
    """Fills `totals`. The engine calls it on its loop."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._step_began_s = 0.0
        self._last_tokens_s = 0.0  # when the last step that had tokens ended

    def step_began(self, now: float) -> None:
        """Record a launch on an idle device. Any other step begins when its predecessor ends."""
        self._step_began_s = now

    def step_ended(self, now: float, *, captured: bool) -> float:
        """Record the end of a step; returns the seconds that it took."""
        began, self._step_began_s = self._step_began_s, now
        self.totals.step_s.observe(now - began)
        self.totals.num_graph_steps += captured
        return now - began

    def tokens_came(
        self, requests: Sequence[Request], num_tokens: Sequence[int], now: float
    ) -> None:
        """Record the tokens of one step. num_tokens: of each of `requests`, at least 1.

        The time since a request's previous token is divided equally among its new tokens.
        """
        totals = self.totals
        before, self._last_tokens_s = self._last_tokens_s, now
        num_steady = 0  # had a token in the previous step, as almost all; observed together
        for request, count in zip(requests, num_tokens, strict=True):
            last = request.last_token_s
            request.last_token_s = now
            if last == before and count == 1:
                num_steady += 1
            elif last is None:
                request.first_token_s = now
                totals.ttft_s.observe(now - request.submitted_s)
                if count > 1:
                    totals.itl_s.observe(0.0, count - 1)
            else:
                totals.itl_s.observe((now - last) / count, count)
        if num_steady:
            totals.itl_s.observe(now - before, num_steady)
        totals.num_output_tokens += sum(num_tokens)

    def grammar_compiled(self, seconds: float | None) -> None:
        """Record what a constraint took; None if it was cached."""
        if seconds is None:
            self.totals.num_cached_grammars += 1
        else:
            self.totals.compile_s.observe(seconds)

    def masks_filled(self, num_rows: int, seconds: float) -> None:
        """Record the masks of a step."""
        self.totals.num_masked_rows += num_rows
        self.totals.mask_s.observe(seconds)

    def request_ended(self, request: Request, now: float) -> None:
        reason = request.finish_reason
        assert reason is not None
        totals = self.totals
        totals.num_finished[reason] += 1
        admitted = now if request.admitted_s is None else request.admitted_s
        totals.queue_s.observe(admitted - request.submitted_s)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        totals.e2e_s.observe(now - request.submitted_s)
        totals.prompt_lengths.observe(request.num_prompt_tokens)
        totals.answer_lengths.observe(request.num_output_tokens)
        first, last = request.first_token_s, request.last_token_s
        totals.prefill_s.observe((now if first is None else first) - admitted)
        if first is not None and last is not None:
            totals.decode_s.observe(last - first)


@dataclass(frozen=True, slots=True)
class HostStats:
    """The host tier of the prefix cache."""

    page_size: int
    num_pages: int
    num_used_pages: int
    traffic: HostTraffic  # of one rank
    has_disk: bool = False

    @property
    def usage(self) -> float:
        """The fraction of the host tier that holds pages, 0 to 1."""
        return self.num_used_pages / self.num_pages


@dataclass(slots=True)
class TransferTotals:
    """The transfers of one direction that were complete."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_direct: int = 0  # of the transfers, those from device to device

    def add(self, num_bytes: int, seconds: float, *, is_direct: bool = False) -> None:
        self.num_transfers += 1
        self.num_direct += is_direct
        self.num_bytes += num_bytes
        self.seconds += seconds


@dataclass(slots=True)
class TransferStats:
    """Prefixes from and to other engines, since the start."""

    sent: TransferTotals = field(default_factory=TransferTotals)
    received: TransferTotals = field(default_factory=TransferTotals)
    num_failed: int = 0  # that this engine computed instead, or their ends


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, for logs and metrics."""

    num_running: int
    num_queued: int
    num_pages: int  # usable by requests
    num_free_pages: int
    num_cached_pages: int  # held only by the prefix cache: evictable
    counters: SchedulerCounters
    totals: Totals
    host: HostStats | None = None  # None: there is no host tier
    transfers: TransferStats | None = None  # None: there are no other engines
    snapshots: SnapshotStats | None = None  # None: the model keeps no state of a request
    drafts: DraftCounters | None = None  # None: there is no speculation

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    @property
    def token_usage(self) -> float:
        """The fraction of the KV cache that running requests hold, 0 to 1."""
        return self.num_used_pages / self.num_pages

    @property
    def num_output_tokens(self) -> int:
        return self.totals.num_output_tokens
