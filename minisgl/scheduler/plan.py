"""What the scheduler tells a runner to do in one step, and what comes back.

A plan is immutable and holds plain integers only, so that it can be sent to other ranks and kept
until it is settled. Slots are rows of the device tables; they change in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SlotJoin:
    """A request takes a slot. Applied before anything else in its plan."""

    slot: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # EOS included; masked until min_tokens outputs exist
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # of a request that resumes after retraction, else empty


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages appended to a slot's row of the page table, from column `index` on."""

    slot: int
    index: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request whose ids the host knows."""

    slot: int
    start: int  # position of the first token; all earlier positions have their KV
    token_ids: Sequence[int]
    samples: bool  # the chunk reaches the end of what is known, so its last row is sampled
    # Prompt tokens that the chunk's first rows are scored against, one a row, and how many of the
    # likeliest tokens to report beside each.
    scored_token_ids: Sequence[int] = ()
    prompt_logprobs: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: every decode slot computes one token, every chunk its own.

    A decode slot's input is the token that its previous row sampled, which only the device may
    know so far; its position is the slot's length, which the device counts too.

    Sampled rows are, in this order: one for each of `decode_slots`, then one for each chunk that
    samples.
    """

    step: int  # 1, 2, ...
    decode_slots: tuple[int, ...]  # the same object as in the last plan if membership is the same
    longest_decode: int = 0  # tokens that the longest decode slot attends to, its own included
    chunks: tuple[Chunk, ...] = ()
    joins: tuple[SlotJoin, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    # Failed steps known when this one was planned. A runner on which a step has failed refuses the
    # plans of that epoch: they build on device state that was never made.
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        return len(self.decode_slots) + sum(chunk.samples for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, on the host."""

    step: int
    token_ids: Sequence[int]  # [num_samples]
    # by sampled row, only the rows that asked
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # by chunk index: of its scored_token_ids
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    captured: bool = False  # the step ran as a CUDA graph
