"""Rows of several tokens for each slot: where a run ends, and what is left of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from minisgl.kernels.slots.slot_state import SlotRows, SlotState
from minisgl.kernels.slots.slot_updates import read_slots, settle_runs

RUN, PAGE_SIZE = 4, 4
DRAFTS = [[31, 32, 33], [41, 42, 43], [0, 0, 0]]


def state() -> SlotState:
    """Slot 0 has two pages; slot 1 has one, and room for two tokens; slot 2 is scratch."""
    return SlotState(
        page_table=torch.tensor([[5, 6], [7, 0], [0, 0]], dtype=torch.int32),
        lengths=torch.tensor([3, 2, 0], dtype=torch.int32),
        last_tokens=torch.tensor([30, 40, 0], dtype=torch.int32),
        drafts=torch.tensor(DRAFTS, dtype=torch.int32),
        prompt_lengths=torch.tensor([2, 1, 0]),
        page_size=PAGE_SIZE,
    )


def test_a_run_has_places_in_the_pages_of_windowed_layers() -> None:
    table = torch.tensor([[8, 9], [4, 0], [0, 0]], dtype=torch.int32)
    found = dataclasses.replace(state(), window_table=table, window=2)
    rows = SlotRows.allocate(2 * RUN, 2, torch.device("cpu"), window=2)
    read_slots(torch.tensor([1, 0], dtype=torch.int32), found, rows, RUN)
    assert rows.windows is not None
    assert rows.slot_mapping.tolist() == [30, 31, 0, 0, 23, 24, 25, 26]
    assert rows.windows.slot_mapping.tolist() == [18, 19, 0, 0, 35, 36, 37, 38]
    assert rows.windows.page_table.tolist() == [[4, 0], [4, 0], [0, 0], [0, 0], *([[8, 9]] * 4)]


def rows_of(slots: Tensor, found: SlotState) -> SlotRows:
    rows = SlotRows.allocate(len(slots) * RUN, 2, torch.device("cpu"))
    read_slots(slots, found, rows, RUN)
    return rows


def test_a_run_has_the_last_token_and_drafts_and_rows_without_a_page_are_scratch() -> None:
    found = state()
    rows = rows_of(torch.tensor([1, 0], dtype=torch.int32), found)
    assert rows.slots.tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert rows.token_ids[rows.slots != 2].tolist() == [40, 41, 30, 31, 32, 33]
    assert rows.positions.tolist() == [2, 3, 0, 0, 3, 4, 5, 6]
    assert rows.lengths.tolist() == [3, 4, 0, 0, 4, 5, 6, 7]
    assert rows.slot_mapping.tolist() == [30, 31, 0, 0, 23, 24, 25, 26]
    assert rows.output_index[rows.slots != 2].tolist() == [2, 3, 2, 3, 4, 5]
    assert found.lengths.tolist() == [4, 3, 0]


@pytest.mark.parametrize(
    ("sampled", "counts"),
    [
        ([[41, 42, 43, 44], [31, 32, 33, 34]], [2, 4]),  # slot 1 has no more room
        ([[49, 42, 43, 44], [31, 39, 33, 34]], [1, 2]),
        ([[41, 49, 43, 44], [39, 32, 33, 34]], [2, 1]),
    ],
)
def test_a_run_ends_after_the_first_token_that_was_not_drafted(
    sampled: list[list[int]], counts: list[int]
) -> None:
    found = state()
    rows = rows_of(torch.tensor([1, 0], dtype=torch.int32), found)
    lengths = torch.zeros(2, dtype=torch.int32)
    settle_runs(rows.slots.view(2, RUN), torch.tensor(sampled), found, lengths)
    assert lengths.tolist() == counts
    assert found.lengths.tolist() == [3 + counts[1], 2 + counts[0], 0]
    last = [run[count - 1] for run, count in zip(sampled, counts, strict=True)]
    assert found.last_tokens[:2].tolist() == last[::-1]


def test_a_row_past_the_longest_sequence_is_scratch() -> None:
    found = state()
    found.lengths[0] = 2 * PAGE_SIZE - 1
    rows = rows_of(torch.tensor([0], dtype=torch.int32), found)
    assert rows.slots.tolist() == [0, 2, 2, 2]
