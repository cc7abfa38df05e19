"""Drafts from n-grams, by hand."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.slots.ngrams import MOST_MATCH, draft_ngrams
from minisgl.kernels.slots.slot_state import SlotState

WIDTH, PROMPT = 64, 2


def state_of(lengths: list[int], num_drafts: int = 3) -> SlotState:
    """The last slot is scratch; others have a prompt of two tokens."""
    zeros = torch.zeros(len(lengths), dtype=torch.int32)
    return SlotState(
        page_table=zeros[:, None],
        lengths=torch.tensor(lengths, dtype=torch.int32),
        last_tokens=zeros,
        drafts=torch.full((len(lengths), num_drafts), 99, dtype=torch.int32),
        takes_drafts=zeros + 1,
        prompt_lengths=torch.tensor([PROMPT] * (len(lengths) - 1) + [0]),
        page_size=16,
    )


def drafts(tokens: list[int], num_drafts: int = 3) -> list[int]:
    """What is drafted after these tokens, of which the last has just been sampled."""
    history = torch.full((2, WIDTH), -7, dtype=torch.int32)
    history[0, : len(tokens) - 1] = torch.tensor(tokens[:-1])
    history[0, len(tokens) - 1 :] = tokens[-1]  # of an earlier request; nobody may read it
    state = state_of([len(tokens) - 1, 0], num_drafts)
    index = torch.tensor([len(tokens) - 1 - PROMPT])
    slot, token = torch.tensor([0]), torch.tensor([tokens[-1]])
    draft_ngrams(history, state, slot, index, token, num_decode_rows=0, run=1)
    found: list[int] = state.drafts[0].tolist()
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 2], [-1, -1, -1]),  # one token is no match
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),  # the longer match, by a 9 before it
        ([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], [4, 7, 1]),  # of equal ones the last
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], [3, 6, 1]),  # the longer, though it is not the last
        ([8, 3, 3, 3], [3, 3, 3]),  # a repetition goes on
        ([8, 1, 2, 1, 2], [1, 2, 1]),
        ([1, 2], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
    ids=str,
)
def test_drafts_continue_the_best_match(tokens: list[int], expected: list[int]) -> None:
    assert drafts(tokens) == expected


def test_matches_are_compared_up_to_a_length() -> None:
    """Both places agree in at least that many tokens, so that the last one counts."""
    shared = list(range(10, 10 + MOST_MATCH))
    assert drafts([1, *shared, 2, *shared, 3, 1, *shared], 1) == [3]


def test_the_tokens_of_a_run_are_added_where_they_belong() -> None:
    """Slot 0 has accepted two of four rows, slot 1 samples its first token; the rest is scratch."""
    history = torch.zeros((3, WIDTH), dtype=torch.int32)
    history[0, :4] = torch.tensor([1, 2, 3, 1])
    history[1, :3] = torch.tensor([6, 7, 6])
    state = state_of([5, 3, 0])
    slots = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 1])
    index = torch.tensor([4, 5, 6, 1, 1, 1, 1, 1, 3]) - PROMPT
    tokens = torch.tensor([2, 3, 8, 55, 55, 55, 55, 55, 7])
    draft_ngrams(history, state, slots, index, tokens, num_decode_rows=8, run=4)
    assert history[0, :6].tolist() == [1, 2, 3, 1, 2, 3]
    assert history[1, :4].tolist() == [6, 7, 6, 7]
    assert state.drafts[:2].tolist() == [[1, 2, 3], [6, 7, 6]]
