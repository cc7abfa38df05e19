"""Which parts of sampling a request uses, and which of them a captured step can do."""

from __future__ import annotations

import enum
from typing import NamedTuple

from minisgl.request import MAX_EDITS, MAX_LOGPROBS, SamplingParams


class SamplingVariant(enum.IntEnum):
    """The sampling that a step is captured with. Each can do what those before it can."""

    BASIC = 0  # greedy or with a temperature; captured only where several ranks share the work
    FILTERED = 1  # and top_k, top_p, min_p
    FULL = 2  # and penalties, logit bias, logprobs


class SamplingFeatures(NamedTuple):
    """Sampling features that a request uses; a batch needs the maximum of each field."""

    random: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    penalties: bool = False
    num_edits: int = 0
    num_logprobs: int = -1  # -1: none, 0: of the sampled token only

    @classmethod
    def of(cls, params: SamplingParams, num_edits: int) -> SamplingFeatures:
        """num_edits: entries of logit_bias and tokens masked by min_tokens."""
        random = not params.greedy
        return cls(
            random=random,
            min_p=random and params.min_p > 0,
            top_k=random and params.top_k > 0,
            top_p=random and params.top_p < 1,
            penalties=params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0,
            num_edits=num_edits,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
        )

    @property
    def filters(self) -> bool:
        return self.min_p or self.top_k or self.top_p

    @property
    def full(self) -> bool:
        """Whether they take the full variant."""
        return self.penalties or self.num_edits > 0 or self.num_logprobs >= 0

    @property
    def variant(self) -> SamplingVariant:
        """The smallest variant that can do all of them."""
        if self.full:
            return SamplingVariant.FULL
        return SamplingVariant.FILTERED if self.filters else SamplingVariant.BASIC


_BASIC = SamplingFeatures(random=True)
_FILTERED = _BASIC._replace(min_p=True, top_k=True, top_p=True)
_FULL = _FILTERED._replace(penalties=True, num_edits=MAX_EDITS, num_logprobs=MAX_LOGPROBS)

# What a step that is captured with a variant does, whatever its rows ask for.
VARIANT_FEATURES = {
    SamplingVariant.BASIC: _BASIC,
    SamplingVariant.FILTERED: _FILTERED,
    SamplingVariant.FULL: _FULL,
}
