"""What a drafter is told of a step: where runs and chunks end, and which token follows each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl.attention.base import (
    Attention,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.torch_backend import TorchAttention
from minisgl.drafting.drafter import ChunkEnds, DraftStep
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import SlotState

SCRATCH = 6


def step_of() -> tuple[DraftStep, torch.Tensor]:
    """Two runs of three rows and a padded one; a chunk of 4 tokens, whose prompt goes on, one of 2
    that is sampled, and a padded one; two rows of padding. Returns what was sampled, too."""
    nothing = torch.zeros(0, dtype=torch.int64)
    row_starts = torch.tensor([0, 4, 6, 6], dtype=torch.int32)
    positions = [5, 6, 7, 9, 10, 0, 0, 0, 0]
    of_rows = torch.tensor([*positions, 0, 1, 2, 3, 0, 1, 0, 0])
    rows = Rows.of(torch.zeros_like(of_rows), of_rows)  # the slots are not looked at
    batch = ForwardBatch(
        token_ids=torch.tensor([50, 51, 52, 60, 61, 0, 0, 0, 0, 1, 2, 3, 4, 21, 22, 0, 0]),
        rows=rows,
        own=rows,
        slot_mapping=nothing,
        decodes=DecodeBatch(nothing[:, None], torch.zeros(9, dtype=torch.int32), 9, run=3),
        chunks=PrefillBatch(nothing[:, None], row_starts, nothing, 8, (), ()),
        slots=BatchSlots(nothing, Segments(nothing, nothing, nothing)),
    )
    lengths = torch.tensor([0, 0, 4, 8, 2, 10, 0], dtype=torch.int32)  # after settling
    table = torch.zeros((SCRATCH + 1, 1), dtype=torch.int32)
    state = SlotState(table, lengths, table[:, 0], table, table[:, 0], table[:, 0].long(), 16)
    step = DraftStep(
        batch=batch,
        hidden=torch.zeros(17, 1),
        state=state,
        states=[],
        attention=Attention(TorchAttention(), TorchAttention()),
        slots=torch.tensor([3, 3, 3, 5, 5, *[SCRATCH] * 4, 4, SCRATCH]),
        output_index=torch.tensor([*(1 + position for position in positions), 2, 0]),
        sample_rows=torch.tensor([*range(9), 9 + 5, 0]),
        num_runs=(3,),
        chunk_ends=ChunkEnds(torch.tensor([12, 14, 17]), torch.tensor([5, -1, -1])),
    )
    return step, torch.tensor([71, 72, 73, 81, 82, 0, 0, 0, 0, 23, 99])


def test_the_last_rows_of_runs_and_chunks_are_found() -> None:
    step, _ = step_of()
    assert step.ending_slots().tolist() == [3, 5, SCRATCH, 4, SCRATCH]
    # Of slot 3 all rows count, of slot 5 the first; the padded run ends with its first row.
    assert step.ending_rows().tolist()[:4] == [2, 3, 6, 14]


def test_each_row_is_followed_by_the_next_token_or_by_what_was_sampled() -> None:
    step, sampled = step_of()
    following = step.next_tokens(sampled).tolist()
    assert following[:5] == [71, 72, 73, 81, 82]
    assert following[9:15] == [2, 3, 4, 5, 22, 23]


def test_the_slots_of_runs_alone_lie_one_after_the_other() -> None:
    """Kernels read them so, of whatever stride they are."""
    step, _ = step_of()
    runs = replace(step, slots=step.slots[:9], sample_rows=None, chunk_ends=None)
    assert runs.ending_slots().tolist() == [3, 5, SCRATCH] and runs.ending_slots().is_contiguous()


@pytest.mark.parametrize("name", ["token_ids", "rows", "slots"])
def test_a_batch_refuses_every_other_number_of_a_longer_tensor(name: str) -> None:
    batch = step_of()[0].batch
    strided = torch.zeros(8, dtype=torch.int64)[::2]
    given: dict[str, Any] = {
        "token_ids": strided,
        "rows": Rows.of(strided, strided),
        "slots": batch.slots._replace(decodes=strided),
    }
    with pytest.raises(AssertionError):
        replace(batch, **{name: given[name]})
