"""A request in the scheduler: one type while it waits, another while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.kvcache.manager import Lease
from minisgl.kvcache.prefix import pack_tokens
from minisgl.request import Request


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without slot and pages, new or retracted."""

    request: Request
    arrival: int  # order of submission, kept through retraction
    # Tokens that will be known once every launched step is settled: at most, until it is known how
    # long the runs are. A retracted request is not planned before that.
    num_expected: int
    retracted: bool = False
    num_passed: int = 0  # times a later request was admitted first
    _key: bytes = b""

    @property
    def ready(self) -> bool:
        return len(self.request.token_ids) >= self.num_expected

    def pack(self) -> bytes:
        """The packed token_ids of a request that is ready, and so will not change."""
        if not self._key:
            self._key = pack_tokens(self.request.token_ids)
        return self._key


@dataclass(slots=True, eq=False)
class Running:
    """A request with a slot and pages.

    `num_scheduled` is the clock of launched steps: the number of the request's tokens that have
    their KV, or will have it before any later step runs. The clock of settled steps is the
    request's own `token_ids`. In between lie the tokens that launched steps sample.

    Where a row may sample a run of tokens, the settled clock is what is certain, and
    `num_scheduled` the most that is possible: a launched step counts with its longest run, and
    settling it takes back what its run was shorter. Until then `num_scheduled` may exceed
    `last_scheduled`.
    """

    request: Request
    arrival: int
    slot: int
    lease: Lease
    key: bytes  # packed tokens known at admission: what is prefilled
    num_known: int  # tokens in `key`
    num_scheduled: int
    last_scheduled: int  # num_scheduled when every token that may be sampled has been
    num_room: int  # tokens that the lease holds
    resumed: bool
    active: bool = True  # False once retracted or ended: what in-flight steps still write is lost
    decoding: bool = False  # in the decode rows of the next plan
    # When num_scheduled gets here, planning has to look: the next run may need a page, or the last
    # token may be sampled.
    milestone: int = 0

    def set_milestone(self, max_run: int) -> None:
        if self.num_room >= self.last_scheduled:
            self.milestone = self.last_scheduled
        else:
            self.milestone = self.num_room - max_run + 1


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan that is not settled yet, and whom its rows belong to."""

    step: int
    decoding: list[Running]  # rows of decode_slots; never changed after the launch
    chunks: list[Running]
    sampling_chunks: list[Running]  # those chunks that have a sampled row
    completed_prompts: list[Running]  # whose prompt ends here, but want no output
    max_run: int  # of the decode rows
