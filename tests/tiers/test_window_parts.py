"""The parts of pages of windowed layers, which are as large as pages of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.host_copy_cases import cache_of, numbering_of

from minisgl.attention.state import PagedKV, StateBySlot
from minisgl.device.lanes import Lanes
from minisgl.kvcache.copies import Copies, Load
from minisgl.tiers.host import host_copies
from minisgl.tiers.host.host_copies import HostCopies

CPU = torch.device("cpu")
FIRST = 3  # snapshots follow two slots and the scratch slot


@pytest.mark.parametrize("head_dims", [(16,), (16, 16, 16), (5, 40), (1,)], ids=str)
@pytest.mark.parametrize("pages_per_piece", [1, 3, 100])
@pytest.mark.parametrize("more", [0, 2])  # parts, which other stages need
def test_windowed_pages_come_back_as_they_were_beside_pages_and_snapshots(
    head_dims: tuple[int, ...], pages_per_piece: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that end within a page; nothing else changes."""
    pages = cache_of(CPU)
    windowed = [
        PagedKV(*(torch.randn(7, 4, 2, head_dim) for _ in "kv"), windowed=True)
        for head_dim in head_dims
    ]
    state = torch.randn(FIRST + 2, 900)
    states = [*windowed[:1], *pages, StateBySlot((state,)), *windowed[1:]]
    page_bytes = sum(plane[0].nbytes for each in pages for plane in each.planes)
    each = more - (-sum(plane[0].nbytes for kv in windowed for plane in kv.planes) // page_bytes)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", pages_per_piece * page_bytes)
    numbering = numbering_of(states, FIRST)
    numbering = replace(numbering, window_parts=numbering.window_parts + more)
    copies = HostCopies(states, 64, numbering, Lanes(CPU))
    of_state = -(-state[0].nbytes // page_bytes)
    first = len(pages[0].k) + 2 * of_state

    def parts(page: int) -> range:
        return range(first + page * each, first + (page + 1) * each)

    snapshot = range(len(pages[0].k) + of_state, first)  # the second
    numbers = [1, *parts(5), *snapshot, 2, *parts(2)]
    host_pages = range(9, 9 + len(numbers))
    kept = [[tensor.clone() for tensor in kv.tensors] for kv in (*windowed, *pages)]
    kept_state = state.clone()
    copies.queue(Copies(offloads=tuple(zip(numbers, host_pages, strict=True))))()
    for tensor in (tensor for kv in windowed for tensor in kv.tensors):
        tensor[1:6] = -1
    state[FIRST + 1] = -1
    # The two come to each other's place.
    back = [1, *parts(2), *snapshot, 2, *parts(5)]
    copies.queue(Copies(loads=(Load(1, tuple(host_pages), tuple(back)),)))()
    copies.queue(Copies(awaits=(1,)))()
    assert torch.equal(state, kept_state)
    for kv, was in zip((*windowed, *pages), kept, strict=True):
        for tensor, before in zip(kv.tensors, was, strict=True):
            if kv.windowed:
                assert torch.equal(tensor[[0, 2, 5, 6]], before[[0, 5, 2, 6]])
                assert (tensor[[1, 3, 4]] == -1).all(), "another page has changed"
            else:
                assert torch.equal(tensor[1:], before[1:])
    copies.close()
