"""Captured steps that fail or exactly fill a shape, and closing a runner."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from numpy.typing import ArrayLike
from support.parity import case_of, check, complete, greedy, load_engine
from torch import Tensor

from minisgl.attention.base import Attention, AttentionCall, DecodeBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.device.lanes import Lanes
from minisgl.engine import AsyncEngine
from minisgl.errors import CaptureError, DeviceMemoryError, StepError
from minisgl.matcher import MaskRows
from minisgl.parts.masks.host import MaskPlan
from minisgl.request import SamplingParams
from minisgl.runner import graphs, load
from minisgl.runner.capture import Capture
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import GraphKey, mixed_shape
from minisgl.runner.row_order import RowOrder
from minisgl.runner.runner import ModelRunner
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan

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
        order=RowOrder(4),
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
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=0).runner
    outputs = runner._computation.outputs

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for a batch of 2")

    monkeypatch.setattr(Computation, "sample", fail)
    runner.capture([GraphKey(StepShape(2))], lambda done: None)
    assert runner.capacity.max_graph_batch == 0
    runner.close()
    assert outputs._ring.next_entry.item() == outputs.open()


class Pools:
    """Stands for torch's pools of graphs, which end with the last of their graphs. Some captures
    fail, by their numbers."""

    def __init__(self, *failing: int) -> None:
        self.used: list[int] = []  # the pool of each capture
        self._failing = failing
        self._num_pools = 0
        self._graphs: dict[int, weakref.WeakSet[Callable[[], None]]] = {}

    def graph_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools

    def capture(self, work: Callable[[], None], pool: int) -> Callable[[], None]:
        graphs = self._graphs.get(pool)
        assert graphs is None or graphs, "the pool has ended with its graphs"

        def graph() -> None:
            work()

        self._graphs.setdefault(pool, weakref.WeakSet()).add(graph)
        self.used.append(pool)
        if len(self.used) - 1 in self._failing:
            raise RuntimeError("operation not permitted when\nstream is capturing")
        return graph


def with_pools(monkeypatch: pytest.MonkeyPatch, pools: Pools) -> ModelRunner:
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=0).runner
    monkeypatch.setattr(Lanes, "graph_pool", lambda self: pools.graph_pool())
    monkeypatch.setattr(Lanes, "capture", lambda self, work, pool: pools.capture(work, pool))
    return runner


def test_a_pool_that_ended_with_a_failed_graph_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A masked step is three graphs: of its forward pass, and of two variants of sampling."""
    pools = Pools(0, 2, 7)
    runner = with_pools(monkeypatch, pools)
    keys = [GraphKey(StepShape(size), masked=True) for size in (5, 4, 3, 2, 1)]
    runner.capture(keys, lambda done: None)
    # At once; after its forward pass; whole; after its forward pass, beside others; whole.
    assert pools.used == [1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert [step.key for step in runner._graphs.steps] == [keys[2], keys[4]]
    said = "runs without a graph: RuntimeError: operation not permitted when stream is capturing"
    assert caplog.text.count(said) == 3
    runner.capture(keys[:1], lambda done: None)
    assert set(pools.used[11:]) == {3}
    runner.capture((), lambda done: None)
    runner.capture(keys[:1], lambda done: None)
    assert set(pools.used[14:]) == {4}
    runner.close()


def test_a_step_that_cannot_be_captured_ends_the_start_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = with_pools(monkeypatch, Pools(0))
    with pytest.raises(CaptureError) as raised:
        runner.capture([GraphKey(StepShape(1))], lambda done: None)
    message = str(raised.value)
    assert "stream is capturing" in message and "--cuda-graph-max-bs 0" in message
    assert "\n" not in message
    runner.close()


def test_a_decode_step_without_a_graph_does_not_run_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queueing it takes milliseconds and, at the first of its kind, compiles kernels."""
    original = Computation.forward
    threads: set[threading.Thread] = set()

    def forward(self: Computation, shape: StepShape, *arguments: Any) -> tuple[Tensor, SampleRows]:
        if len(arguments) == 3 and not shape.num_chunks:  # eager, and decodes only
            threads.add(threading.current_thread())
        return original(self, shape, *arguments)

    async def main() -> None:
        # Without look-ahead the worker is idle whenever a step is launched.
        options: dict[str, Any] = {"padded": 1, "overlap": False}
        async with AsyncEngine(load_engine(case_of("llama3").folder, **options)) as engine:
            jobs = [complete(engine, [1, 2, first], greedy(4)) for first in (3, 4)]
            await asyncio.gather(*jobs)

    monkeypatch.setattr(Computation, "forward", forward)
    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_too_little_memory_for_graphs_is_an_error_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def extend(self: Capture, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Capture, "extend", extend)
    with pytest.raises(DeviceMemoryError, match="--cuda-graph-max-bs, which at 0 needs none"):
        load_engine(case_of("llama3").folder, padded=4)


def test_closing_the_runner_frees_its_memory() -> None:
    """Memory is freed without waiting for the garbage collector."""

    async def main() -> tuple[AsyncEngine, weakref.ref[Tensor]]:
        loaded = load_engine(case_of("llama3").folder, padded=2)
        cache = weakref.ref(loaded.runner._computation.states[0].k)
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

        def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
            assert self.planned
            return super().decode(call, batch)

    def make(*_: object) -> Attention:
        backend = Planning()
        return Attention(backend, backend)

    monkeypatch.setattr(load, "make_attention", make)
    load_engine(case_of("llama3").folder, padded=1).runner.close()


def masked_prompt(step: int, slot: int, epoch: int = 0) -> StepPlan:
    join = SlotJoin(slot, SamplingParams(), 7, frozenset(), (1, 2, 3), (), masked=True)
    return StepPlan(
        step,
        (),
        chunks=(Chunk(slot, 0, (1, 2, 3), samples=True),),
        joins=(join,),
        grants=(PageGrant(slot, 0, (slot + 1,)),),
        epoch=epoch,
        parts=(MaskPlan((slot,)),),
    )


def only(runner: ModelRunner, plan: StepPlan, token_id: int) -> MaskRows:
    masks = runner.new_masks(plan.step, 1)
    masks.fill(0)
    masks[:, token_id // 32] = 1 << token_id % 32
    return masks


@pytest.mark.parametrize("padded", [0, 2])
def test_a_deferred_plan_is_sampled_later_or_forgotten(padded: int) -> None:
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=padded).runner
    prompt = masked_prompt(1, slot=0)
    first = runner.launch(prompt, only(runner, prompt, 9))
    blind = StepPlan(2, (0,), longest_decode=4, parts=(MaskPlan((0,)),), deferred=True)
    second = runner.launch(blind)
    assert runner.collect(first).token_ids == [9]
    assert not second.queued.done()
    runner.sample(second, only(runner, blind, 40))
    assert runner.collect(second).token_ids == [40]
    runner.launch(StepPlan(3, (0,), longest_decode=5, parts=(MaskPlan((0,)),), deferred=True))
    other = masked_prompt(4, slot=1, epoch=1)
    assert runner.collect(runner.launch(other, only(runner, other, 11))).token_ids == [11]
    runner.close()


def test_a_step_without_chunks_replays_none_of_an_earlier_step() -> None:
    """Where memory is short, only a step with room for chunks may have been captured."""
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=0).runner
    runner.capture([GraphKey(mixed_shape(2, 8), masked=True)], lambda done: None)
    prompt = masked_prompt(1, slot=0)
    decode = StepPlan(2, (0,), longest_decode=4, parts=(MaskPlan((0,)),))
    for plan in (prompt, decode):
        result = runner.collect(runner.launch(plan, only(runner, plan, 9)))
        assert result.captured and result.token_ids == [9]
    tables = runner._computation.tables
    assert tables.state.lengths[0] == 4 and not tables.counts_lengths
    runner.close()


def test_steps_that_are_captured_again_compute_no_row_from_before() -> None:
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=2).runner
    prompt = masked_prompt(1, slot=0)
    decode = StepPlan(2, (0,), longest_decode=4, parts=(MaskPlan((0,)),))
    keys = [step.key for step in runner._graphs.steps]
    for plan in (prompt, decode):
        assert runner.collect(runner.launch(plan, only(runner, plan, 9))).captured
    runner.capture((), lambda done: None)
    assert runner.capacity.max_graph_batch == 0
    runner.capture(keys, lambda done: None)
    assert runner._computation.tables.state.lengths[0] == 4
    again = masked_prompt(3, slot=0)
    result = runner.collect(runner.launch(again, only(runner, again, 11)))
    assert result.captured and result.token_ids == [11]
    runner.close()


@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("half", ["_forward", "_queue_end"])
def test_a_failed_half_of_a_step_is_raised_by_collect_and_later_steps_run(
    half: str, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: ModelRunner = load_engine(case_of("llama3").folder, padded=padded).runner
    prompt = masked_prompt(1, slot=0)
    runner.collect(runner.launch(prompt, only(runner, prompt, 9)))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    blind = StepPlan(2, (0,), longest_decode=4, parts=(MaskPlan((0,)),), deferred=True)
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, half, fail)
        handle = runner.launch(blind)
        runner.sample(handle, only(runner, blind, 9))
        with pytest.raises(StepError, match="ran out of device memory"):
            runner.collect(handle)
    late = masked_prompt(3, slot=1)
    with pytest.raises(StepError, match="launched after one that failed"):
        runner.collect(runner.launch(late, only(runner, late, 5)))
    again = masked_prompt(4, slot=1, epoch=1)
    assert runner.collect(runner.launch(again, only(runner, again, 11))).token_ids == [11]
    runner.close()
