"""The input and the output of one step: a plan from the scheduler, a result from the runner.

A plan is immutable and holds plain integers only, so that it can be sent to other ranks and kept
until it is settled. A slot is a row of the device tables, which plans change in launch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from minisgl.kvcache.snapshots import TakenSnapshot
from minisgl.request import SamplingParams, TokenLogprobs

P = TypeVar("P", bound="PartPlan")


@dataclass(frozen=True, slots=True)
class SlotJoin:
    """The assignment of a slot to a request, applied after the copies of its plan, before its
    rows."""

    slot: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # EOS included; not sampled until min_tokens outputs exist
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # empty unless the request resumes after retraction
    masked: bool = False  # every token of the slot is sampled under a mask
    takes_drafts: bool = True  # its runs may have several tokens
    # What the state of the slot starts from, before the step writes any; None: from nothing.
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages appended to the page table of a slot, from column `index` on."""

    slot: int
    index: int
    pages: Sequence[int]
    windowed: bool = False  # to that of windowed layers, where these have their own


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request whose ids the host knows."""

    slot: int
    start: int  # position of the first token; all earlier positions are in the KV cache
    token_ids: Sequence[int]
    samples: bool  # the chunk ends with the last known token, so its last row is sampled
    snapshots: tuple[TakenSnapshot, ...] = ()  # of the slot's state within the chunk, in order
    next_token: int = -1  # that follows the chunk; -1: it is not known

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class PartPlan:
    """What a step does for a part (scheduler/parts.py), as plain data of the part's own."""

    __slots__ = ()

    reads_rows: ClassVar[bool] = False  # hidden states, which a captured step does not keep
    # It comes between the forward pass and the sampling, which are captured apart for it.
    changes_sampling: ClassVar[bool] = False
    is_quick: bool = False  # to queue: a matter of microseconds
    adapts_rows: bool = False  # some have adapters, or turn by other positions: captured apart
    is_eager: bool = False  # chunks have rows that no captured step computes


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: a decode row for each of `decode_slots`, and the tokens of each chunk.

    The input of a decode row is the slot's last sampled token, which may be known only to the
    device; its position is the slot's length, which the device counts as well.

    Sampled rows are, in this order: one for each of `decode_slots`, then one for each chunk that
    samples. A chunk samples one token; a decode row samples a run of 1 to `max_run` tokens, or one
    if its slot takes no drafts. A run ends where the slot's pages are full. The KV of every token
    of a run but the last is computed in the same step.

    Ranks that divide requests have consecutive shares of the slots; decode rows are in their order.
    """

    step: int  # 1, 2, ...
    decode_slots: tuple[int, ...]  # the same object as in the last plan if unchanged
    # Number of tokens that the longest decode row attends to, its own included; an upper bound if
    # earlier runs may have been shorter than planned.
    longest_decode: int = 0
    chunks: tuple[Chunk, ...] = ()
    joins: tuple[SlotJoin, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    # Number of failed steps when this one was planned. After a failure the runner refuses the other
    # plans of the epoch, because they depend on device state that does not exist.
    epoch: int = 0
    max_run: int = 1  # maximum number of tokens that a decode row samples
    parts: tuple[PartPlan, ...] = ()  # one of a kind, of those that take part in the step
    # A part needs tokens that are not settled before it samples: the step is launched without its
    # sampling, which follows once they are.
    deferred: bool = False
    # The inputs of decode rows were sampled by steps up to `step - lag`: 1 without a
    # pipeline, and up to the number of stages with one.
    lag: int = 1

    def part(self, kind: type[P]) -> P | None:
        """What the step does for the part with plans of this kind; None: nothing."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        return len(self.decode_slots) + self.num_chunk_samples

    @property
    def num_chunk_samples(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """The slots of the sampled rows, in their order."""
        return self.decode_slots + tuple(chunk.slot for chunk in self.chunks if chunk.samples)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The output of a step, on the host."""

    step: int
    token_ids: Sequence[int]  # the runs of all sampled rows, concatenated
    # by index in token_ids, ascending; only of rows that requested them
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    parts: Sequence[object] = ()  # the outcome of each of the plan's parts
    captured: bool = False  # the step was replayed as a CUDA graph
    run_lengths: Sequence[int] | None = None  # [num_samples]; None: one token per row
    # [num_samples]: drafts that were verified; None: no row had any
    num_drafted: Sequence[int] | None = None
