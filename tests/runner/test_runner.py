"""Captured steps that fail or exactly fill a shape, and closing a runner."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from numpy.typing import ArrayLike
from support.parity import case_of, check, complete, greedy, load_engine
from torch import Tensor

from minisgl.attention.base import Attention, DecodeBatch, LayerKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec
from minisgl.engine import AsyncEngine
from minisgl.errors import DeviceMemoryError
from minisgl.runner import graphs, load
from minisgl.runner.lanes import Lanes
from minisgl.runner.runner import ModelRunner
from minisgl.runner.sampler import Sampler
from minisgl.runner.step_inputs import SlotTables, StepShape
from minisgl.scheduler.plan import StepPlan

CPU = torch.device("cpu")


@pytest.mark.parametrize("overlap", [True, False])
def test_mixed_steps_that_exactly_fill_a_captured_shape_give_the_reference_tokens(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some plans have exactly a captured shape, yet a chunk that samples nothing."""
    for name, value in (("CHUNK_ROWS", (7,)), ("MAX_CHUNKS", 2), ("MIXED_BATCHES", (1, 2, 4))):
        monkeypatch.setattr(graphs, name, value)
    check(case_of("llama3"), padded=6, max_prefill_length=7, page_size=4, overlap=overlap)


class FailingLanes(Lanes):
    fails = False

    def upload(self, parts: Sequence[ArrayLike]) -> tuple[Tensor, ...]:
        if self.fails:
            raise torch.OutOfMemoryError("no room for the upload")
        return super().upload(parts)


def test_a_failed_update_leaves_no_rows_in_the_batch() -> None:
    """Padded steps would go on to compute them, and write into pages that are others' by then."""
    lanes = FailingLanes(CPU)
    tables = SlotTables(
        num_slots=4,
        max_pages=8,
        page_size=4,
        prompt_lengths=torch.zeros(5, dtype=torch.int64),
        lanes=lanes,
    )
    tables.update(StepPlan(1, (0, 1, 2, 3)))
    lanes.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        tables.update(StepPlan(2, (0, 1)))
    lanes.fails = False
    tables.update(StepPlan(3, (2,), epoch=1))
    assert tables._decode_slots.tolist() == [2, *[tables.scratch_slot] * 3]


def test_a_failed_capture_keeps_host_and_device_at_the_same_ring_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU every later step would be read from a row of the ring that it has not written."""
    original = ModelRunner._run

    def run(self: ModelRunner, shape: StepShape, *arguments: Any) -> Tensor:
        if shape == StepShape(2) and len(arguments) == 3:  # as it is captured
            raise torch.OutOfMemoryError("no room for a batch of 2")
        return original(self, shape, *arguments)

    monkeypatch.setattr(ModelRunner, "_run", run)
    loaded = load_engine(case_of("llama3").folder, padded=4)
    outputs = loaded.runner._outputs
    loaded.runner.close()
    assert outputs._ring.next_entry.item() == outputs.open()


def test_a_decode_step_without_a_graph_does_not_run_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queueing it takes milliseconds and, at the first of its kind, compiles kernels."""
    original = ModelRunner._run
    threads: set[threading.Thread] = set()

    def run(self: ModelRunner, shape: StepShape, *arguments: Any) -> Tensor:
        if len(arguments) == 4 and not arguments[3].chunks:  # eager, and decodes only
            threads.add(threading.current_thread())
        return original(self, shape, *arguments)

    async def main() -> None:
        # Without look-ahead the worker is idle whenever a step is launched.
        options: dict[str, Any] = {"padded": 1, "overlap": False}
        async with AsyncEngine(load_engine(case_of("llama3").folder, **options)) as engine:
            jobs = [complete(engine, [1, 2, first], greedy(4)) for first in (3, 4)]
            await asyncio.gather(*jobs)

    monkeypatch.setattr(ModelRunner, "_run", run)
    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_too_little_memory_for_graphs_is_an_error_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate(self: Sampler) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Sampler, "allocate_history", allocate)
    with pytest.raises(DeviceMemoryError, match="--cuda-graph-max-bs, which at 0 needs none"):
        load_engine(case_of("llama3").folder, padded=4)


def test_closing_the_runner_frees_its_memory() -> None:
    """Memory is freed without waiting for the garbage collector."""

    async def main() -> tuple[AsyncEngine, weakref.ref[Tensor]]:
        loaded = load_engine(case_of("llama3").folder, padded=2)
        cache = weakref.ref(loaded.runner._kv[0].k)
        engine = AsyncEngine(loaded)
        del loaded
        await complete(engine, [1, 2, 3], greedy(4))
        await engine.close()
        return engine, cache

    engine, cache = asyncio.run(main())
    assert cache() is None
    assert engine.stats().num_running == 0


def test_a_backend_is_asked_to_allocate_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """trtllm makes its workspace then; the largest steps, tried first, decode nothing."""

    class Planning(TorchAttention):
        planned = False

        def plan_decode(self, rows: DecodeBatch) -> None:
            self.planned = True

        def plan_prefill(self, rows: object) -> None:
            pass

        def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
            assert self.planned
            return super().decode(q, kv, rows, spec)

    def make(*_: object) -> Attention:
        backend = Planning()
        return Attention(backend, backend)

    monkeypatch.setattr(load, "make_attention", make)
    load_engine(case_of("llama3").folder, padded=1).runner.close()
