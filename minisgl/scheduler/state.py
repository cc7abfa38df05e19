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
    # Tokens that will be known once every launched step is settled. A retracted request is not
    # planned before that.
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

    `num_scheduled` is the clock of launched steps: so many of the request's tokens have their KV,
    or will have it before any later step runs. The clock of settled steps is the request's own
    `token_ids`. In between lie the tokens that launched steps sample.
    """

    request: Request
    arrival: int
    slot: int
    lease: Lease
    key: bytes  # packed tokens known at admission: what is prefilled
    num_known: int  # tokens in `key`
    num_scheduled: int
    num_room: int  # tokens that the lease holds
    resumed: bool
    active: bool = True  # False once retracted or ended: what in-flight steps still write is lost
    decoding: bool = False  # in the decode rows of the next plan
    # When num_scheduled gets here, planning has to look: a page is full or the last token sampled.
    milestone: int = 0

    @property
    def last_scheduled(self) -> int:
        """num_scheduled when every token that may be sampled has been."""
        return self.request.max_len - 1

    def set_milestone(self) -> None:
        self.milestone = min(self.num_room, self.last_scheduled)


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan that is not settled yet, and whom its rows belong to."""

    step: int
    decoding: list[Running]  # rows of decode_slots; never changed after the launch
    chunks: list[Running]
    sampling_chunks: list[Running]  # those chunks that have a sampled row
    completed_prompts: list[Running]  # whose prompt ends here, but want no output
