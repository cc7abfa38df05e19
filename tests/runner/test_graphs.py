"""The captured shape that a plan runs as, and the state that padding must not touch."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from support.resolving import GPU, resolved

from minisgl.config import ResolvedConfig
from minisgl.device.lanes import Lanes
from minisgl.parts.masks.host import MaskPlan
from minisgl.parts.scores.host import ScoredChunk, ScorePlan
from minisgl.runner.graphs import (
    CHUNK_ROWS,
    MAX_CHUNKS,
    CapturedStep,
    StepGraphs,
    graph_keys,
    mixed_shape,
)
from minisgl.runner.row_order import RowOrder
from minisgl.runner.sampled_rows import SampledRows, SampleRows
from minisgl.runner.sampling_features import SamplingVariant
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_outputs import RING_SIZE, StepOutputs
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import Chunk, PageGrant, StepPlan

CPU = torch.device("cpu")


def config_of(max_batch: int, max_chunk_rows: int = 8192, num_drafts: int = 0) -> ResolvedConfig:
    return replace(
        resolved(machine=GPU, max_running_requests=512),
        cuda_graph_max_bs=max_batch,
        max_prefill_length=max_chunk_rows,
        num_drafts=num_drafts,
    )


def graphs(*sizes: int, num_drafts: int = 0) -> StepGraphs:
    def nothing() -> None:
        pass

    steps = [
        CapturedStep(key, torch.empty(0) if key.shape.num_chunks else None, nothing, {})
        for key in graph_keys(config_of(*sizes, num_drafts=num_drafts))
    ]
    return StepGraphs(steps)


def decode_plan(num_rows: int) -> StepPlan:
    return StepPlan(1, tuple(range(num_rows)))


def mixed_plan(num_rows: int, *lengths: int, scored: bool = False) -> StepPlan:
    chunks = tuple(Chunk(num_rows + i, 0, [1] * length, True) for i, length in enumerate(lengths))
    parts = (ScorePlan((ScoredChunk(0, [1], 0),)),) if scored else ()
    return StepPlan(1, tuple(range(num_rows)), chunks=chunks, parts=parts)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7, 8, 33, 256, 300, 512])
def test_every_batch_up_to_the_largest_has_a_graph(max_batch: int) -> None:
    captured = graphs(max_batch)
    assert captured.max_batch == max_batch
    for variant in (SamplingVariant.FILTERED, SamplingVariant.FULL):
        for num_rows in range(1, max_batch + 1):
            step = captured.find(decode_plan(num_rows), variant)
            assert step is not None and step.key.variant is variant and step.chunks is None
            size = step.key.shape.num_decodes
            assert num_rows <= size
            # Padding costs less than half as much again, in the filtered variant a quarter.
            room = max(num_rows + 7, num_rows * 1.25)
            assert size < 2 * num_rows if variant is SamplingVariant.FULL else size <= room
        assert captured.find(decode_plan(max_batch + 1), variant) is None


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_largest_graphs_are_captured_first(num_drafts: int) -> None:
    keys = graph_keys(config_of(256, num_drafts=num_drafts))
    rows = [key.shape.num_rows for key in keys]
    assert rows == sorted(rows, reverse=True)
    assert len(set(keys)) == len(rows)
    assert graph_keys(config_of(0, num_drafts=num_drafts)) == []


def test_a_step_with_runs_has_a_graph_of_its_own_as_long_as_it_has_few_rows() -> None:
    captured = graphs(256, num_drafts=3)
    plain = graphs(256)
    for plan in (decode_plan(3), decode_plan(128), mixed_plan(3, 100), mixed_plan(100, 400)):
        for variant in (SamplingVariant.FILTERED, SamplingVariant.FULL):
            for masked in ((), (0,)):
                one = replace(plan, parts=(MaskPlan(masked),) if masked else ())
                single, alone = captured.find(one, variant), plain.find(one, variant)
                assert (single and single.key) == (alone and alone.key)
                step = captured.find(replace(one, max_run=4), variant)
                assert (step is None) == (single is None)
                assert step is None or step.key.shape.run == 4
    assert captured.find(replace(decode_plan(129), max_run=4), SamplingVariant.FILTERED) is None
    assert captured.find(replace(decode_plan(1), max_run=3), SamplingVariant.FILTERED) is None
    assert captured.max_batch == 256


def test_a_mixed_step_uses_the_smallest_captured_shape_that_fits() -> None:
    captured = graphs(256)

    def shape(
        plan: StepPlan, variant: SamplingVariant = SamplingVariant.FILTERED
    ) -> StepShape | None:
        step = captured.find(plan, variant)
        return None if step is None else step.key.shape

    assert shape(mixed_plan(0, 5)) == mixed_shape(8, 128)
    assert shape(mixed_plan(8, 60, 4)) == mixed_shape(8, 128)
    assert shape(mixed_plan(9, 120, 9)) == mixed_shape(32, 256)
    assert shape(mixed_plan(32, 400)) == mixed_shape(32, 512)
    assert shape(mixed_plan(200, 400)) == mixed_shape(256, 512)
    assert shape(mixed_plan(3, CHUNK_ROWS[-1] + 1)) is None
    assert shape(mixed_plan(3, *[1] * (MAX_CHUNKS + 1))) is None
    assert shape(mixed_plan(3, 10), SamplingVariant.FULL) is None
    assert shape(mixed_plan(3, 10, scored=True)) is None


def test_masked_steps_have_few_shapes_and_every_variant() -> None:
    captured = graphs(256)

    def shape(plan: StepPlan) -> StepShape | None:
        masked = replace(plan, parts=(MaskPlan((0,)), *plan.parts))
        step = captured.find(masked, SamplingVariant.FULL)
        assert step is None or step.key.masked
        return None if step is None else step.key.shape

    for num_rows in range(1, 257):
        found = shape(decode_plan(num_rows))
        assert found is not None and not found.num_chunks
        assert num_rows <= found.num_decodes < max(2 * num_rows, 2)
    assert shape(decode_plan(100)) == StepShape(128)
    assert shape(decode_plan(97)) == StepShape(128) and shape(decode_plan(96)) == StepShape(96)
    assert shape(mixed_plan(3, 100)) == mixed_shape(32, 128)
    assert shape(mixed_plan(33, 200)) == mixed_shape(256, 512)
    assert shape(mixed_plan(3, 100, scored=True)) is None
    assert shape(mixed_plan(3, 600)) is None
    assert not any(
        step.key.masked
        for step in [captured.find(decode_plan(9), variant) for variant in SamplingVariant]
        if step is not None
    )
    # They do not make start-up noticeably longer.
    assert sum(step.key.masked for step in captured.steps) * 2 < len(captured.steps)


def make_tables() -> SlotTables:
    return SlotTables(
        order=RowOrder(4),
        max_pages=8,
        page_size=4,
        prompt_lengths=torch.tensor([0, 5, 3, 0, 0]),
        lanes=Lanes(CPU),
    )


def test_padding_writes_only_to_the_scratch_slot() -> None:
    padded, exact = make_tables(), make_tables()
    join = StepPlan(
        1,
        (),
        chunks=(Chunk(1, 0, [10, 11, 12, 13, 14], True), Chunk(2, 0, [20, 21], False)),
        grants=(PageGrant(1, 0, (3, 4)), PageGrant(2, 0, (5,))),
    )
    mixed = StepPlan(2, (1,), longest_decode=6, chunks=(Chunk(2, 2, [22], True),), grants=())
    for plan, room in ((join, StepShape(2, 9, 3, 3)), (mixed, StepShape(3, 4, 2, 2))):
        for tables, shape in ((padded, room), (exact, StepShape.of(plan))):
            tables.update(plan)
            packed = tables.upload_chunks(plan, shape)
            inputs, samples = tables.inputs(None if tables is padded else plan, shape, packed)
            tables.state.last_tokens[samples.slots] = 90 + samples.slots.int()
            if tables is exact:
                expected, expected_samples = inputs, samples
            else:
                got, got_samples = inputs, samples
        decodes, rows = len(plan.decode_slots), sum(len(c.token_ids) for c in plan.chunks)
        for name in ("token_ids", "rows.slots", "rows.positions", "own.rope", "slot_mapping"):
            ours, theirs = attrgetter(name)(got), attrgetter(name)(expected)
            assert torch.equal(ours[:decodes], theirs[:decodes])
            behind = slice(room.num_decodes, room.num_decodes + rows)
            assert torch.equal(ours[behind], theirs[decodes:])
            others = torch.cat((ours[decodes : room.num_decodes], ours[behind.stop :]))
            filler = padded.scratch_slot if name == "rows.slots" else 0
            assert name == "token_ids" or (others == filler).all()
        assert got.decodes.lengths.tolist()[decodes:] == [0] * (room.num_decodes - decodes)
        assert got.chunks.row_starts.tolist()[-1] == rows
        chosen = [
            *range(decodes),
            *range(room.num_decodes, room.num_decodes + plan.num_chunk_samples),
        ]
        assert got_samples.slots[chosen].tolist() == expected_samples.slots.tolist()
        index = got_samples.output_index[chosen].tolist()
        assert index == expected_samples.output_index.tolist()
        for ours, theirs in (
            (padded.state.lengths, exact.state.lengths),
            (padded.state.page_table, exact.state.page_table),
            (padded.state.last_tokens[:4], exact.state.last_tokens[:4]),
        ):
            assert torch.equal(ours, theirs)
        assert padded.state.lengths[padded.scratch_slot] == 0


def test_a_smaller_batch_leaves_no_stale_rows() -> None:
    tables = make_tables()
    for slots in ((0, 1, 2, 3), (2,), (3, 0)):
        tables.update(StepPlan(1, slots))
        rows = tables._decode_slots.tolist()
        assert rows == [*slots, *[tables.scratch_slot] * (4 - len(slots))]


def test_the_output_ring_keeps_a_step_until_it_wraps_around() -> None:
    tables, outputs = make_tables(), StepOutputs(6, CPU)
    slots = torch.tensor([0, 1])
    rows = []
    for step in range(2 * RING_SIZE):
        rows.append(outputs.open())
        sampled = SampledRows(torch.tensor([step, 100 + step]), None)
        outputs.send(SampleRows(StepShape(2), None, slots, slots), sampled, tables.state)
        if step >= RING_SIZE - 1:
            first = step - RING_SIZE + 1
            assert outputs.token_ids(rows[first], range(2)) == [first, 100 + first]
    outputs.open()  # a step that failed before it sent anything
    outputs.recount()
    assert outputs._ring.next_entry.item() == 1
