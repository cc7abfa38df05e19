"""Drafts that are accepted by chance, for benchmarks with random weights, whose drafts would never
be right. What is sampled is then not what the model says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.kernels.sampling.philox import uniform
from minisgl.kernels.sampling.tables import column_of
from minisgl.runner.computation import Computation
from minisgl.runner.sampler import SampledRows
from minisgl.runner.sampling_features import SamplingFeatures
from minisgl.runner.step_inputs import SampleRows

# Drawn at the start, since Philox in torch is a hundred launches.
NUM_COINS = 1 << 16
ODD = 0x9E3779B1  # spreads seeds over the coins


class AssumedAcceptance(Computation):
    """Accepts each draft with a probability, given that the one before it was, by a coin that is a
    function of the request's seed and the token's index. A drafter that finds nothing drafts token
    0, so that each step verifies as many rows as it can."""

    def __init__(self, probability: float, **parts: Any) -> None:
        """parts: the arguments of Computation."""
        super().__init__(**parts)
        index = torch.arange(NUM_COINS // 4, device=self.lanes.device)
        self._is_accepted = uniform(torch.zeros_like(index), index, 4).flatten() < probability

    def draw(self, logits: Tensor, samples: SampleRows, features: SamplingFeatures) -> SampledRows:
        sampled = super().draw(logits, samples, features)
        shape, state = samples.shape, self.tables.state
        if shape.run > 1:
            slots, index, tokens = (
                each[: shape.num_decode_rows].view(shape.num_decodes, shape.run)
                for each in (samples.slots, samples.output_index, sampled.token_ids)
            )
            own, tokens = slots[:, 0], tokens[:, :-1]
            drafts = state.drafts[own, : shape.run - 1]
            seeds = column_of(self.sampler.tables.records, "seed")[own, None]
            is_accepted = self._is_accepted[(seeds * ODD + index[:, :-1]) & (NUM_COINS - 1)]
            others = (tokens + (tokens == drafts)) % self.vocab_size
            drafted = torch.where(is_accepted, drafts.to(tokens.dtype), others)
            tokens.copy_(torch.where(slots[:, 1:] == state.scratch_slot, tokens, drafted))
        return sampled

    def sample(self, logits: Tensor, samples: SampleRows, features: SamplingFeatures) -> None:
        super().sample(logits, samples, features)
        self.tables.state.drafts.clamp_(min=0)
