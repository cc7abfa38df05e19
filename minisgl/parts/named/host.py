"""The scheduler's half: which sampled rows score which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minisgl.errors import InvalidRequestError
from minisgl.parts.scores.host import check_num_top
from minisgl.request import Extra, SamplingParams, check_token_ids
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class NamedTokens(Extra):
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedPlan(PartPlan):
    reads_rows: ClassVar[bool] = True

    # Of each request that names tokens: its place among the sampled ones, and the tokens.
    asked: tuple[tuple[int, tuple[int, ...]], ...]


class Named(Part):
    kind = NamedTokens

    def __init__(self, vocab_size: int, most: int, logprobs_mode: str) -> None:
        """most: alternatives of a token. logprobs_mode: the option."""
        self._vocab_size, self._most, self._mode = vocab_size, most, logprobs_mode

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> NamedTokens | None:
        token_ids = tuple(params.logprob_token_ids)
        if not token_ids:
            return None
        if self._mode != "raw_logprobs":
            reason = (
                f"is not supported with --logprobs-mode {self._mode}: only raw logits have the "
                "logprobs of any token."
            )
            raise InvalidRequestError("logprob_token_ids", reason)
        check_num_top("logprob_token_ids", len(token_ids), self._most)
        check_token_ids("logprob_token_ids", token_ids, self._vocab_size)
        return NamedTokens(token_ids)

    def plan(self, work: StepWork) -> NamedPlan | None:
        extras = (running.request.extra(NamedTokens) for running in work.sampled)
        asked = [(place, extra.token_ids) for place, extra in enumerate(extras) if extra]
        return NamedPlan(tuple(asked)) if asked else None
