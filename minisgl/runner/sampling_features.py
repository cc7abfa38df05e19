"""Describes the sampling features of a request, and the variants of captured sampling."""

from __future__ import annotations

import enum
from collections.abc import Set
from typing import NamedTuple

from minisgl.parameters import Role
from minisgl.request import DEFAULT_LOGPROBS, MAX_EDITS, MAX_LOGPROBS, SAMPLED, SamplingParams


def _with_role(*roles: Role) -> Set[str]:
    return frozenset(parameter.name for parameter in SAMPLED if parameter.role in roles)


COMMON_FILTERS = _with_role(Role.FILTER)
FILTERS = _with_role(Role.FILTER, Role.RARE_FILTER)
PENALTIES = _with_role(Role.PENALTY)


class Scoring(NamedTuple):
    """How an engine scores sampled tokens."""

    most: int = DEFAULT_LOGPROBS  # top logprobs of a token
    processed: bool = False  # by what a token is drawn from, in place of the raw logits


RAW_SCORES = Scoring()


class SamplingVariant(enum.IntEnum):
    """The sampling of a captured step. Each variant includes the ones before it."""

    BASIC = 0  # greedy or with a temperature; captured only with several ranks
    FILTERED = 1  # plus COMMON_FILTERS
    FULL = 2  # plus the other filters, penalties, logit bias, logprobs


class SamplingFeatures(NamedTuple):
    """The sampling features of a request, or of all requests of a batch."""

    random: bool = False
    filters: Set[str] = frozenset()  # names of FILTERS
    penalties: bool = False
    num_edits: int = 0
    num_logprobs: int = -1  # top logprobs; 0: the sampled token only, -1: none
    masked: bool = False  # its tokens are masked

    @classmethod
    def of(
        cls, params: SamplingParams, num_edits: int, *, masked: bool = False
    ) -> SamplingFeatures:
        """num_edits: number of entries of logit_bias and of tokens masked by min_tokens."""
        random = not params.greedy
        used = {
            parameter.name
            for parameter in SAMPLED
            if parameter.stored(getattr(params, parameter.name)) != parameter.default
        }
        return cls(
            random=random,
            filters=FILTERS & used if random else frozenset(),
            penalties=not PENALTIES.isdisjoint(used),
            num_edits=num_edits,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            masked=masked,
        )

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        """The features of both, as the sampler needs them for one batch."""
        return SamplingFeatures(
            random=self.random or other.random,
            filters=self.filters | other.filters,
            penalties=self.penalties or other.penalties,
            num_edits=max(self.num_edits, other.num_edits),
            num_logprobs=max(self.num_logprobs, other.num_logprobs),
            masked=self.masked or other.masked,
        )

    @property
    def full(self) -> bool:
        """True if only variant FULL supports these features."""
        return (
            self.penalties
            or self.num_edits > 0
            or self.num_logprobs >= 0
            or not self.filters <= COMMON_FILTERS
        )

    @property
    def variant(self) -> SamplingVariant:
        """The smallest variant that supports these features."""
        if self.full:
            return SamplingVariant.FULL
        return SamplingVariant.FILTERED if self.filters else SamplingVariant.BASIC


# The features that a captured step computes, for each variant.
VARIANT_FEATURES = {
    SamplingVariant.BASIC: SamplingFeatures(random=True),
    SamplingVariant.FILTERED: SamplingFeatures(random=True, filters=COMMON_FILTERS),
    SamplingVariant.FULL: SamplingFeatures(True, FILTERS, True, MAX_EDITS, MAX_LOGPROBS),
}
