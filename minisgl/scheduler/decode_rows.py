"""The decode rows: requests that compute one run of tokens in each step, which samples the next.

The stages of a pipeline work on different steps, so a row cannot be in all of these. Decode rows
form as many groups as there are stages, and the groups take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from minisgl.kvcache.manager import KVCacheManager
from minisgl.scheduler.plan import PageGrant
from minisgl.scheduler.state import DecodeGroup, Running, StepWork


class DecodeRows:
    """Which requests the next step decodes, and which of them need a page for that."""

    def __init__(
        self, kv: KVCacheManager, max_run: int, num_stages: int, *, look_ahead: bool
    ) -> None:
        """max_run: maximum number of tokens of a run. num_stages: of the pipeline. look_ahead:
        whether, while stages have nothing to do, the rows of the oldest step in flight may be
        planned again."""
        self.max_run = max_run
        self._wants_page: list[Running] = []  # whose next run may need one
        self._kv = kv
        self._num_stages = num_stages
        self._look_ahead = look_ahead
        self._groups = [DecodeGroup() for _ in range(num_stages)]
        self._joining: list[Running] = []  # that are to join a group

    def advance(self, group: DecodeGroup, step: int, max_run: int) -> int:
        """Count one more run for each row of a group; returns the longest context."""
        group.step = step
        longest = 0
        reached: list[Running] = []
        for running in group.rows:
            run = max_run if running.takes_drafts else 1
            running.num_scheduled = scheduled = running.num_scheduled + run
            if scheduled >= running.milestone:
                reached.append(running)
            if scheduled > longest:
                longest = scheduled
        for running in reached:
            self.update(running)
        return longest

    def join(self, running: Running, step: int) -> None:
        """Make a request, whose first token `step` samples, a decode row."""
        running.last_step = step
        running.set_milestone(self.max_run)
        self.update(running)

    def leave(self, running: Running) -> None:
        """Let later plans decode a request no more."""
        running.decoding = False
        if running.group is not None:
            running.group.changed = True
            running.last_step = running.group.step  # if it joins again

    def update(self, running: Running) -> None:
        """Decide whether the next plan decodes a request, and whether it needs a page for that.

        A request that may have sampled its last token sits out until its steps are settled.
        """
        scheduled, room = running.num_scheduled, running.num_room
        if scheduled >= running.last_scheduled:
            if running.decoding:
                self.leave(running)
        else:
            if scheduled + self.max_run > room and room < running.last_scheduled:
                self._wants_page.append(running)
            if not running.decoding:
                running.decoding = True
                self._joining.append(running)

    def resume(self, running: Running, step: int) -> None:
        """Decode a request again whose run in `step` was shorter than planned, if it sits out."""
        if not running.decoding and running.num_scheduled < running.last_scheduled:
            if running.group is not None and running.group.changed:
                self._regroup(running.group, step)  # it may still be there
            self.update(running)

    def grant_pages(self, work: StepWork, retract: Callable[[int], None]) -> None:
        """Grant pages to the rows whose next run may need one. `retract` takes the pages of a
        request of a rank, perhaps of this one, where none are left."""
        kv, max_run = self._kv, self.max_run
        for running in sorted(self._wants_page, key=attrgetter("arrival")):
            while running.active:
                index = len(running.lease.pages)
                pages = kv.of(running.lease).reserve(
                    running.lease, min(running.num_scheduled + max_run, running.last_scheduled)
                )
                if pages is None:
                    retract(running.lease.rank)
                    continue
                if pages:  # otherwise the last run was short enough to leave room
                    work.grants.append(PageGrant(running.slot, index, pages))
                    work.slide(running)
                running.num_room = len(running.lease.pages) * kv.page_size
                running.set_milestone(max_run)
                break
        self._wants_page = []

    # -- groups ------------------------------------------------------------------------------------

    def next_group(self, step: int, settled: int, *, may_repeat: bool) -> tuple[DecodeGroup, int]:
        """The group that `step` decodes, and its plan's `lag`. The group has no rows if none can be
        decoded yet.

        settled: the last step that is. may_repeat: a step is in flight, and the plan has no chunks.
        """
        if self._num_stages == 1:
            [group] = self._groups
            if group.changed or self._joining:
                self._regroup(group, step - 1)
            return group, 1
        # Tokens of the steps up to this one have come back to the first stage when the step begins.
        bounds = [max(settled, step - self._num_stages)]
        if self._look_ahead and may_repeat:
            bounds.append(settled + 1)
        for known in bounds:
            for group in sorted(self._groups, key=attrgetter("step")):
                if group.step > known:
                    break
                if group.changed or self._joining:
                    self._regroup(group, known)
                if group.rows:
                    return group, step - known
        return DecodeGroup(), step - settled

    def _regroup(self, group: DecodeGroup, known: int) -> None:
        """Bring the rows of a group up to date. Rows whose last token was sampled by a step up to
        `known` join it as long as it has less than its share, and leave it if it has far more."""
        rows = [running for running in group.rows if running.decoding]
        joining = [running for running in self._joining if running.decoding]
        others = sum(len(other.rows) for other in self._groups if other is not group)
        share = -(-(others + len(rows) + len(joining)) // len(self._groups))
        self._joining = []
        for running in joining:
            if len(rows) < share and running.last_step <= known:
                running.group = group
                rows.append(running)
            else:
                self._joining.append(running)
        if len(rows) > share + share // 4 + 1:
            for running in rows[share:]:
                running.group, running.last_step = None, group.step
            self._joining += rows[share:]
            del rows[share:]
        group.changed = False
        rows.sort(key=attrgetter("lease.rank"))  # stable
        if rows != group.rows:
            group.rows = rows
            group.slots = tuple([running.slot for running in rows])

    def audit(self, requests: Iterable[Running]) -> None:
        """AssertionError if one of the running `requests` that decode is lost, or twice here."""
        rows = [row for group in self._groups for row in group.rows]
        rows = [row for row in (*rows, *self._joining) if row.decoding]
        for running in requests:
            assert rows.count(running) == int(running.decoding), "a row is lost or twice there"
