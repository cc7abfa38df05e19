"""A settled step whose slots have long histories of few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.slots.slot_state import SlotState

NUM_SLOTS, NUM_DRAFTS = 12, 3


def settled_step(
    run: int, num_singles: int, longest: int, device: torch.device
) -> tuple[Tensor, SlotState, Tensor, Tensor, Tensor, int, int]:
    """The arguments of draft_ngrams for five runs and `num_singles` single rows: some accepted in
    part, some of the scratch slot. The same on each device."""
    random = torch.Generator().manual_seed(longest)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    history = numbers(0, 7, NUM_SLOTS + 1, longest + 20).int()
    history[1] = 3  # a repetition
    history[2] = torch.arange(longest + 20)  # no repetition
    lengths = numbers(1, longest, NUM_SLOTS + 1).int()
    lengths[0], lengths[1], lengths[-1] = 1, longest, 0
    prompt_lengths = numbers(0, 2, NUM_SLOTS + 1)
    state = SlotState(
        page_table=torch.zeros((NUM_SLOTS + 1, 1), dtype=torch.int32, device=device),
        lengths=lengths.to(device),
        last_tokens=torch.zeros_like(lengths).to(device),
        drafts=torch.full((NUM_SLOTS + 1, NUM_DRAFTS), 9, dtype=torch.int32, device=device),
        takes_drafts=torch.ones_like(lengths).to(device),
        prompt_lengths=prompt_lengths.to(device),
        page_size=16,
    )
    slots: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    for slot in (0, 1, 2, 5, NUM_SLOTS):
        count = int(numbers(1, run + 1, 1))
        for place in range(run):  # the last of those that count is at the slot's length
            is_row = slot != NUM_SLOTS and place < count + 1
            slots.append(slot if is_row else NUM_SLOTS)
            position = max(1, int(lengths[slot]) - count + 1) + place
            positions.append(position if is_row else 0)
            tokens.append(int(history[slot, position]))
    for slot in (7, 8, NUM_SLOTS)[:num_singles]:
        slots.append(slot)
        positions.append(int(lengths[slot]))
        tokens.append(int(numbers(0, 7, 1)))
    rows = torch.tensor(slots)
    output_index = torch.tensor(positions) - prompt_lengths[rows]
    on_device = (each.to(device) for each in (rows, output_index, torch.tensor(tokens)))
    return history.to(device), state, *on_device, 5 * run, run  # type: ignore[return-value]
