"""The scheduler's half: which rows of a step need a mask, and whether it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

from minisgl.errors import InvalidRequestError
from minisgl.matcher import Matcher
from minisgl.parts.masks.token_rules import TokenIds, TokenRules, mask_of, word_token_ids
from minisgl.request import NOT_BESIDE_A_CONSTRAINT, Extra, Request, SamplingParams
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import Running, StepWork
from minisgl.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Constraint(Extra):
    """Which tokens may follow those that a request has so far."""

    masks: ClassVar[bool] = True

    matcher: Matcher


@dataclass(frozen=True, slots=True)
class MaskPlan(PartPlan):
    changes_sampling: ClassVar[bool] = True
    is_quick = True

    slots: tuple[int, ...]  # of the sampled rows that need a mask, in the order of the rows


class Masks(Part):
    kind = Constraint

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        # The choices that one HTTP request asks for have the same rules, which are made once.
        self._mask_of = lru_cache(16)(partial(mask_of, vocab_size))
        self._words: Callable[[tuple[str, ...]], tuple[TokenIds, ...]] = lambda words: ()
        if tokenizer is not None:
            self._words = lru_cache(16)(partial(word_token_ids, tokenizer))

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        """The matcher that was given, with what else limits the tokens."""
        inner = given.matcher if isinstance(given, Constraint) else None
        if params.structured is not None and inner is None:
            raise InvalidRequestError("structured", "needs a matcher: `compile` it first.")
        allowed = params.allowed_token_ids
        if allowed is None and not params.bad_words:
            return given
        if allowed is not None and inner is not None:
            raise InvalidRequestError("allowed_token_ids", NOT_BESIDE_A_CONSTRAINT)
        mask = self._mask_of(allowed and tuple(allowed))
        return Constraint(TokenRules(mask, self._words(tuple(params.bad_words)), inner))

    def plan(self, work: StepWork) -> MaskPlan | None:
        masked = masked_rows(work)
        if not masked:
            return None
        if any(map(_is_blind, masked)):
            work.deferred = True
        return MaskPlan(tuple([running.slot for running in masked]))


def masked_rows(work: StepWork) -> list[Running]:
    """The requests of the rows that need masks, in their order. Some may have ended, or been
    retracted: the sampled token of a retracted one is settled."""
    return [running for running in work.sampled if running.request.masked]


def matcher_of(request: Request) -> Matcher:
    """The matcher of a masked request."""
    constraint = request.extra(Constraint)
    assert constraint is not None
    return constraint.matcher


def _is_blind(running: Running) -> bool:
    """Whether the mask of a sampled row depends on a token that is not settled. That of a chunk
    does not, because its tokens are known."""
    return len(running.request.token_ids) < running.num_scheduled
