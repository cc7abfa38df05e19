"""The parts of snapshots, which are as large as pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.host_copy_cases import cache_of, numbering_of

from minisgl.attention.state import StateBySlot
from minisgl.device.lanes import Lanes
from minisgl.kvcache.copies import Copies, Load
from minisgl.tiers.host import host_copies
from minisgl.tiers.host.host_copies import HostCopies

CPU = torch.device("cpu")
FIRST = 3  # snapshots follow two slots and the scratch slot


@pytest.mark.parametrize("sizes", [(5, 7), (700, 1), (400, 3000)], ids=str)
@pytest.mark.parametrize("pages_per_piece", [1, 3])
@pytest.mark.parametrize("more", [0, 2])  # parts, which other stages need
def test_snapshots_and_pages_come_back_as_they_were(
    sizes: tuple[int, int], pages_per_piece: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts that end within a layer, in pieces that end within a snapshot; nothing else
    changes."""
    pages = cache_of(CPU)
    num_pages = len(pages[0].planes[0])
    tensors = tuple(torch.randn(FIRST + 4, size) for size in sizes)
    states = [*pages, *(StateBySlot((tensor,)) for tensor in tensors)]
    kept = [tensor.clone() for state in states for tensor in state.tensors]
    page_bytes = sum(plane[0].nbytes for state in pages for plane in state.planes)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", pages_per_piece * page_bytes)
    numbering = numbering_of(states, FIRST)
    numbering = replace(numbering, state_parts=numbering.state_parts + more)
    copies = HostCopies(states, 64, numbering, Lanes(CPU))
    each = more - (-sum(sizes) * 4 // page_bytes)
    parts = [range(num_pages + at * each, num_pages + (at + 1) * each) for at in (2, 0)]
    numbers = [1, *parts[0], 2, *parts[1]]
    host_pages = range(40, 40 + len(numbers))
    copies.queue(Copies(offloads=tuple(zip(numbers, host_pages, strict=True))))()
    for tensor in tensors:
        tensor[FIRST : FIRST + 3] = -1
    # The two come to each other's place.
    back = [1, *parts[1], 2, *parts[0]]
    copies.queue(Copies(loads=(Load(1, tuple(host_pages), tuple(back)),)))()
    copies.queue(Copies(awaits=(1,)))()
    of_states = kept[-2:]
    for tensor, was in zip(tensors, of_states, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 6]], was[[0, 1, 2, 6]]), "another state has changed"
        assert torch.equal(tensor[FIRST], was[FIRST + 2])
        assert torch.equal(tensor[FIRST + 2], was[FIRST])
        assert (tensor[FIRST + 1] == -1).all()
    for now, was in zip([each for state in pages for each in state.tensors], kept, strict=False):
        assert torch.equal(now[1:], was[1:])
    copies.close()
