"""The rows of ranks that divide requests, against those of a rank that has all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.resolving import GPU, resolved
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.device.lanes import Lanes
from minisgl.drafting.drafter import DraftStep
from minisgl.drafting.network_drafter import _SlotsOfRanks
from minisgl.kernels.rows import Rows
from minisgl.kvcache.manager import TakenSnapshot
from minisgl.request import SamplingParams
from minisgl.runner.graphs import CapturedStep, StepGraphs, graph_keys
from minisgl.runner.row_order import RowOrder
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.sampling_features import SamplingVariant
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan

CPU = torch.device("cpu")
PAGE = 4
MAX_PAGES = 8


def make_tables(
    rank: int = 0, num_ranks: int = 2, num_slots: int = 64, max_run: int = 1
) -> SlotTables:
    return SlotTables(
        order=RowOrder(num_slots, num_ranks, rank),
        max_run=max_run,
        max_pages=MAX_PAGES,
        page_size=PAGE,
        prompt_lengths=torch.arange(num_slots + 1) % 3,
        lanes=Lanes(CPU),
        has_states=True,
    )


class Plans:
    """Random plans, of requests that each have a slot and pages of their own."""

    def __init__(self, rng: random.Random, num_slots: int, max_run: int) -> None:
        self.rng, self.step, self.max_run = rng, 0, max_run
        self.lengths: dict[int, int] = {}  # of the slots that are in use
        self.decoding: set[int] = set()
        self.free = [*range(num_slots)]

    def next(self) -> StepPlan:
        rng, self.step = self.rng, self.step + 1
        most = 4 * MAX_PAGES - self.max_run
        decoding = [slot for slot in sorted(self.decoding) if self.lengths[slot] <= most]
        decodes = tuple(slot for slot in decoding if rng.random() < 0.8)
        grants, chunks = list[PageGrant](), list[Chunk]()
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            if self.free:
                slot = self.free.pop(rng.randrange(len(self.free)))
                self.lengths[slot] = 0
                first = 1 + slot * MAX_PAGES
                grants.append(PageGrant(slot, 0, range(first, first + MAX_PAGES)))
        waiting = [slot for slot in self.lengths if slot not in self.decoding]
        rng.shuffle(waiting)
        for slot in waiting[: rng.randint(0, 3)]:
            start, num = self.lengths[slot], rng.randint(1, 6)
            ends = rng.random() < 0.6
            tokens = [rng.randrange(1000) for _ in range(num)]
            taken = (TakenSnapshot(start + 1, slot % 3),) if rng.random() < 0.3 else ()
            if start + num > 4 * MAX_PAGES:
                continue
            chunks.append(Chunk(slot, start, tokens, ends, snapshots=taken))
            self.lengths[slot] += num
            if ends:
                self.decoding.add(slot)
        for slot in decodes:
            self.lengths[slot] += 1
        longest = max((self.lengths[slot] for slot in decodes), default=0) + self.max_run - 1
        return StepPlan(
            self.step, decodes, longest, tuple(chunks), grants=tuple(grants), max_run=self.max_run
        )

    def settle(self, plan: StepPlan, samples: SampleRows) -> dict[int, int]:
        """Let some drafts of each run count; returns how many."""
        counts: dict[int, int] = {}
        runs = samples.slots[: len(plan.decode_slots) * plan.max_run].view(-1, plan.max_run)
        for slot, run in zip(plan.decode_slots, runs, strict=True):
            counts[slot] = self.rng.randint(0, int((run == slot).sum()) - 1)
            self.lengths[slot] += counts[slot]
        return counts


def rows_by_rank(plan: StepPlan, each: int, num_ranks: int) -> list[list[int]]:
    """The rows of each rank, by their number in the order of the plan."""
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, slot in enumerate(plan.decode_slots):
        first = place * plan.max_run
        found[slot // each] += range(first, first + plan.max_run)
    row = len(plan.decode_slots) * plan.max_run
    for chunk in plan.chunks:
        found[chunk.slot // each] += range(row, row + len(chunk.token_ids))
        row += len(chunk.token_ids)
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_of_ranks_are_those_of_one_rank(seed: int) -> None:
    """In steps of the plan's shape, and in the larger ones of captured steps."""
    rng = random.Random(seed)
    num_ranks, each = rng.randint(2, 4), rng.randint(1, 4)
    num_slots = num_ranks * each
    padded, max_run = rng.random() < 0.5, rng.choice([1, 1, 3])
    whole = make_tables(0, 1, num_slots, max_run)
    ranks = [make_tables(rank, num_ranks, num_slots, max_run) for rank in range(num_ranks)]
    plans = Plans(rng, num_slots, max_run)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    for _ in range(12):
        plan = plans.next()
        drafts = torch.randint(-1, 3, whole.state.drafts.shape, generator=generator)
        takes_drafts = torch.randint(4, (num_slots + 1,), generator=generator) > 0
        for tables in (whole, *ranks):
            tables.update(plan)
            tables.state.drafts.copy_(drafts)
            tables.state.takes_drafts.copy_(takes_drafts)
        if not plan.num_tokens:
            continue
        shape = StepShape.of(plan)
        wanted, samples = whole.inputs(plan, shape, whole.upload_chunks(plan, shape))
        own = rows_by_rank(plan, each, num_ranks)
        spare = rng.randint(0, 2)
        made: list[tuple[DraftStep, Tensor, Tensor]] = []
        for rank, tables in enumerate(ranks):
            room = shape
            if padded:
                room = tables.order.shape_of(plan)
                more = min(each * num_ranks, room.num_decodes + num_ranks * spare)
                room = room._replace(num_decodes=more)
                if room.num_chunks:
                    room = room._replace(
                        num_chunk_rows=room.num_chunk_rows + spare * num_ranks,
                        num_chunks=room.num_chunks + spare,
                        num_chunk_samples=room.num_chunk_samples + spare,
                        num_snapshots=room.num_snapshots + spare,
                    )
            packed = tables.upload_chunks(plan, room)
            found = tables.inputs(None if padded else plan, room, packed)
            places = check(plan, tables, rank, own, wanted, samples, *found, room)
            made.append((draft_step(tables, *found), *places))
        tokens = torch.randint(1000, (len(samples.slots),), generator=generator)
        counts = plans.settle(plan, samples)
        for tables in (whole, *ranks):
            tables.state.last_tokens[samples.slots] = tokens.int()
            for slot, count in counts.items():
                tables.state.lengths[slot] += count
            assert torch.equal(tables.state.lengths, whole.state.lengths)
        for rank, (step, order, index) in enumerate(made):
            check_drafting(draft_step(whole, wanted, samples), tokens, step, order, index)
            check_slots_of_ranks(step, rank)


