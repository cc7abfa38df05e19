"""Defines what the runner needs of a drafter, and what a drafter gets of a step.

A drafter writes `SlotState.drafts` at the end of each step that samples: for each sampled slot the
tokens that it guesses after the slot's last one. The next step that decodes the slot with a run
verifies them. A wrong draft costs time, and never changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.kernels.slots.slot_state import SlotState

# Draws a token id for each row: (logits [n, vocabulary], slots [n] int64, output_index [n] int64 of
# the tokens to draw) -> [n] int64, with the noise that the sampler uses for the same token.
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


class ChunkEnds(NamedTuple):
    """Where the chunks of a step end."""

    rows: Tensor  # [num_chunks] int64: the last row of each; of padding the number of all rows
    next_tokens: Tensor  # [num_chunks] int64: that follow the chunks; -1: unknown


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A step up to its sampling, on the device.

    Its sampled rows are, as in StepPlan, the runs of decoded slots, `run` rows each, and then one
    row for each chunk that samples. Padding has the scratch slot. Where ranks divide requests, they
    are those of all, as are the rows of `hidden`; each rank drafts for all.
    """

    batch: ForwardBatch
    hidden: Tensor  # [num_rows, hidden_size]: what the model has returned for the rows
    state: SlotState  # settled when the drafter is called: lengths, last tokens
    states: Sequence[LayerState]  # of the model's layers, then of the drafter's
    attention: Attention  # prepared for `batch`
    slots: Tensor  # [num_samples] int64: of the sampled rows; a rejected draft's row has its slot
    output_index: Tensor  # [num_samples] int64: of the tokens that were sampled
    sample_rows: Tensor | None  # [num_samples] int64: rows of the batch; None: all, in order
    num_runs: tuple[int, ...]  # of each rank that divides requests; of one, if nothing is divided
    chunk_ends: ChunkEnds | None  # None: there are no chunks
    tapped: Tensor | None = None  # [num_rows, any], of Drafter.taps as Taps has them; None: none

    @property
    def run(self) -> int:
        """Number of rows of each run; 1 if the step verifies nothing."""
        return self.batch.decodes.run

    @property
    def num_decode_rows(self) -> int:
        return sum(self.num_runs) * self.run

    def ending_slots(self) -> Tensor:
        """The slot of each run, then of each chunk that samples: [num_slots] int64."""
        rows = self.num_decode_rows
        runs = self.slots[: rows : self.run].contiguous()  # as kernels take them
        return runs if rows == len(self.slots) else torch.cat((runs, self.slots[rows:]))

    def ending_rows(self) -> Tensor:
        """The row of the batch for which each slot's last token was sampled, in the order of
        `ending_slots`: [num_slots] int64. The rows behind it in its run were rejected."""
        num_rows = self.num_decode_rows
        slots, index = (each[: num_rows : self.run] for each in (self.slots, self.output_index))
        if self.sample_rows is None:
            starts = torch.arange(0, num_rows, self.run, device=slots.device)
        else:
            starts = self.sample_rows[: num_rows : self.run]
        # The length up to the first token that was sampled. That of the scratch slot stays 0.
        first = index + self.state.prompt_lengths[slots]
        ends = starts + (self.state.lengths[slots] - first).clamp(min=0)
        if self.sample_rows is None:
            return ends
        return torch.cat((ends, self.sample_rows[num_rows:]))

    def next_tokens(self, token_ids: Tensor) -> Tensor:
        """The token behind each row of the batch: the next one of a prompt, or what was sampled.

        token_ids: [num_samples] int64. Returns [num_rows] int64; undefined for rows of padding.
        """
        if self.sample_rows is None or self.chunk_ends is None:
            return token_ids
        num_rows = len(self.batch.token_ids)
        following = self.batch.token_ids.new_zeros(num_rows + 1)  # the last is for padding
        following[: num_rows - 1] = self.batch.token_ids[1:]
        following[self.chunk_ends.rows] = self.chunk_ends.next_tokens
        is_sampled = self.slots != self.state.scratch_slot
        following[self.sample_rows.where(is_sampled, num_rows)] = token_ids
        return following[:num_rows]


class Drafter(Protocol):
    """Guesses tokens. Calls come in launch order, on the compute lane, and wait for nothing; a call
    of `draft` may be captured."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the model whose input it needs."""
        ...

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """What layers of its own keep between steps."""
        ...

    def join(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Assign slots to requests of which these tokens are known."""
        ...

    def draft(self, step: DraftStep, token_ids: Tensor, draw: Draw) -> None:
        """Write `step.state.drafts` of the slots that a settled step has sampled; -1 where there is
        no draft, and from there on.

        token_ids: [num_samples] int64: what was sampled for the rows of `step.slots`; there may be
        none.
        """
        ...
