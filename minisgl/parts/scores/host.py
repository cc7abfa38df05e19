"""The scheduler's half: which rows of chunks score which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minisgl.request import Request, TokenLogprobs
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt tokens whose logprobs the first rows of a chunk compute, one per row."""

    index: int  # of the chunk in the plan
    token_ids: Sequence[int]
    num_top: int  # top logprobs that are reported for each


@dataclass(frozen=True, slots=True)
class ScorePlan(PartPlan):
    reads_rows: ClassVar[bool] = True

    chunks: tuple[ScoredChunk, ...]


class Scores(Part):
    def concerns(self, request: Request) -> bool:
        return request.params.prompt_logprobs is not None

    def plan(self, work: StepWork) -> ScorePlan | None:
        scored: list[ScoredChunk] = []
        for index, (chunk, running) in enumerate(work.owned_chunks):
            request = running.request
            if request.wants_prompt_logprobs:
                end = min(chunk.end + 1, request.num_prompt_tokens)
                token_ids = request.token_ids[chunk.start + 1 : end]
                if token_ids:
                    num_top = request.params.prompt_logprobs or 0
                    scored.append(ScoredChunk(index, token_ids, num_top))
        return ScorePlan(tuple(scored)) if scored else None

    def settle(self, work: StepWork, outcome: object) -> None:
        assert isinstance(outcome, dict)
        scores: dict[int, list[TokenLogprobs]] = outcome
        for index, found in scores.items():
            running = work.chunk_owners[index]
            if running.active:
                running.request.prompt_logprobs += found

    def retracted(self, request: Request) -> None:
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()
