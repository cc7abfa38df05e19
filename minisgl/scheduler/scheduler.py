"""The scheduler: which tokens of which requests each step computes. Pure Python, no torch.

One rule: a request has tokens known and tokens computed, and a step spends its budget closing the
gap. A request whose only uncomputed token is one that an earlier step samples, perhaps still in
flight, is a decode row; any other gap is closed by chunks. Prefix hits, chunked prefill and
resuming after a retraction need no other branch.

Called from one thread. The caller launches plans in order and settles them in order; any number
may be in flight, of a pipeline at most one more than it has stages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat

from minisgl.errors import (
    ContextLengthError,
    InvalidRequestError,
    MinisglError,
    QueueFullError,
)
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.request import FinishReason, Request, RequestStatus
from minisgl.scheduler.admission import Admission
from minisgl.scheduler.decode_rows import DecodeRows
from minisgl.scheduler.launched import Launched, Settled
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PageGrant, PartPlan, StepPlan, StepResult
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.runs import Speculation
from minisgl.scheduler.slots import Slots
from minisgl.scheduler.state import (
    DecodeGroup,
    Running,
    SchedulerCounters,
    StepWork,
    Waiting,
)


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
        speculation: Speculation | None = None,
        num_stages: int = 1,
        look_ahead: bool = True,
        parts: Sequence[Part] = (),
    ) -> None:
        """client_share: the part of what other clients leave that one client may take, see
        `Slots.has_its_share`. speculation: None if no row samples several tokens in a step.
        num_stages, look_ahead: see `DecodeRows`. parts: that requests may ask for, in the order in
        which they plan.
        """
        self.kv = kv
        self.parts = parts
        self.counters = SchedulerCounters()
        self._max_seq_len = max_seq_len
        self._max_prefill_length = max_prefill_length
        self._max_queued = max_queued_requests
        self._waiting = WaitingQueue()
        self._slots = Slots(num_slots, client_share, len(kv.of_ranks), parts)
        self._admission = Admission(kv, self._waiting, self._slots, parts, conservativeness, policy)
        self._loading: list[Running] = []  # wait for pages, in order of admission
        self._prefilling: list[Running] = []  # in order of admission
        self.speculation = speculation
        max_run = 1 if speculation is None else 1 + speculation.num_drafts
        self._rows = DecodeRows(kv, max_run, num_stages, look_ahead=look_ahead)
        self._grants_to_make: list[tuple[Running, PageGrant]] = []
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
        return len(self._slots.running) - len(self._loading)

    @property
    def num_in_flight(self) -> int:
        """Number of plans made, which the caller launches at once, and not yet settled."""
        return len(self._launched)

    @property
    def next_to_settle(self) -> int | None:
        """The step of the oldest plan in flight."""
        return self._launched[0].plan.step if self._launched else None

    def can_sample(self, plan: StepPlan) -> bool:
        """Whether all tokens that the sampling of a deferred plan depends on are settled."""
        oldest = self.next_to_settle
        return oldest is not None and oldest > plan.step - plan.lag

    def work_of(self, plan: StepPlan) -> StepWork:
        """Whose rows a plan in flight computes."""
        return next(each.work for each in self._launched if each.plan is plan)

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
                f"Too many requests wait already ({len(self._waiting)}); try again later."
            )
        self._arrivals += 1
        self._waiting.put(Waiting(request, self._arrivals, len(request.token_ids)))

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
        request.drop(request.num_output_tokens - num_output_tokens)
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
        running = self._slots.by_id.get(request.id)
        if running is not None:
            self._leave(running, keep=error is None)
        else:
            self._waiting.remove(self._waiting.by_id[request.id])

    def _leave(self, running: Running, *, keep: bool) -> None:
        """Release slot and pages. keep: leave the computed pages in the prefix cache."""
        if keep:
            # Without the last known token, even if a launched step computes its KV: that depends on
            # look-ahead, which must not affect later prefix hits.
            token_ids = running.request.token_ids
            num_tokens = running.request.num_shared(min(running.num_scheduled, len(token_ids) - 1))
            key = pack_tokens(token_ids[:num_tokens])
            self.kv.of(running.lease).close(running.lease, key, num_tokens, self._step)
        else:
            self.kv.of(running.lease).close(running.lease)
        self._slots.leave(running)
        if running.decoding:
            self._rows.leave(running)
        elif running.loading:
            self._loading.remove(running)
        elif running.num_scheduled < running.num_to_prefill:
            self._prefilling.remove(running)

    # -- planning ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan the next step, which the caller must launch; None if there is nothing to compute."""
        work = StepWork(self._step + 1, self._max_prefill_length, self.kv)
        retractions = self.counters.num_retractions
        self._rows.grant_pages(work, self._retract)
        for running in self._prefilling:
            work.close_gap(running)
        if self._loading:
            self._resume_loaded(work)
        # A request retracted for this plan must not be readmitted at once and displace another.
        if self._waiting and retractions == self.counters.num_retractions:
            self._admit(work)
        if self._grants_to_make:
            work.grants += [grant for running, grant in self._grants_to_make if running.active]
            self._grants_to_make = []
        settled = self._launched[0].plan.step - 1 if self._launched else self._step
        may_repeat = bool(self._launched) and not work.chunks
        group, lag = self._rows.next_group(work.step, settled, may_repeat=may_repeat)
        has_rows = group.rows or work.chunks or work.joins
        if not (has_rows or any(part.wants_step for part in self.parts)):
            self._make_grants_later(work.grants)  # every row is in flight, or its pages are
            return None
        return self._make_plan(work, group, lag)

    def _admit(self, work: StepWork) -> None:
        for running in self._admission.admit(work):
            if not running.resumed:
                self.counters.admitted(running.request)
            (self._loading if running.loading else self._prefilling).append(running)

    def _make_plan(self, work: StepWork, group: DecodeGroup, lag: int) -> StepPlan:
        """Count what a plan computes as scheduled."""
        self._step = work.step
        self.counters.num_steps += 1
        self._admission.ratio.step()
        if self.kv.snapshots is not None:
            self._take_snapshots(work)
        work.decoding = group.rows
        max_run = 1 if self.speculation is None else self.speculation.max_run(work)
        longest = self._rows.advance(group, work.step, max_run)
        # Rows are counted as scheduled by now, chunks are not: that tells which rows lack a token.
        parts, planned = self._plan_parts(work)
        plan = StepPlan(
            step=work.step,
            decode_slots=group.slots,
            longest_decode=min(longest, self._max_seq_len),
            chunks=tuple(work.chunks),
            joins=tuple(work.joins),
            grants=tuple(work.grants),
            epoch=self._epoch,
            max_run=max_run,
            lag=lag,
            parts=planned,
            deferred=work.deferred,
        )
        self._launched.append(Launched(plan, work, parts))
        if work.chunks:
            self._launch_chunks(work)
        return plan

    def _plan_parts(self, work: StepWork) -> tuple[list[Part], tuple[PartPlan, ...]]:
        """The parts for which the step does something, and what."""
        parts: list[Part] = []
        planned: list[PartPlan] = []
        for part in self._slots.parts:
            plan = part.plan(work)
            if plan is not None:
                parts.append(part)
                planned.append(plan)
        return parts, tuple(planned)

    def _take_snapshots(self, work: StepWork) -> None:
        """Let the chunks leave the snapshots that later requests can start from."""
        for index, (chunk, running) in enumerate(work.owned_chunks):
            kv, lease = self.kv.of(running.lease), running.lease
            taken = kv.take_snapshots(lease, chunk.start, chunk.end, work.step)
            work.chunks[index] = replace(chunk, snapshots=taken)

    def _launch_chunks(self, work: StepWork) -> None:
        """Count the tokens of chunks as computed."""
        for chunk, running in work.owned_chunks:
            running.num_scheduled = chunk.end
            # Whole pages of the prompt may be matched from the next step on.
            num_tokens = running.request.num_shared(chunk.end)
            self.kv.of(running.lease).commit(running.lease, running.key, num_tokens, work.step)
            if chunk.samples:
                self._rows.join(running, work.step)
        self._prefilling = [
            running
            for running in self._prefilling
            if running.num_scheduled < running.num_to_prefill
        ]

    def _make_grants_later(self, grants: Iterable[PageGrant]) -> None:
        """Keep grants of running requests for the next plan. Grants that are kept already are
        younger, so these go first."""
        owners = {running.slot: running for running in self._slots.running}
        held = [(owners[grant.slot], grant) for grant in grants if grant.slot in owners]
        self._grants_to_make = held + self._grants_to_make

    def _retract(self, rank: int) -> None:
        """Return a request of a rank to the queue. Its output resumes without a visible trace."""
        self._put_back(self._slots.victim(self.kv.page_size, rank))

    def retract_all(self) -> None:
        """Return all running requests to the queue."""
        for running in [*self._slots.running]:
            self._put_back(running)

    def _put_back(self, running: Running) -> None:
        self.counters.num_retractions += 1
        self._admission.ratio.retracted(other.request for other in self._slots.running)
        request = running.request
        for extra in request.extras:
            extra.retracted()
        self._leave(running, keep=True)
        request.status = RequestStatus.WAITING
        sampled = request.max_tokens > 0 and running.num_scheduled >= running.num_to_prefill
        num_expected = running.num_scheduled + 1 if sampled else len(request.token_ids)
        self._waiting.put(Waiting(request, running.arrival, num_expected, retracted=True))

    # -- pages from host memory --------------------------------------------------------------------

    def _resume_loaded(self, work: StepWork) -> None:
        """Let the requests whose pages are all there compute the rest of their tokens."""
        for running in self._loading:
            running.loading = self.kv.of(running.lease).is_loading(running.lease)
            if not running.loading:
                self._prefilling.append(running)
                if running.lease.start_snapshot is None:
                    work.close_gap(running)
                else:  # which has been loaded, too
                    work.join(running)
        self._loading = [running for running in self._loading if running.loading]

    def plan_offload(self) -> StepPlan | None:
        """A plan that takes all unused pages off the device, into host memory, and computes
        nothing; None if there are none. Nothing may be running."""
        assert not self._slots.running
        for cache in self.kv.of_ranks:
            cache.tiers.offload_all()
        work = StepWork(self._step + 1, 0, self.kv)
        parts, planned = self._plan_parts(work)
        if not planned:
            return None
        self._step = work.step
        plan = StepPlan(step=work.step, decode_slots=(), epoch=self._epoch, parts=planned)
        self._launched.append(Launched(plan, work, parts))
        return plan

    # -- settling ----------------------------------------------------------------------------------

    def settle(self, result: StepResult, seconds: float | None = None) -> Settled:
        """Apply the result of the oldest step in flight, and end the requests that it completes.

        Tokens after the one that ends a request are dropped, in its run and in later steps.
        seconds: the time that the step took, for the choice of runs.
        """
        launched = self._launched.popleft()
        work = launched.work
        assert work.step == result.step, "steps are settled in the order of their launch"
        self.kv.settled(work.step)
        rows = work.sampled
        run_lengths = result.run_lengths
        if run_lengths is not None:  # one entry per token instead of per row
            rows = [*chain.from_iterable(map(repeat, rows, run_lengths))]
        progressed: list[Request] = []
        finished: list[Request] = []
        for part, outcome in zip(launched.parts, result.parts, strict=True):
            for request, error in part.settle(work, outcome) or ():
                finished.append(request)
                self._end(request, FinishReason.ERROR, error)
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
        for chunk, running in work.owned_chunks:
            if running.active and chunk.end == running.num_to_prefill and not chunk.samples:
                finished.append(running.request)  # which wants no output
                self._end(running.request, FinishReason.LENGTH)
        if launched.plan.max_run > 1:
            self._take_back(launched, run_lengths)
        if self.speculation is None:
            return Settled(progressed, [1] * len(progressed), finished, launched)
        num_tokens = Counter(progressed)
        self.speculation.settled(launched, result, num_tokens, seconds)
        return Settled([*num_tokens], [*num_tokens.values()], finished, launched)

    def _take_back(self, launched: Launched, run_lengths: Sequence[int] | None) -> None:
        """Reduce `num_scheduled` of decode rows whose runs were shorter than planned."""
        decoding = launched.work.decoding
        lengths = run_lengths or [1] * len(decoding)
        for running, length in zip(decoding, lengths, strict=False):  # chunks follow
            missing = running.longest_run(launched.plan) - length
            assert missing >= 0, "a run is longer than planned"
            running.num_scheduled -= missing
            if running.active:
                self._rows.resume(running, launched.plan.step)
                continue
            waiting = self._waiting.by_id.get(running.request.id)
            if waiting is not None and waiting.request is running.request:
                waiting.num_expected -= missing

    def fail(self, step: int, error: MinisglError) -> list[Request]:
        """Discard step `step`, which failed, and all later launched steps, with their requests.

        Later steps may have matched pages that this one was to write. Requests without rows in
        these plans keep their pages, which earlier steps wrote, and the grants that these plans
        made them. Moves go on, because they read settled pages only. Returns the ended requests.
        """
        self._epoch += 1
        lost = [launched for launched in self._launched if launched.plan.step >= step]
        self._launched = deque(each for each in self._launched if each.plan.step < step)
        failed: list[Request] = []
        for launched in lost:
            work = launched.work
            for running in (*work.decoding, *work.chunk_owners, *work.joining):
                if not running.request.finished:
                    self._end(running.request, FinishReason.ERROR, error)
                    failed.append(running.request)
        self._make_grants_later(grant for launched in lost for grant in launched.plan.grants)
        self.kv.drop_written_since(step)
        for part in self.parts:
            part.failed(step)
        return failed

    def audit(self) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails."""
        self.kv.audit(self._step)
        self._slots.audit()
        self._rows.audit(self._slots.running)
        for part in self.parts:
            part.audit(self._slots.running)
        for running in self._slots.running:
            request = running.request
            assert request.status is RequestStatus.RUNNING
            assert running.num_room == len(running.lease.pages) * self.kv.page_size
            scheduled = min(running.num_scheduled, running.last_scheduled)
            assert scheduled <= max(running.num_room, running.num_to_prefill)
            assert running.lease.num_committed * self.kv.page_size <= running.num_scheduled
            assert running.loading == self._loading.count(running)
            assert running.loading or not self.kv.of(running.lease).is_loading(running.lease), (
                "it reads too early"
            )
            prefilling = running.num_scheduled < running.num_to_prefill and not running.loading
            assert self._prefilling.count(running) == int(prefilling)
            if not (prefilling or running.loading) and request.max_tokens:
                num_known = len(request.token_ids) + sum(
                    running.longest_run(launched.plan) * launched.work.decoding.count(running)
                    + launched.work.sampling.count(running)
                    for launched in self._launched
                )
                assert running.num_scheduled == num_known - 1, "the two clocks disagree"
        queued = self._waiting.check()
        assert all(waiting.request.status is RequestStatus.WAITING for waiting in queued)