def columns(rows: Rows) -> tuple[Tensor, ...]:
    assert rows.rope is rows.positions
    return rows.slots, rows.positions


def check(
    plan: StepPlan,
    tables: SlotTables,
    rank: int,
    own: list[list[int]],
    wanted: ForwardBatch,
    wanted_samples: SampleRows,
    batch: ForwardBatch,
    samples: SampleRows,
    shape: StepShape,
) -> tuple[Tensor, Tensor]:
    """Compare what `rank` makes of a plan with the rows of all. Returns the place of each row of
    the plan among the rows, and of each that is sampled among those."""
    run = plan.max_run
    num_decodes = len(plan.decode_slots) * run
    starts = [*accumulate(batch.shares, initial=0)]
    assert starts[-1] == len(batch.token_ids) == shape.num_rows
    places: dict[int, int] = {}  # of each row of the plan
    for start, rows, share in zip(starts, own, batch.shares, strict=False):
        of_rank = [row for row in rows if row < num_decodes]
        room = len(of_rank)
        if shape != StepShape.of(plan):
            room = shape.num_decode_rows // len(own)
        for at, row in enumerate(of_rank):
            places[row] = start + at
        for at, row in enumerate(row for row in rows if row >= num_decodes):
            places[row] = start + room + at
        assert len(rows) <= share
    order = torch.tensor([places[row] for row in range(len(wanted.token_ids))])
    assert torch.equal(batch.token_ids[order], wanted.token_ids)
    rows = torch.tensor(own[rank], dtype=torch.int64)
    here = order[rows] - starts[rank]
    for found, all_wanted in zip(columns(batch.rows), columns(wanted.rows), strict=True):
        assert torch.equal(found[order], all_wanted) and len(found) == len(batch.token_ids)
    padded = torch.ones(len(batch.token_ids), dtype=torch.bool)
    padded[order] = False
    assert (batch.rows.slots[padded] == tables.scratch_slot).all()
    assert not batch.rows.positions[padded].any()
    for mine, every in zip(columns(batch.own), columns(batch.rows), strict=True):
        assert torch.equal(mine, every.split(batch.shares)[rank])
    assert torch.equal(batch.slot_mapping[here], wanted.slot_mapping[rows])
    decodes = rows[rows < num_decodes]
    real = len(decodes)
    lengths = batch.decodes.lengths
    assert torch.equal(lengths[:real], wanted.decodes.lengths[decodes]) and not lengths[real:].any()
    for mine, theirs in zip(batch.decodes.page_table[:real], decodes, strict=True):
        used = -(-int(wanted.decodes.lengths[theirs]) // PAGE)
        assert torch.equal(mine[:used], wanted.decodes.page_table[theirs][:used])
    if batch.decodes.lengths_host is not None:
        assert batch.decodes.lengths_host == lengths.tolist()
    check_chunks(plan, tables, rank, batch, wanted)
    # What is sampled, in the order of the plan.
    parts = tables.order.sampled_rows(plan, shape)
    index = torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    assert torch.equal(samples.slots[index], wanted_samples.slots)
    assert torch.equal(samples.output_index[index], wanted_samples.output_index)
    of_all = torch.arange(len(wanted.token_ids))
    asked = of_all if wanted_samples.rows is None else wanted_samples.rows
    got = torch.arange(shape.num_rows) if samples.rows is None else samples.rows
    assert torch.equal(got[index], order[asked])
    others = torch.ones(len(samples.slots), dtype=torch.bool)
    others[index] = False
    assert (samples.slots[others] == tables.scratch_slot).all()
    if shape == StepShape.of(plan):
        lengths_of = [len(chunk.token_ids) for chunk in plan.chunks]
        first = [*accumulate(lengths_of, initial=num_decodes)]
        assert tables.order.first_rows(plan) == [places[row] for row in first[:-1]]
        alone = RowOrder(tables.scratch_slot)
        assert alone.first_rows(plan) == first[:-1]
    return order, index


def check_chunks(
    plan: StepPlan, tables: SlotTables, rank: int, batch: ForwardBatch, wanted: ForwardBatch
) -> None:
    """The chunks of a rank, and its states: slots from 0 on, scratch, then snapshots."""
    each = tables.order.scratch_state
    own = [chunk for chunk in plan.chunks if chunk.slot // each == rank]
    chunks = batch.chunks
    assert chunks.row_starts.diff()[: len(own)].tolist() == [len(c.token_ids) for c in own]
    assert chunks.ends[: len(own)].tolist() == [chunk.end for chunk in own]
    assert not chunks.row_starts.diff()[len(own) :].any()
    slots = [slot - rank * each for slot in plan.decode_slots if slot // each == rank]
    decodes = batch.slots.decodes.tolist()
    assert decodes == slots + [each] * (len(decodes) - len(slots))
    if batch.slots.num_kept is not None and wanted.slots.num_kept is not None:
        own_runs = [slot // each == rank for slot in plan.decode_slots]
        kept = wanted.slots.num_kept[torch.tensor(own_runs, dtype=torch.bool)]
        assert torch.equal(batch.slots.num_kept[: len(slots)], kept)
        assert len(batch.slots.num_kept) == len(decodes)
    left: list[int] = []
    for chunk in own:
        left += [
            *(each + 1 + taken.snapshot for taken in chunk.snapshots),
            chunk.slot - rank * each,
        ]
    written = batch.slots.segments.slots.tolist()
    if any(chunk.snapshots for chunk in plan.chunks):
        assert [slot for slot in written if slot != each] == left
    else:
        assert written[: len(own)] == left and set(written[len(own) :]) <= {each}


def draft_step(tables: SlotTables, batch: ForwardBatch, samples: SampleRows) -> DraftStep:
    return DraftStep(
        batch=batch,
        hidden=torch.zeros(0),
        state=tables.state,
        states=[],
        attention=Attention(TorchAttention(), TorchAttention()),
        slots=samples.slots,
        output_index=samples.output_index,
        sample_rows=samples.rows,
        num_runs=samples.num_runs,
        chunk_ends=samples.chunk_ends,
    )


def check_drafting(
    wanted: DraftStep, tokens: Tensor, step: DraftStep, order: Tensor, index: Tensor
) -> None:
    """Compare what a drafter is told of a step. order, index: as `check` returns them."""
    scratch = step.state.scratch_slot
    ends = dict(zip(step.ending_slots().tolist(), step.ending_rows().tolist(), strict=True))
    rows = zip(wanted.ending_slots().tolist(), order[wanted.ending_rows()].tolist(), strict=True)
    assert {slot: row for slot, row in ends.items() if slot != scratch} == dict(rows)
    sampled = torch.zeros(len(step.slots), dtype=torch.int64)
    sampled[index] = tokens
    is_real = torch.ones(len(order), dtype=torch.bool)
    is_real[: wanted.num_decode_rows] = wanted.slots[: wanted.num_decode_rows] != scratch
    following = step.next_tokens(sampled)[order]
    assert torch.equal(following[is_real], wanted.next_tokens(tokens)[is_real])


def check_slots_of_ranks(step: DraftStep, rank: int) -> None:
    """In the passes that draft ahead, each slot has a row among those of its rank."""
    slots, each = step.ending_slots(), step.state.scratch_slot // len(step.num_runs)
    found = _SlotsOfRanks(step, slots)
    first, part = sum(found.shares[:rank]), found.own(rank)
    own, is_own = found.places[part], found.is_own[part]
    assert len(own) == found.shares[rank]
    assert sum(found.shares) == len(found.places)
    for place, (slot, row) in enumerate(zip(slots.tolist(), found.rows.tolist(), strict=True)):
        assert found.places[row] == place
        if slot // each == rank:
            assert first <= row < first + found.shares[rank]
            assert is_own[row - first]
    there = slots[own][is_own].tolist()
    mine = [slot for slot in slots.tolist() if slot // each == rank]
    assert [slot for slot in there if slot != step.state.scratch_slot] == mine


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_captured_step_has_room_for_the_rank_with_most_rows(num_ranks: int) -> None:
    tables = make_tables(num_ranks=num_ranks)
    each = 64 // num_ranks
    config = resolved(machine=GPU, max_running_requests=64, cuda_graph_max_bs=64)
    keys = graph_keys(replace(config, tp=num_ranks, dp_attention=True))
    for key in keys:
        assert not key.shape.num_decodes % num_ranks and not key.shape.num_chunk_rows % num_ranks
    packed = {key: torch.empty(0) if key.shape.num_chunks else None for key in keys}
    graphs = StepGraphs(
        [CapturedStep(key, chunks, None, {}) for key, chunks in packed.items()],
        tables.order.shape_of,
    )

    def found(num_first: int, num_second: int, *chunks: tuple[int, int]) -> StepShape | None:
        slots = (*range(num_first), *range(each, each + num_second))
        made = tuple(Chunk(slot, 0, [1] * length, True) for slot, length in chunks)
        step = graphs.find(StepPlan(1, slots, chunks=made), SamplingVariant.FILTERED)
        return None if step is None else step.key.shape

    assert found(1, 1) == StepShape(num_ranks)
    assert found(each, 1) == found(each, each) == StepShape(64)
    for most in range(1, each + 1):
        shape = found(most, most // 2)
        assert shape is not None and shape.num_decodes >= most * num_ranks
    mixed = found(2, 1, (each - 1, 128 // num_ranks + 1))
    assert mixed is not None and mixed.num_chunk_rows == 256
    assert found(2, 1, (each - 1, 512 // num_ranks + 1)) is None, "a rank has no room"
    assert found(2, 1, (each - 1, 500 // num_ranks), (each, 500 // num_ranks)) is not None


def test_states_are_where_the_rank_keeps_them() -> None:
    joins = [
        SlotJoin(slot, SamplingParams(), 0, frozenset(), (1,), (), snapshot=snapshot)
        for slot, snapshot in ((3, None), (31, 2), (32, 2), (63, None))
    ]
    assert make_tables(0).order.own_states(joins) == [(3, None), (31, 2)]
    assert make_tables(1).order.own_states(joins) == [(0, 2), (31, None)]


def test_decode_rows_of_another_order_are_refused() -> None:
    with pytest.raises(AssertionError, match="in the order of their ranks"):
        make_tables().update(StepPlan(1, (40, 2)))
