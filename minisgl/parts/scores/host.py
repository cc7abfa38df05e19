"""The scheduler's half: which rows of chunks score which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from minisgl.errors import InvalidRequestError
from minisgl.request import Extra, Request, SamplingParams, TokenLogprobs
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(slots=True)
class PromptScores(Extra):
    """The logprobs of a prompt's tokens but the first; None of one that is no token of text."""

    num_top: int  # top logprobs that are reported for each
    num_tokens: int
    found: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def computes_all_tokens(self) -> bool:
        return len(self.found) < self.num_tokens


def scores_of(request: Request) -> list[TokenLogprobs | None]:
    """The logprobs of the prompt so far; none where the request did not ask."""
    scores = request.extra(PromptScores)
    return [] if scores is None else scores.found


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt tokens whose logprobs the first rows of a chunk compute, one per row."""

    index: int  # of the chunk in the plan
    token_ids: Sequence[int]  # a negative one is no token of text, and has none
    num_top: int  # top logprobs that are reported for each


@dataclass(frozen=True, slots=True)
class ScorePlan(PartPlan):
    reads_rows: ClassVar[bool] = True

    chunks: tuple[ScoredChunk, ...]


def check_num_top(name: str, asked: int | None, most: int) -> None:
    """Raise InvalidRequestError for more alternatives than an engine may be asked for."""
    if (asked or 0) > most:
        reason = f"at most {most} alternatives are allowed (--max-logprobs), not {asked}."
        raise InvalidRequestError(name, reason)


class Scores(Part):
    kind = PromptScores

    def __init__(self, most: int) -> None:
        """most: alternatives of a token."""
        self._most = most

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> PromptScores | None:
        num_top = params.prompt_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            check_num_top(name, getattr(params, name), self._most)
        return None if num_top is None else PromptScores(num_top, len(prompt) - 1)

    def plan(self, work: StepWork) -> ScorePlan | None:
        scored: list[ScoredChunk] = []
        for index, (chunk, running) in enumerate(work.owned_chunks):
            request, scores = running.request, running.request.extra(PromptScores)
            if scores is not None and scores.computes_all_tokens:
                end = min(chunk.end + 1, request.num_prompt_tokens)
                token_ids = request.token_ids[chunk.start + 1 : end]
                if token_ids:
                    scored.append(ScoredChunk(index, token_ids, scores.num_top))
        return ScorePlan(tuple(scored)) if scored else None

    def settle(self, work: StepWork, outcome: object) -> None:
        assert isinstance(outcome, dict)
        for index, found in outcome.items():
            scores = work.chunk_owners[index].request.extra(PromptScores)
            if scores is not None:
                # By their place: a request that was retracted meanwhile may compute them again,
                # or end with the token that this step has sampled.
                first = work.chunks[index].start
                scores.found[first : first + len(found)] = found
