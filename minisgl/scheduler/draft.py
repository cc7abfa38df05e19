"""A plan under construction, and in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan
from minisgl.scheduler.state import Running


@dataclass(slots=True)
class Draft:
    """What a step is to compute, without its decode rows."""

    step: int
    budget: int  # tokens of prompts that it may compute besides
    joins: list[SlotJoin] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_owners: list[Running] = field(default_factory=list)
    loading: list[Running] = field(default_factory=list)  # join with pages on their way
    sampling: list[Running] = field(default_factory=list)  # of the chunks that have a sampled row

    @property
    def num_computed(self) -> int:
        """Number of tokens of prompts that it computes."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

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
                masked=request.matcher is not None,
            )
        )
        self.grants.append(PageGrant(running.slot, 0, tuple(running.lease.pages)))
        if running.loading:
            self.loading.append(running)
        else:
            self.close_gap(running)

    def close_gap(self, running: Running) -> None:
        """Spend the budget on the tokens of a request that are known and not computed."""
        start = running.num_scheduled
        end = min(start + self.budget, running.num_to_prefill)
        if start == end:
            return
        self.budget -= end - start
        request = running.request
        scored: list[int] = []
        if request.wants_prompt_logprobs:
            scored = request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
        samples = end == running.num_to_prefill and request.max_tokens > 0
        self.chunks.append(
            Chunk(
                slot=running.slot,
                start=start,
                token_ids=request.token_ids[start:end],
                samples=samples,
                scored_token_ids=scored,
                prompt_logprobs=request.params.prompt_logprobs or 0,
            )
        )
        self.chunk_owners.append(running)
        if samples:
            self.sampling.append(running)


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan in flight, and the requests of its rows."""

    plan: StepPlan
    draft: Draft
    decoding: list[Running] = field(default_factory=list)  # never changed after the launch
    masked: Sequence[Running] = ()  # of the plan's masked_slots
