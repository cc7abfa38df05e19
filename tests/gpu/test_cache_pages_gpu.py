"""Pages on a GPU: the kernel, and the lanes that carry them to host memory and back."""

from __future__ import annotations

import asyncio

import pytest
import torch

pytest.importorskip("triton")

from support.host_copy_cases import check_copies
from support.page_cases import CASES, check_round_trip, planes_of
from support.parity import FEW_PAGES, batch, case_of, count_excused, greedy, load_engine

from minisgl.device.copy_lanes import copy_lane
from minisgl.engine import AsyncEngine
from minisgl.tiers.host import host_copies, slabs

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("case", [*CASES, (torch.bfloat16, 16, (8,) * 32)], ids=str)
def test_the_kernel_moves_pages_bit_by_bit(case: tuple[torch.dtype, int, tuple[int, ...]]) -> None:
    check_round_trip(DEVICE, planes_of(*case))


@pytest.mark.parametrize("pages_per_piece", [1, 5, 100])
def test_pages_travel_to_pinned_memory_and_back_in_the_order_of_plans(
    pages_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", pages_per_piece * 3072)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1 << 16)
    cache = check_copies(DEVICE, copy_lane)
    assert all(run.is_pinned() for _, run in cache.slabs.runs([0, 29]))
    assert cache.measure(1.0).load_s > 0
    cache.close()


@pytest.mark.parametrize("pp", range(1, min(2, torch.cuda.device_count()) + 1))
def test_loaded_prefixes_give_the_tokens_of_computed_ones(pp: int) -> None:
    """Captured steps, look-ahead and all; in float32, so that chunks change no token."""
    case = case_of("llama3")

    async def run() -> None:
        options = {**FEW_PAGES, "device": "cuda", "pp": pp}
        loaded = load_engine(case.folder, **options, host_cache=0.01)
        async with AsyncEngine(loaded) as engine:
            loaded_before = 0
            for _ in range(2):  # the KV cache is at other addresses after a sleep
                for _ in range(3):
                    outputs = await batch(engine, case.prompts, [greedy()] * len(case.prompts))
                    await count_excused(engine, case, outputs)
                num_loaded = engine.stats().counters.num_host_tokens
                assert num_loaded > loaded_before
                loaded_before = num_loaded
                await engine.weights.sleep()
                await engine.weights.wake()

    asyncio.run(run())
