"""Draws drafts as tokens are sampled."""

from __future__ import annotations

from torch import Tensor

from minisgl.drafting.drafter import Draw
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import COMMON_FILTERS, SamplingFeatures


def drawing(sampler: Sampler, features: SamplingFeatures) -> Draw:
    """Draws from a drafter's logits with the noise of `sampler`, for requests with `features`.
    Nothing is counted, and logits are neither penalized nor biased nor masked."""
    plain = SamplingFeatures(features.random, features.filters & COMMON_FILTERS)

    def draw(logits: Tensor, slots: Tensor, output_index: Tensor) -> Tensor:
        return sampler.sample(logits, slots, output_index, plain).token_ids

    return draw
