"""The kernels before and after the model against their references: on a GPU if there is one, or
else in the interpreter."""

from __future__ import annotations

import os
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots import slot_kernels, slot_updates
from minisgl.kernels.slots.slot_state import OutputRing, SlotRows, SlotState

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
NUM_SLOTS, MAX_PAGES, MAX_RUN = 300, 600, 6


def state_on(device: torch.device, page_size: int, window: int = 0) -> SlotState:
    """The same on each device. Rows of no page, of one, of a part of one, and of hundreds. window:
    of layers with pages of their own; 0: none have."""
    random = torch.Generator().manual_seed(page_size)
    table = torch.randint(1, 10_000, (NUM_SLOTS + 1, MAX_PAGES), generator=random).int()
    lengths = torch.randint(0, MAX_PAGES * page_size - 1, (NUM_SLOTS + 1,), generator=random).int()
    lengths[:4] = torch.tensor([0, max(1, 2 * page_size - 4), page_size - 1, page_size])
    table[-1], lengths[-1] = 0, 0  # scratch
    tokens = torch.randint(0, 1000, (NUM_SLOTS + 1,), generator=random).int()
    numbers = torch.randint(0, 50, (NUM_SLOTS + 1, 3), generator=random).to(device)
    drafts = torch.randint(0, 1000, (NUM_SLOTS + 1, MAX_RUN - 1), generator=random).int()
    drafts[torch.rand(drafts.shape, generator=random) < 0.1] = -1
    table[:4, max(2, 4 // page_size) :] = 0  # so that runs of some end with their pages
    return SlotState(
        page_table=table.to(device),
        lengths=lengths.to(device),
        last_tokens=tokens.to(device),
        drafts=drafts.to(device),
        takes_drafts=(tokens % 5 > 0).int().to(device),
        prompt_lengths=numbers[:, 1],
        page_size=page_size,
        window_table=(table * 3 + 1 - (table == 0).int()).to(device) if window else None,
        window=window,
    )


def used(rows: SlotRows, page_size: int, window: int = 0) -> list[Tensor]:
    """All that is defined, on the host."""
    lengths = rows.lengths.cpu()
    columns = torch.arange(rows.page_table.shape[1])
    past = columns >= (-(-lengths // page_size))[:, None]
    behind = columns < ((lengths - window).clamp(min=0) // page_size)[:, None]
    found = [rows.page_table.cpu().masked_fill(past, -1)]
    if rows.windows is not None:
        mapping, table = rows.windows
        found += [table.cpu().masked_fill(past | behind, -1), mapping.cpu()]
    others = (rows.slots, rows.token_ids, rows.positions, rows.slot_mapping, rows.output_index)
    return [*found, lengths, *(each.cpu() for each in others)]


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("run", [1, 2, 6])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_are_made_of_their_slots_which_advance(page_size: int, run: int, window: int) -> None:
    found_state, state = (state_on(device, page_size, window) for device in (DEVICE, CPU))
    slots = torch.tensor([3, NUM_SLOTS, 0, 1, 250, NUM_SLOTS, 2], dtype=torch.int32)
    for _ in range(2):
        found_rows, rows = (
            SlotRows.allocate(9 * run, MAX_PAGES + 3, device, window).part(
                slice(len(slots) * run), MAX_PAGES
            )
            for device in (DEVICE, CPU)
        )
        slot_kernels.read_slots(slots.to(DEVICE), found_state, found_rows, run)
        slot_updates.read_slots(slots, state, rows, run)
        found, wanted = (used(each, page_size, window) for each in (found_rows, rows))
        assert len(found) == (9 if window else 7)
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(found_state.lengths.cpu(), state.lengths)


@pytest.mark.parametrize("num_top", [None, 0, 3])
@pytest.mark.parametrize("num_rows", [1, 299])
def test_tokens_and_scores_go_to_their_slots_and_around_the_ring(
    num_rows: int, num_top: int | None
) -> None:
    found_state, state = (state_on(device, 16) for device in (DEVICE, CPU))
    found_ring, ring = (OutputRing.allocate(3, 300, 5, device) for device in (DEVICE, CPU))
    for step in range(4):
        slots, tokens = torch.randperm(NUM_SLOTS)[:num_rows], torch.randint(0, 1000, (num_rows,))
        args = (slots, tokens, some_scores(num_rows, num_top))
        slot_kernels.feed_slots(*(on_device(each) for each in args), found_state, found_ring)
        slot_updates.feed_slots(*args, state, ring, ring_entry=step % 3)
        assert torch.equal(found_state.last_tokens.cpu(), state.last_tokens)
        for found, wanted in zip(astuple(found_ring), astuple(ring), strict=True):
            assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("run", [2, 6])
def test_the_same_runs_count(run: int) -> None:
    found_state, state = (state_on(device, 16) for device in (DEVICE, CPU))
    found_ring, ring = (OutputRing.allocate(3, 60, 0, device) for device in (DEVICE, CPU))
    random = torch.Generator().manual_seed(run)
    slots = [*torch.randperm(NUM_SLOTS, generator=random)[:8].tolist(), NUM_SLOTS]
    rows = SlotRows.allocate(len(slots) * run, MAX_PAGES, CPU)
    slot_updates.read_slots(torch.tensor(slots, dtype=torch.int32), state, rows, run)
    found_state.lengths.copy_(state.lengths)
    of_runs = rows.slots.view(-1, run)
    sampled = torch.randint(0, 1000, of_runs.shape, generator=random)
    is_right = torch.rand((len(slots), run - 1), generator=random) < 0.8
    sampled[:, :-1] = sampled[:, :-1].where(~is_right, state.drafts[slots, : run - 1].long())
    slot_updates.feed_slots(rows.slots, sampled.flatten(), None, state, ring, 0)
    slot_updates.settle_runs(of_runs, sampled, state, ring, 0)
    found_ring.next_entry.fill_(1)
    slot_kernels.settle_runs(of_runs.to(DEVICE), sampled.to(DEVICE), found_state, found_ring)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for name in ("run_lengths", "num_drafted"):
        found, wanted = (getattr(each, name)[0, : len(slots)].cpu() for each in (found_ring, ring))
        assert torch.equal(found, wanted) and wanted.max() > 0
    assert torch.equal(found_state.lengths.cpu(), state.lengths)
    assert torch.equal(found_state.last_tokens[slots[:-1]].cpu(), state.last_tokens[slots[:-1]])


def some_scores(num_rows: int, num_top: int | None) -> TokenScores | None:
    if num_top is None:
        return None
    ids = torch.randint(0, 1000, (num_rows, num_top))
    ranks = torch.randint(1, 1000, (num_rows,))
    return TokenScores(torch.randn(num_rows), ranks, ids, torch.randn(num_rows, num_top))


def on_device(value: Tensor | TokenScores | None) -> Tensor | TokenScores | None:
    if isinstance(value, TokenScores):
        return TokenScores(*(each.to(DEVICE) for each in astuple(value)))
    return value if value is None else value.to(DEVICE)
