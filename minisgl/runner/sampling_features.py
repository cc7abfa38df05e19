"""Describes the sampling features of a request, and the variants of captured sampling."""

from __future__ import annotations

import enum
from typing import NamedTuple

from minisgl.request import MAX_EDITS, MAX_LOGPROBS, SamplingParams


class SamplingVariant(enum.IntEnum):
    """The sampling of a captured step. Each variant includes the ones before it."""

    BASIC = 0  # greedy or with a temperature; captured only with several ranks
    FILTERED = 1  # plus top_k, top_p, min_p
    FULL = 2  # plus penalties, logit bias, logprobs


class SamplingFeatures(NamedTuple):
    """The sampling features of a request; those of a batch are the maximum of each field."""

    random: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    penalties: bool = False
    num_edits: int = 0
    num_logprobs: int = -1  # top logprobs; 0: the sampled token only, -1: none

    @classmethod
    def of(cls, params: SamplingParams, num_edits: int) -> SamplingFeatures:
        """num_edits: number of entries of logit_bias and of tokens masked by min_tokens."""
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
        """True if only variant FULL supports these features."""
        return self.penalties or self.num_edits > 0 or self.num_logprobs >= 0

    @property
    def variant(self) -> SamplingVariant:
        """The smallest variant that supports these features."""
        if self.full:
            return SamplingVariant.FULL
        return SamplingVariant.FILTERED if self.filters else SamplingVariant.BASIC


_BASIC = SamplingFeatures(random=True)
_FILTERED = _BASIC._replace(min_p=True, top_k=True, top_p=True)
_FULL = _FILTERED._replace(penalties=True, num_edits=MAX_EDITS, num_logprobs=MAX_LOGPROBS)

# The features that a captured step computes, for each variant.
VARIANT_FEATURES = {
    SamplingVariant.BASIC: _BASIC,
    SamplingVariant.FILTERED: _FILTERED,
    SamplingVariant.FULL: _FULL,
}
