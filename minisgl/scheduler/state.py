"""What the scheduler keeps: requests that wait or run, and the work of plans with their rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minisgl.kvcache.lease import Lease, WindowPages
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.request import Request
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without a slot and pages, new or retracted."""

    request: Request
    arrival: int  # order of submission, kept through retraction
    # Number of tokens that will be known once every launched step is settled; an upper bound until
    # the lengths of the runs are known. A retracted request is not planned before that.
    num_expected: int
    retracted: bool = False
    # Number of times a later request was admitted first, or, while it was put off, one of others.
    num_overtaken: int = 0
    # Of its rank, if it wanted one of pages in host memory when it was last looked at.
    loads: Loads | None = None
    num_loads: int = 0  # that had begun by then
    asked_disk: bool = False  # whether it has more of the prefix
    reading_disk: bool = False  # pages of its prefix are on their way from the disk
    from_disk: range = range(0)  # pages of its prefix that came from there
    read_on: int | None = None  # the rank that has read them, if any came
    _key: bytes = b""

    @property
    def client(self) -> str:
        return self.request.tenant.client

    @property
    def ready(self) -> bool:
        return len(self.request.token_ids) >= self.num_expected

    def pack(self) -> bytes:
        """The packed token_ids of a request that is `ready`: they do not change any more."""
        if not self._key:
            self._key = pack_tokens(self.request.token_ids)
        return self._key


@dataclass(slots=True, eq=False)
class Running:
    """A request with a slot and pages.

    `num_scheduled` is the clock of launched steps: the number of tokens whose KV is in the cache or
    will be before any later step runs. The clock of settled steps is the request's `token_ids`. The
    difference are the tokens that launched steps sample.

    If a row may sample a run of tokens, `num_scheduled` is an upper bound: a launched step counts
    with its longest run, and settling it corrects the count. Until then `num_scheduled` may exceed
    `last_scheduled`.
    """

    request: Request
    arrival: int
    slot: int
    lease: Lease
    key: bytes  # packed tokens known at admission, which are prefilled
    num_to_prefill: int  # tokens in `key`
    num_scheduled: int
    last_scheduled: int  # num_scheduled once every allowed token is sampled
    num_room: int  # number of tokens for which the lease has pages
    resumed: bool
    takes_drafts: bool = True  # its runs may have several tokens
    last_step: int = 0  # the step that sampled its last token before it joins a group
    group: DecodeGroup | None = None  # of decode rows, the last that it joined
    # False once retracted or ended. Of one retracted, tokens of steps in flight are settled still.
    active: bool = True
    decoding: bool = False  # in the decode rows of the next plan, or of the next of its group
    loading: bool = False  # pages of its prefix are on their way to the device: it has no rows
    # At this value of num_scheduled, planning must check the request: the next run may need a page,
    # or the last token may be sampled.
    milestone: int = 0

    @property
    def client(self) -> str:
        return self.request.tenant.client

    def longest_run(self, plan: StepPlan) -> int:
        """Maximum number of tokens that its decode row samples in a step of `plan`."""
        return plan.max_run if self.takes_drafts else 1

    def set_milestone(self, max_run: int) -> None:
        if self.num_room >= self.last_scheduled:
            self.milestone = self.last_scheduled
        else:
            self.milestone = self.num_room - max_run + 1


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Decode rows that are planned together: all of them, or in a pipeline a share of them."""

    rows: list[Running] = field(default_factory=list)  # replaced, never mutated: plans refer to it
    slots: tuple[int, ...] = ()
    changed: bool = False  # some of `rows` have left
    step: int = 0  # the last plan that decoded it


@dataclass(slots=True)
class StepWork:
    """What a step is to compute, and for whom."""

    step: int
    budget: int  # tokens of prompts that it may compute besides
    kv: KVCacheManager
    joins: list[SlotJoin] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_owners: list[Running] = field(default_factory=list)
    joining: list[Running] = field(default_factory=list)
    sampling: list[Running] = field(default_factory=list)  # of the chunks that have a sampled row
    decoding: Sequence[Running] = ()  # never changed after the launch
    deferred: bool = False  # see StepPlan

    @property
    def num_computed(self) -> int:
        """Number of tokens of prompts that it computes."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sampled(self) -> Sequence[Running]:
        """The requests of the sampled rows, in their order."""
        return (*self.decoding, *self.sampling) if self.sampling else self.decoding

    @property
    def owned_chunks(self) -> Iterator[tuple[Chunk, Running]]:
        """Each chunk with its request."""
        return zip(self.chunks, self.chunk_owners, strict=True)

    def join(self, running: Running) -> None:
        """Let a request take its slot and its pages."""
        request = running.request
        self.joins.append(
            SlotJoin(
                slot=running.slot,
                params=request.params,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                output_token_ids=request.output_token_ids,
                masked=request.masked,
                takes_drafts=running.takes_drafts,
                snapshot=running.lease.start_snapshot,
            )
        )
        self.joining.append(running)
        self.grants.append(PageGrant(running.slot, 0, tuple(running.lease.pages)))
        held = running.lease.windows
        if held is not None:
            self._grant_windowed(running, held, list(held.pages))
        if not running.loading:
            self.close_gap(running)

    def close_gap(self, running: Running) -> None:
        """Spend the budget on the tokens of a request that are known and not computed."""
        start = running.num_scheduled
        end = min(start + self.budget, running.num_to_prefill)
        held, windows = running.lease.windows, self.kv.of(running.lease).windows
        if held is not None and windows is not None:
            end = max(start, min(end, windows.room(held)))
        end = max(start, running.request.chunk_end(end))
        if held is not None and windows is not None:
            columns = -(-end // windows.sizes.page_size)
            self._grant_windowed(running, held, windows.cover(held, columns))
        if start == end:
            return
        self.budget -= end - start
        request = running.request
        samples = end == running.num_to_prefill and request.max_tokens > 0
        self.chunks.append(
            Chunk(
                slot=running.slot,
                start=start,
                token_ids=request.token_ids[start:end],
                samples=samples,
                next_token=request.token_ids[end] if end < len(request.token_ids) else -1,
            )
        )
        self.chunk_owners.append(running)
        if samples:
            self.sampling.append(running)

    def slide(self, running: Running) -> None:
        """Let the pages of windowed layers follow those that a decode row was granted, and give up
        what is behind the window."""
        held, windows = running.lease.windows, self.kv.of(running.lease).windows
        if held is not None and windows is not None:
            columns = len(running.lease.pages)
            windows.trim(held, columns)
            self._grant_windowed(running, held, windows.cover(held, columns))

    def _grant_windowed(self, running: Running, held: WindowPages, pages: Sequence[int]) -> None:
        """Grant the last pages that a lease has of windowed layers."""
        if pages:
            index = held.end - len(pages)
            self.grants.append(PageGrant(running.slot, index, tuple(pages), windowed=True))


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, tokens found in the prefix cache
    num_retractions: int = 0
    num_host_tokens: int = 0  # of the cached tokens, those loaded from host memory
    num_disk_tokens: int = 0  # of the cached tokens, those read from disk

    def admitted(self, request: Request) -> None:
        """Note when a request runs for the first time, and count what it found in the prefix
        cache."""
        request.admitted_s = time.monotonic()
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_host_tokens += request.num_host_tokens
        self.num_disk_tokens += request.num_disk_tokens
