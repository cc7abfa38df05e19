"""The input and the output of one step: a plan from the scheduler, a result from the runner.

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
    """One step: every decode slot goes on from its last token, every chunk computes its own tokens.

    A decode slot's input is the token that its previous row sampled, which only the device may
    know so far; its position is the slot's length, which the device counts too.

    Sampled rows are, in this order: one for each of `decode_slots`, then one for each chunk that
    samples. A chunk's row samples one token, a decode slot's row a run of 1 to `max_run` tokens,
    which ends at the latest where the slot's pages have no room for the KV of another one. The KV
    of every token of a run but the last is computed in the same step.
    """

    step: int  # 1, 2, ...
    decode_slots: tuple[int, ...]  # the same object as in the last plan if membership is the same
    # Tokens that the longest decode slot attends to, its own included; at most, where runs may have
    # been shorter than planned.
    longest_decode: int = 0
    chunks: tuple[Chunk, ...] = ()
    joins: tuple[SlotJoin, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    # Failed steps known when this one was planned. A runner on which a step has failed refuses the
    # plans of that epoch: they build on device state that was never made.
    epoch: int = 0
    max_run: int = 1  # tokens that a decode slot may sample

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        return len(self.decode_slots) + sum(chunk.samples for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The output of a step, on the host."""

    step: int
    token_ids: Sequence[int]  # the runs of all sampled rows, joined in the order of the rows
    # by index in token_ids, ascending; only those of rows that asked
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # by chunk index: of its scored_token_ids
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    captured: bool = False  # the step ran as a CUDA graph
    run_lengths: Sequence[int] | None = None  # [num_samples]; None: one token a row
