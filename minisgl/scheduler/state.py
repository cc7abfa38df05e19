"""A request in the scheduler: one type while it waits, another while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.kvcache.manager import Lease
from minisgl.kvcache.prefix import pack_tokens
from minisgl.request import Request


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without a slot and pages, new or retracted."""

    request: Request
    arrival: int  # order of submission, kept through retraction
    # Number of tokens that will be known once every launched step is settled; an upper bound until
    # the lengths of the runs are known. A retracted request is not planned before that.
    num_expected: int
    retracted: bool = False
    num_passed: int = 0  # number of times a later request was admitted first
    wants_load: bool = False  # of pages in host memory, when it was last looked at
    num_loads: int = 0  # that had begun by then
    asked_disk: bool = False  # whether it has more of the prefix
    fetching: bool = False  # pages of its prefix are on their way from the disk
    fetched: range = range(0)  # pages of its prefix that came from there
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
    last_step: int = 0  # the step that sampled its last token before it joined a group
    group: DecodeGroup | None = None  # of decode rows, the last that it joined
    active: bool = True  # False once retracted or ended: results of steps in flight are dropped
    decoding: bool = False  # in the decode rows of the next plan, or of the next of its group
    loading: bool = False  # pages of its prefix are on their way to the device: it has no rows
    # At this value of num_scheduled, planning must check the request: the next run may need a page,
    # or the last token may be sampled.
    milestone: int = 0

    @property
    def client(self) -> str:
        return self.request.tenant.client

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
