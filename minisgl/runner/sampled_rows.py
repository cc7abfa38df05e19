"""The rows of a step that are sampled, and the tokens that come of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.drafting.drafter import ChunkEnds, DraftStep
from minisgl.kernels.sampling.reference import TokenScores
from minisgl.runner.chunk_tensors import ChunkTensors
from minisgl.runner.row_order import RankRows
from minisgl.runner.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step whose logits are sampled, in the order of StepPlan."""

    shape: StepShape
    rows: Tensor | None  # [num_samples] int64, indices of rows; None: all rows of the step
    slots: Tensor  # [num_samples] int64
    output_index: Tensor  # [num_samples] int64, of the token to sample
    num_runs: tuple[int, ...] = ()  # the decoded slots of each rank that divides requests
    chunk_ends: ChunkEnds | None = None  # if there are chunks
    drafting: DraftStep | None = None  # what a drafter needs of the step, if there is one

    def with_chunks(
        self, chunks: ChunkTensors, of_ranks: RankRows, prompt_lengths: Tensor
    ) -> SampleRows:
        """These, of the decode rows of a step, and then those of its chunks. prompt_lengths: of
        SlotState."""
        places = of_ranks.decode_places(self.slots.device)
        output_index = chunks.sample_ends - prompt_lengths[chunks.sample_slots]
        return SampleRows(
            self.shape,
            rows=torch.cat((*places, chunks.sample_rows)),
            slots=torch.cat((self.slots, chunks.sample_slots)),
            output_index=torch.cat((self.output_index, output_index)),
            num_runs=self.num_runs,
            chunk_ends=ChunkEnds(chunks.last_rows, chunks.next_tokens),
        )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of a step, on the device that sampled them."""

    token_ids: Tensor  # [rows] int64
    # Logprobs, with at least the largest number of top tokens that a row requested; entries beyond
    # what a row requested are undefined. May be None if no row requested any.
    scores: TokenScores | None
