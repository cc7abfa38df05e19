"""The scheduler: which tokens of which requests each step computes. Pure Python, no torch.

One rule: a request has tokens known and tokens computed, and a step spends its budget closing the
gap. A request whose gap is one token that the last step samples is a decode row; any other gap is
closed by chunks. Prefix hits, chunked prefill and resuming after a retraction need no other branch.

Called from one thread. The caller launches plans in order and settles them in order; any number
may be in flight, of a pipeline at most one more than it has stages.

The stages of a pipeline work on different steps, so a row cannot be in all of these. Decode rows
form as many groups as there are stages, and the groups take turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse, islice, repeat, takewhile

from minisgl.errors import (
    ContextLengthError,
    InvalidRequestError,
    MinisglError,
    QueueFullError,
)
from minisgl.kvcache.manager import KVCacheManager, Lease
from minisgl.kvcache.prefix import pack_tokens
from minisgl.request import FinishReason, Request, RequestStatus
from minisgl.scheduler.admission import NewTokenRatio
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan, StepResult
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.state import DecodeGroup, Launched, Running, Waiting

LPM_WINDOW = 128  # number of waiting requests, of all clients together, that lpm compares
MAX_PASSED = 32  # a request that was passed over this many times goes first
MAX_PUT_OFF = 32  # requests whose loads must wait, which others may pass in a plan


@dataclass(frozen=True, slots=True)
class Settled:
    """The changes made by a step. A finished request is also in `progressed` if it got a token."""

    progressed: list[Request]  # requests with new tokens
    num_tokens: list[int]  # number of new tokens of each of `progressed`
    finished: list[Request]
    masked: list[Request]  # whose tokens were sampled under a mask, one each


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, tokens found in the prefix cache
    num_retractions: int = 0
    num_host_tokens: int = 0  # of the cached tokens, those loaded from host memory
    num_disk_tokens: int = 0  # of the cached tokens, those read from disk


@dataclass(slots=True)
class _Draft:
    """A plan under construction."""

    step: int
    budget: int
    joins: list[SlotJoin] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_owners: list[Running] = field(default_factory=list)
    loading: list[Running] = field(default_factory=list)
    held: set[str] = field(default_factory=set)  # clients that may have no more admitted


class Scheduler:
    def __init__(
        self,
        *,
        kv: KVCacheManager,
        num_slots: int,
        max_seq_len: int,
        max_prefill_length: int,
        max_queued_requests: int,
        policy: str = "fcfs",
        conservativeness: float = 1.0,
        client_share: float = 1.0,
        max_run: int = 1,
        num_stages: int = 1,
        look_ahead: bool = True,
    ) -> None:
        """client_share: the part of what other clients leave that one client may take, see
        `_has_its_share`. max_run: maximum number of tokens that the runner samples per decode row
        and step.
        num_stages: of the runner's pipeline. look_ahead: whether, while stages have nothing to do,
        the rows of the oldest step in flight may be planned again.
        """
        self.kv = kv
        self.counters = SchedulerCounters()
        self._max_seq_len = max_seq_len
        self._max_prefill_length = max_prefill_length
        self._max_queued = max_queued_requests
        self._max_run = max_run
        self._policy = self._longest_prefix_first if policy == "lpm" else self._first_come
        self._ratio = NewTokenRatio(conservativeness)
        self._num_slots = num_slots
        self._client_share = client_share

        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._waiting = WaitingQueue()
        self._queued: dict[str, Waiting] = {}  # the same requests by id
        self._running: dict[str, Running] = {}  # by request id, in order of admission
        self._num_of = Counter[str]()  # running requests of each client
        self._num_masked = 0  # running requests with a matcher
        self._loading: list[Running] = []  # wait for pages, in order of admission
        self._fetching: dict[int, Waiting] = {}  # wait for pages from the disk, by transfer
        self._prefilling: list[Running] = []  # in order of admission
        self._num_stages = num_stages
        self._look_ahead = look_ahead
        self._groups = [DecodeGroup() for _ in range(num_stages)]
        self._joining_decode: list[Running] = []  # decode rows that are to join a group
        self._wants_page: list[Running] = []
        self._held_grants: list[tuple[Running, PageGrant]] = []
        self._launched: deque[Launched] = deque()
        self._arrivals = 0
        self._step = 0
        self._epoch = 0

    # -- requests come and go ----------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, for their turn or for pages from host memory."""
        return len(self._waiting) + len(self._loading)

    @property
    def num_running(self) -> int:
        return len(self._running) - len(self._loading)

    @property
    def num_in_flight(self) -> int:
        """Number of plans launched and not yet settled."""
        return len(self._launched)

    @property
    def next_to_settle(self) -> int | None:
        """The step of the oldest plan in flight."""
        return self._launched[0].step if self._launched else None

    def can_fill_masks(self, plan: StepPlan) -> bool:
        """Whether all tokens that the masks of a plan in flight depend on are settled."""
        oldest = self.next_to_settle
        return oldest is not None and oldest > plan.step - plan.lag

    def masked_requests(self, step: int) -> list[Request]:
        """The requests of a plan in flight whose rows need masks, in the order of masked_slots.

        Some may have ended, or been retracted: the sampled token of a retracted one is settled.
        """
        masked = next(launched.masked for launched in self._launched if launched.step == step)
        return [running.request for running in masked]

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, ContextLengthError or QueueFullError."""
        if not request.num_prompt_tokens:
            raise InvalidRequestError("prompt", "must have at least one token.")
        if request.max_len > self._max_seq_len:
            raise ContextLengthError(
                request.num_prompt_tokens, request.max_tokens, self._max_seq_len
            )
        if self._waiting.is_full_for(request.tenant.client, self._max_queued):
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting already; try again later."
            )
        self._arrivals += 1
        waiting = Waiting(request, self._arrivals, len(request.token_ids))
        self._waiting.put(waiting)
        self._queued[request.id] = waiting

    def cancel(self, request: Request, error: MinisglError | None = None) -> bool:
        """End a request at once; no later plan contains it. False if it had already ended."""
        if request.finished:
            return False
        self._end(request, FinishReason.ERROR if error else FinishReason.ABORT, error)
        return True

    def finish(self, request: Request, num_output_tokens: int) -> None:
        """End a request at the token that completed a stop string; later tokens are dropped.

        May also be called for a request that the same token has ended for another reason.
        """
        del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
        del request.logprobs[num_output_tokens:]
        if request.finished:
            request.finish_reason = FinishReason.STOP
        else:
            self._end(request, FinishReason.STOP)

    def _end(
        self, request: Request, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.error = error
        running = self._running.get(request.id)
        if running is not None:
            self._leave(running, keep=error is None)
        else:
            self._waiting.remove(self._queued.pop(request.id))

    def _leave(self, running: Running, *, keep: bool) -> None:
        """Release slot and pages. keep: leave the computed pages in the prefix cache."""
        if keep:
            # Without the last known token, even if a launched step computes its KV: that depends on
            # look-ahead, which must not affect later prefix hits.
            token_ids = running.request.token_ids
            num_tokens = min(running.num_scheduled, len(token_ids) - 1)
            key = pack_tokens(token_ids[:num_tokens])
            self.kv.close(running.lease, key, num_tokens, self._step)
        else:
            self.kv.close(running.lease)
        self._free_slots.append(running.slot)
        del self._running[running.request.id]
        client = _client(running)
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client]
        self._num_masked -= running.request.matcher is not None
        running.active = False
        if running.decoding:
            running.decoding = False
            if running.group is not None:
                running.group.changed = True
        elif running.loading:
            self._loading.remove(running)
        elif running.num_scheduled < running.num_known:
            self._prefilling.remove(running)

    # -- planning ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan the next step, which the caller must launch; None if there is nothing to compute."""
        draft = _Draft(self._step + 1, budget=self._max_prefill_length)
        retractions = self.counters.num_retractions
        if self._wants_page:
            self._grant_pages(draft)
        if self._loading:
            self._resume_loaded()
        for running in self._prefilling:
            self._add_chunk(running, draft)
        # A request retracted for this plan must not be readmitted at once and displace another.
        if self._waiting and retractions == self.counters.num_retractions:
            self._admit(draft)
        if self._held_grants:
            draft.grants += [grant for running, grant in self._held_grants if running.active]
            self._held_grants = []
        group, lag = self._next_group(draft)
        if not (group.rows or draft.chunks or draft.joins or self.kv.is_copying_out):
            self._hold_grants(draft.grants)  # all decode rows are in flight
            return None

        self._step = draft.step
        self.counters.num_steps += 1
        self._ratio.step()
        decoding, group.step = group.rows, draft.step
        max_run = 1 if self._num_masked else self._max_run  # a run would need masks in between
        longest = self._advance(decoding, max_run)
        masked = self._masked_rows(decoding, draft) if self._num_masked else []
        plan = StepPlan(
            step=draft.step,
            decode_slots=group.slots,
            longest_decode=min(longest, self._max_seq_len),
            chunks=tuple(draft.chunks),
            joins=tuple(draft.joins),
            grants=tuple(draft.grants),
            epoch=self._epoch,
            max_run=max_run,
            masked_slots=tuple([running.slot for running in masked]),
            deferred=any(map(_blind, masked)),
            lag=lag,
            copies=self.kv.take_copies(draft.step),
        )
        self._launched.append(self._launch_chunks(draft, decoding, max_run, masked))
        return plan

    @staticmethod
    def _masked_rows(decoding: list[Running], draft: _Draft) -> list[Running]:
        owners = zip(draft.chunks, draft.chunk_owners, strict=True)
        sampling = [running for chunk, running in owners if chunk.samples]
        return [row for row in (*decoding, *sampling) if row.request.matcher is not None]

    def _advance(self, decoding: list[Running], max_run: int) -> int:
        """Count one more run for each decode row; returns the longest context."""
        longest = 0
        reached: list[Running] = []
        for running in decoding:
            running.num_scheduled = scheduled = running.num_scheduled + max_run
            if scheduled >= running.milestone:
                reached.append(running)
            if scheduled > longest:
                longest = scheduled
        for running in reached:
            self._next_decode(running)
        return longest

    def _next_decode(self, running: Running) -> None:
        """Decide whether the next plan decodes a request, and whether it needs a page for that.

        A request that may have sampled its last token sits out until its steps are settled.
        """
        scheduled, room = running.num_scheduled, running.num_room
        if scheduled >= running.last_scheduled:
            if running.decoding:
                running.decoding = False
                if running.group is not None:
                    running.group.changed = True
        else:
            if scheduled + self._max_run > room and room < running.last_scheduled:
                self._wants_page.append(running)
            if not running.decoding:
                running.decoding = True
                self._joining_decode.append(running)

    def _next_group(self, draft: _Draft) -> tuple[DecodeGroup, int]:
        """The group that the next step decodes, and the plan's `lag`. The group has no rows if none
        can be decoded yet."""
        step = draft.step
        if self._num_stages == 1:
            [group] = self._groups
            if group.changed or self._joining_decode:
                self._regroup(group, step - 1)
            return group, 1
        settled = self._launched[0].step - 1 if self._launched else self._step
        # The step that leaves the last stage when this one enters the first.
        bounds = [max(settled, step - self._num_stages)]
        if self._look_ahead and self._launched and not draft.chunks:
            bounds.append(settled + 1)
        for known in bounds:
            for group in sorted(self._groups, key=_last_step):
                if group.step > known:
                    break
                if group.changed or self._joining_decode:
                    self._regroup(group, known)
                if group.rows:
                    return group, step - known
        return DecodeGroup(), step - settled

    def _regroup(self, group: DecodeGroup, known: int) -> None:
        """Bring the rows of a group up to date. Rows whose last token was sampled by a step up to
        `known` join it as long as it has less than its share, and leave it if it has far more."""
        rows = [running for running in group.rows if running.decoding]
        joining = [running for running in self._joining_decode if running.decoding]
        others = sum(len(other.rows) for other in self._groups if other is not group)
        share = -(-(others + len(rows) + len(joining)) // len(self._groups))
        self._joining_decode = []
        for running in joining:
            if len(rows) < share and running.last_step <= known:
                running.group = group
                rows.append(running)
            else:
                self._joining_decode.append(running)
        if len(rows) > share + share // 4 + 1:
            for running in rows[share:]:
                running.group, running.last_step = None, group.step
            self._joining_decode += rows[share:]
            del rows[share:]
        group.changed = False
        if rows != group.rows:
            group.rows = rows
            group.slots = tuple([running.slot for running in rows])

    def _launch_chunks(
        self, draft: _Draft, decoding: list[Running], max_run: int, masked: list[Running]
    ) -> Launched:
        sampling: list[Running] = []
        completed: list[Running] = []
        for chunk, running in zip(draft.chunks, draft.chunk_owners, strict=True):
            running.num_scheduled = chunk.end
            # Whole pages of the prompt may be matched from the next step on.
            self.kv.commit(running.lease, running.key, chunk.end, draft.step)
            if chunk.samples:
                sampling.append(running)
                running.last_step = draft.step
                running.set_milestone(self._max_run)
                self._next_decode(running)
            elif chunk.end == running.num_known:
                completed.append(running)
        if draft.chunks:
            self._prefilling = [
                running for running in self._prefilling if running.num_scheduled < running.num_known
            ]
        return Launched(
            draft.step,
            decoding,
            draft.chunk_owners,
            sampling,
            completed,
            max_run,
            masked,
            draft.loading,
            draft.grants,
        )

    def _add_chunk(self, running: Running, draft: _Draft) -> None:
        start = running.num_scheduled
        end = min(start + draft.budget, running.num_known)
        if start == end:
            return
        draft.budget -= end - start
        request = running.request
        scored: list[int] = []
        if request.wants_prompt_logprobs:
            scored = request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
        draft.chunks.append(
            Chunk(
                slot=running.slot,
                start=start,
                token_ids=request.token_ids[start:end],
                samples=end == running.num_known and request.max_tokens > 0,
                scored_token_ids=scored,
                prompt_logprobs=request.params.prompt_logprobs or 0,
            )
        )
        draft.chunk_owners.append(running)

    # -- pages for decode rows ---------------------------------------------------------------------

    def _grant_pages(self, draft: _Draft) -> None:
        """Grant pages to the decode rows whose next run may need one; retract if none are left."""
        for running in sorted(self._wants_page, key=_arrival):
            while running.active:
                index = len(running.lease.pages)
                most = min(running.num_scheduled + self._max_run, running.last_scheduled)
                pages = self.kv.reserve(running.lease, most)
                if pages is not None:
                    if pages:  # otherwise the last run was short enough to leave room
                        draft.grants.append(PageGrant(running.slot, index, pages))
                    running.num_room = len(running.lease.pages) * self.kv.page_size
                    running.set_milestone(self._max_run)
                    break
                self._retract(self._victim())
        self._wants_page = []

    def _hold_grants(self, grants: Iterable[PageGrant]) -> None:
        """Keep grants of running requests for the next plan, before those that are kept already."""
        owners = {running.slot: running for running in self._running.values()}
        held = [(owners[grant.slot], grant) for grant in grants if grant.slot in owners]
        self._held_grants = held + self._held_grants

    def _victim(self) -> Running:
        """The running request to retract: the newest of the client with the most running requests.

        Never the oldest request of all, so that one always advances; and a resumed request is
        spared, if possible, until it has generated a page of tokens.
        """
        newest = sorted(self._running.values(), key=_arrival, reverse=True)[:-1]
        newest.sort(key=lambda running: -self._num_of[_client(running)])  # stable
        return next((running for running in newest if self._has_progressed(running)), newest[0])

    def _has_progressed(self, running: Running) -> bool:
        done = running.num_scheduled - running.num_known
        return not running.resumed or done >= self.kv.page_size

    def _retract(self, running: Running) -> None:
        """Return a request to the queue. Its output resumes later without a visible trace."""
        self.counters.num_retractions += 1
        self._ratio.retracted(other.request for other in self._running.values())
        request = running.request
        self._leave(running, keep=True)
        request.status = RequestStatus.WAITING
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # recomputed from the start
        sampled = request.max_tokens > 0 and running.num_scheduled >= running.num_known
        waiting = Waiting(
            request,
            running.arrival,
            num_expected=running.num_scheduled + 1 if sampled else len(request.token_ids),
            retracted=True,
        )
        self._waiting.put(waiting)
        self._queued[request.id] = waiting

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self, draft: _Draft) -> None:
        if not draft.budget or not self._free_slots:
            return
        admitted: list[Waiting] = []
        reserved = sum(self._ratio.expected(running.request) for running in self._running.values())
        num_granted = sum(len(grant.pages) for grant in draft.grants)
        put_off: list[Waiting] = []
        draft.held.update(filter(self._has_its_share, self._waiting.clients))
        for waiting in self._waiting.in_order(self._policy, LPM_WINDOW, draft.held):
            if not draft.budget or not self._free_slots:
                break
            client = waiting.request.tenant.client
            if self._has_its_share(client):
                draft.held.add(client)
                continue
            if self.kv.has_disk and not waiting.sought and self._fetch(waiting):
                continue
            running: Running | None = None
            if not self._is_put_off(waiting):
                running = self._start(waiting, reserved, num_granted, draft)
            if running is None:
                if self._is_put_off(waiting) and len(put_off) < MAX_PUT_OFF:
                    put_off.append(waiting)
                    continue  # it takes no room from the others, who need not wait
                if client in draft.held:
                    continue
                break
            admitted.append(waiting)
            reserved += self._ratio.expected(waiting.request)
            if running.loading:
                self._loading.append(running)
                draft.loading.append(running)
            else:
                self._add_chunk(running, draft)
                self._prefilling.append(running)
            del self._queued[waiting.request.id]
        if admitted:
            self._waiting.admitted(admitted, put_off)

    def _has_its_share(self, client: str) -> bool:
        """Whether a client has as many running requests as it may. So a slot is free for another
        client at any time, unless there are more clients than slots. Callers that are not
        distinguished are no client, and may take all slots."""
        if not client:
            return False
        num_running = self._num_of[client]
        num_left = self._num_slots - (len(self._running) - num_running)  # by the other clients
        return num_running >= max(1, int(self._client_share * num_left))

    def _num_kept(self, client: str) -> float:
        """The tokens that must be left free in the KV cache for other clients when a request of
        this one joins. A client's only request may take them."""
        if not client or not self._num_of[client]:
            return 0
        return (1 - self._client_share) * (self.kv.num_pages - 1) * self.kv.page_size

    def _is_put_off(self, waiting: Waiting) -> bool:
        """Whether a request waits because others are loading. Its load would only queue up behind
        theirs, and to launch many with one plan would hold up the next. It is looked at again when
        another load has begun, which may bring its pages."""
        wants_load = waiting.wants_load and waiting.num_loads == self.kv.num_loads
        return wants_load and self.kv.is_lane_busy

    @staticmethod
    def _first_come(waiting: Iterable[Waiting], window: int) -> Iterable[Waiting]:
        return takewhile(_ready, filterfalse(_fetching, waiting))

    def _longest_prefix_first(self, waiting: Iterable[Waiting], window: int) -> Iterable[Waiting]:
        def sort_key(waiting: Waiting) -> tuple[bool, int]:
            request, matched = waiting.request, 0
            if not request.wants_prompt_logprobs:  # these must compute the whole prompt
                num_tokens = len(request.token_ids)
                matched = self.kv.match(waiting.pack(), num_tokens, request.namespace)
            return waiting.num_passed < MAX_PASSED, -matched

        # Sorting is stable: in order of arrival among equals.
        able = filterfalse(_fetching, islice(waiting, window))
        return sorted(filter(_ready, able), key=sort_key)

    def _start(
        self, waiting: Waiting, reserved: float, num_granted: int, draft: _Draft
    ) -> Running | None:
        """Give a request a slot and pages for its known tokens; None if there are too few pages, or
        it is put off.

        reserved: tokens that the running requests are expected to need. num_granted: pages that
        the draft grants to decode rows.
        """
        request = waiting.request
        key = waiting.pack()
        num_known = len(request.token_ids)
        reuse = not request.wants_prompt_logprobs
        lease = self.kv.acquire(key, num_known, request.namespace, reuse=reuse)
        waiting.wants_load, waiting.num_loads = bool(lease.num_to_load), self.kv.num_loads
        if self._is_put_off(waiting):
            self.kv.close(lease)
            return None
        num_cached = len(lease.pages) * self.kv.page_size
        if self._running:  # a request always fits if no other runs: `submit` checks that
            wanted = num_known - num_cached + reserved + self._ratio.expected(request)
            kept = self._num_kept(request.tenant.client)
            if wanted + kept > self.kv.num_available * self.kv.page_size:
                if kept:  # the others need not wait for what this client must leave to them
                    draft.held.add(request.tenant.client)
                self.kv.close(lease)
                return None
        num_beside = self._num_beside_rows(lease, num_known, draft)
        pages = self.kv.reserve(lease, num_known, num_beside=num_beside, num_granted=num_granted)
        if pages is None:
            self.kv.close(lease)
            return None

        num_cached = lease.num_committed * self.kv.page_size
        if not waiting.retracted:
            request.num_cached_tokens = num_cached
            loaded, fetched = lease.loaded, waiting.fetched
            both = range(max(loaded.start, fetched.start), min(loaded.stop, fetched.stop))
            request.num_disk_tokens = len(both) * self.kv.page_size
            request.num_host_tokens = (len(loaded) - len(both)) * self.kv.page_size
            self.counters.num_prompt_tokens += num_known
            self.counters.num_cached_tokens += num_cached
            self.counters.num_host_tokens += request.num_host_tokens
            self.counters.num_disk_tokens += request.num_disk_tokens
        request.status = RequestStatus.RUNNING
        running = Running(
            request=request,
            arrival=waiting.arrival,
            slot=self._free_slots.pop(),
            lease=lease,
            key=key,
            num_known=num_known,
            num_scheduled=num_cached,
            last_scheduled=request.max_len - 1,
            num_room=len(lease.pages) * self.kv.page_size,
            resumed=waiting.retracted,
            loading=self.kv.is_loading(lease),
        )
        self._running[request.id] = running
        self._num_of[_client(running)] += 1
        self._num_masked += request.matcher is not None
        draft.joins.append(
            SlotJoin(
                slot=running.slot,
                params=request.params,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                output_token_ids=request.output_token_ids,
                masked=request.matcher is not None,
            )
        )
        draft.grants.append(PageGrant(running.slot, 0, tuple(lease.pages)))
        return running

    def _num_beside_rows(self, lease: Lease, num_known: int, draft: _Draft) -> int | None:
        """Number of tokens of prompts that the plan computes beside decode rows if a request joins
        it; None if nobody decodes."""
        if not any(running.decoding for running in self._running.values()):
            return None
        left = draft.budget
        if not (lease.num_to_load or self.kv.is_loading(lease)):
            left -= min(left, num_known - lease.num_committed * self.kv.page_size)
        return self._max_prefill_length - left

    # -- pages from host memory --------------------------------------------------------------------

    def landed(self, load: int) -> None:
        """Note that the pages of a load are on the device. The next plan may use them."""
        self.kv.landed(load)

    def _resume_loaded(self) -> None:
        """Let the requests whose pages are all there compute the rest of their tokens."""
        for running in self._loading:
            running.loading = self.kv.is_loading(running.lease)
            if not running.loading:
                self._prefilling.append(running)
        self._loading = [running for running in self._loading if running.loading]

    # -- pages from disk ---------------------------------------------------------------------------

    def _fetch(self, waiting: Waiting) -> bool:
        """Whether a request has to wait because the disk has more of its prefix."""
        waiting.sought = True
        request = waiting.request
        if request.wants_prompt_logprobs:
            return False
        fetch = self.kv.fetch(waiting.pack(), len(request.token_ids), request.namespace)
        if fetch:
            self._fetching[fetch] = waiting
            waiting.fetching = True
        return bool(fetch)

    def transferred(self, transfer: int, num_pages: int) -> None:
        """Note the end of a transfer, of which every rank has done the first pages."""
        fetched = self.kv.transferred(transfer, num_pages)
        waiting = self._fetching.pop(transfer, None)
        if waiting is not None:
            waiting.fetched = fetched
            waiting.fetching = False

    def plan_offload(self) -> StepPlan | None:
        """A plan that takes all unused pages off the device, into host memory, and computes
        nothing; None if there are none. Nothing may be running."""
        assert not self._running
        self.kv.offload_all()
        copies = self.kv.take_copies(self._step + 1)
        if copies is None:
            return None
        self._step += 1
        plan = StepPlan(step=self._step, decode_slots=(), epoch=self._epoch, copies=copies)
        self._launched.append(Launched(plan.step, [], [], [], [], 1))
        return plan

    # -- settling ----------------------------------------------------------------------------------

    def settle(self, result: StepResult) -> Settled:
        """Apply the result of the oldest step in flight, and end the requests that it completes.

        Tokens after the one that ends a request are dropped, in its run and in later steps.
        """
        launched = self._launched.popleft()
        assert launched.step == result.step, "steps are settled in the order of their launch"
        self.kv.settled(launched.step)
        rows = launched.decoding
        if launched.sampling_chunks:
            rows = rows + launched.sampling_chunks
        run_lengths = result.run_lengths
        if run_lengths is not None:  # one entry per token instead of per row
            rows = [*chain.from_iterable(map(repeat, rows, run_lengths))]
        for index, scores in result.prompt_logprobs.items():
            if launched.chunks[index].active:
                launched.chunks[index].request.prompt_logprobs += scores
        progressed: list[Request] = []
        finished: list[Request] = []
        finished_status = RequestStatus.FINISHED
        for running, token_id in zip(rows, result.token_ids, strict=True):
            request = running.request
            if request.status is finished_status:
                continue  # the request ended before this token
            token_ids = request.token_ids
            token_ids.append(token_id)
            progressed.append(request)
            if token_id in request.stop_token_ids:
                finished.append(request)
                self._end(request, FinishReason.STOP)
            elif len(token_ids) >= request.max_len:
                finished.append(request)
                self._end(request, FinishReason.LENGTH)
        if result.logprobs:
            for row, logprobs in result.logprobs.items():
                request = rows[row].request
                if len(request.logprobs) < request.num_output_tokens:
                    request.logprobs.append(logprobs)
        for running in launched.completed_prompts:
            if running.active:
                finished.append(running.request)
                self._end(running.request, FinishReason.LENGTH)
        if launched.max_run > 1:
            self._take_back(launched, run_lengths)
        masked = [running.request for running in launched.masked]
        if run_lengths is None:
            return Settled(progressed, [1] * len(progressed), finished, masked)
        num_tokens = Counter(progressed)
        return Settled([*num_tokens], [*num_tokens.values()], finished, masked)

    def _take_back(self, launched: Launched, run_lengths: Sequence[int] | None) -> None:
        """Reduce `num_scheduled` of decode rows whose runs were shorter than planned."""
        lengths = run_lengths or [1] * len(launched.decoding)
        for running, length in zip(launched.decoding, lengths, strict=False):  # chunks follow
            missing = launched.max_run - length
            assert missing >= 0, "a run is longer than planned"
            running.num_scheduled -= missing
            if running.active:
                if not running.decoding and running.num_scheduled < running.last_scheduled:
                    if running.group is not None and running.group.changed:
                        self._regroup(running.group, launched.step)  # it may still be there
                    self._next_decode(running)
                continue
            waiting = self._queued.get(running.request.id)
            if waiting is not None and waiting.request is running.request:
                waiting.num_expected -= missing

    def fail(self, step: int, error: MinisglError) -> list[Request]:
        """Discard step `step`, which failed, and all later launched steps, with their requests.

        Later steps may have matched pages that this one was to write. Returns the ended requests.
        """
        self._epoch += 1
        lost = [launched for launched in self._launched if launched.step >= step]
        self._launched = deque(launched for launched in self._launched if launched.step < step)
        failed: list[Request] = []
        for launched in lost:
            for running in (*launched.decoding, *launched.chunks, *launched.loading):
                if not running.request.finished:
                    self._end(running.request, FinishReason.ERROR, error)
                    failed.append(running.request)
        self._hold_grants(grant for launched in lost for grant in launched.grants)
        self.kv.drop_written_since(step)
        return failed

    def audit(self) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails."""
        self.kv.audit(self._step)
        assert self._num_of == Counter(map(_client, self._running.values()))
        slots = [running.slot for running in self._running.values()]
        assert len(set(slots) | set(self._free_slots)) == len(slots) + len(self._free_slots)
        rows = [row for group in self._groups for row in group.rows]
        rows = [row for row in (*rows, *self._joining_decode) if row.decoding]
        masked = [row for row in self._running.values() if row.request.matcher is not None]
        assert self._num_masked == len(masked)
        for running in self._running.values():
            request = running.request
            assert running.active and request.status is RequestStatus.RUNNING
            assert running.num_room == len(running.lease.pages) * self.kv.page_size
            scheduled = min(running.num_scheduled, running.last_scheduled)
            assert scheduled <= max(running.num_room, running.num_known)
            assert running.lease.num_committed * self.kv.page_size <= running.num_scheduled
            assert rows.count(running) == int(running.decoding), "a row is lost or twice there"
            assert running.loading == self._loading.count(running)
            assert running.loading or not self.kv.is_loading(running.lease), "it reads too early"
            prefilling = running.num_scheduled < running.num_known and not running.loading
            assert self._prefilling.count(running) == int(prefilling)
            if not (prefilling or running.loading) and request.max_tokens:
                num_known = len(request.token_ids) + sum(
                    launched.max_run * launched.decoding.count(running)
                    + launched.sampling_chunks.count(running)
                    for launched in self._launched
                )
                assert running.num_scheduled == num_known - 1, "the two clocks disagree"
        queued = self._waiting.check()
        assert all(waiting.request.status is RequestStatus.WAITING for waiting in queued)
        assert set(queued) == set(self._queued.values()), "the queue and its index disagree"


def _arrival(entry: Waiting | Running) -> int:
    return entry.arrival


def _last_step(group: DecodeGroup) -> int:
    return group.step


def _client(running: Running) -> str:
    return running.request.tenant.client


def _blind(running: Running) -> bool:
    """Whether the input of the decode row that was just planned is not settled."""
    return len(running.request.token_ids) < running.num_scheduled


def _ready(waiting: Waiting) -> bool:
    return waiting.ready


def _fetching(waiting: Waiting) -> bool:
    return waiting.fetching
