"""Decoded step plans equal the encoded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.kvcache.copies import Copies, Load
from minisgl.parts.copies.host import CopyPlan
from minisgl.parts.masks.host import MaskPlan
from minisgl.parts.scores.host import ScoredChunk, ScorePlan
from minisgl.parts.vectors.host import PooledChunk, VectorPlan
from minisgl.pooling import PooledRows, Pooling
from minisgl.ranks.processes.plan_codec import AGAIN, PlanDecoder, PlanEncoder
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import Chunk, PageGrant, PartPlan, SlotJoin, StepPlan

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 100),
    stop=st.lists(st.text(min_size=1), max_size=2),
    stop_token_ids=IDS,
    logit_bias=st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.none() | st.integers(1, 9),
)
JOINS = st.builds(
    SlotJoin,
    slot=st.integers(0, 255),
    params=PARAMS,
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.frozensets(st.integers(0, 999)),
    prompt_token_ids=IDS,
    output_token_ids=IDS,
    masked=st.booleans(),
)
CHUNKS = st.builds(
    Chunk,
    slot=st.integers(0, 255),
    start=st.integers(0, 99),
    token_ids=IDS,
    samples=st.booleans(),
)
GRANTS = st.builds(PageGrant, slot=st.integers(0, 255), index=st.integers(0, 99), pages=IDS)
COPIES = st.builds(
    Copies,
    offloads=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple),
    loads=st.lists(st.builds(Load, st.integers(1, 9), IDS, IDS), max_size=2).map(tuple),
    awaits=IDS,
)
SCORED = st.builds(ScoredChunk, st.integers(0, 9), IDS, st.integers(0, 20))
POOLED = st.builds(
    PooledChunk,
    st.integers(0, 9),
    st.integers(0, 99),
    st.integers(1, 99),
    st.builds(Pooling, st.sampled_from(PooledRows), st.integers(0, 9), IDS),
)
PARTS = st.tuples(
    st.builds(MaskPlan, IDS),
    st.builds(ScorePlan, st.lists(SCORED, max_size=2).map(tuple)),
    st.builds(VectorPlan, st.lists(POOLED, max_size=2).map(tuple)),
    st.builds(CopyPlan, st.tuples(COPIES)),
).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), max_size=4, unique_by=type).map(tuple))


@st.composite
def plans(draw: st.DrawFn) -> list[StepPlan]:
    """Plans like a scheduler's: steps count up, and an unchanged batch is the same object."""
    found: list[StepPlan] = []
    batch, longest = draw(IDS), 1
    for step in range(1, draw(st.integers(1, 8)) + 1):
        if draw(st.booleans()):
            batch = draw(IDS)
        longest = draw(st.just(longest + 1) | st.integers(1, 9999))
        rest: dict[str, object] = {
            "parts": draw(PARTS),
            "deferred": draw(st.booleans()),
            "lag": draw(st.just(1) | st.integers(1, 3)),
        }
        if draw(st.booleans()):
            rest |= {
                "chunks": draw(st.lists(CHUNKS, max_size=2).map(tuple)),
                "joins": draw(st.lists(JOINS, max_size=2).map(tuple)),
                "grants": draw(st.lists(GRANTS, max_size=2).map(tuple)),
                "epoch": draw(st.integers(0, 2)),
            }
        found.append(StepPlan(step, batch, longest, **rest))  # type: ignore[arg-type]
    return found


def as_tuples(plan: StepPlan) -> StepPlan:
    """Sequences of any kind as tuples, which compare."""
    return replace(
        plan,
        chunks=tuple(replace(chunk, token_ids=tuple(chunk.token_ids)) for chunk in plan.chunks),
        joins=tuple(
            replace(
                j,
                prompt_token_ids=tuple(j.prompt_token_ids),
                output_token_ids=tuple(j.output_token_ids),
            )
            for j in plan.joins
        ),
        grants=tuple(replace(g, pages=tuple(g.pages)) for g in plan.grants),
        parts=tuple(map(_scores_as_tuples, plan.parts)),
    )


def _scores_as_tuples(part: PartPlan) -> PartPlan:
    if not isinstance(part, ScorePlan):
        return part
    return ScorePlan(tuple(replace(c, token_ids=tuple(c.token_ids)) for c in part.chunks))


def without_text(plan: StepPlan) -> StepPlan:
    """Other ranks look for no stop strings."""
    joins = (replace(join, params=replace(join.params, stop=())) for join in plan.joins)
    return replace(plan, joins=tuple(joins))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_decoded_plans_equal_the_encoded_ones(sent: list[StepPlan]) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    before = None
    for plan in sent:
        found = decoder.decode(encoder.encode(plan))
        assert as_tuples(found) == as_tuples(without_text(plan))
        if before is not None and plan.decode_slots is before[0].decode_slots:
            assert found.decode_slots is before[1].decode_slots
        before = plan, found


def test_a_plan_that_fails_to_encode_does_not_change_the_encoder() -> None:
    """Its step fails on rank 0 alone, and the others know nothing of its batch."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(encoder.encode(StepPlan(1, (1, 2), longest_decode=5)))
    batch, unsendable = (3, 4), PageGrant(3, 0, (1 << 64,))
    with pytest.raises(OverflowError):
        encoder.encode(StepPlan(2, batch, longest_decode=6, grants=(unsendable,)))
    plan = StepPlan(3, batch, longest_decode=7, epoch=1)
    assert decoder.decode(encoder.encode(plan)) == plan


def test_a_stop_string_that_is_not_valid_utf_8_is_encoded() -> None:
    join = SlotJoin(0, SamplingParams(stop=("\ud800",)), 1, frozenset(), (1,), ())
    plan = StepPlan(1, (0,), joins=(join,))
    assert as_tuples(PlanDecoder().decode(PlanEncoder().encode(plan))) == without_text(plan)


def test_steady_decode_sends_one_byte() -> None:
    """However large the batch is and however long its rows are."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    batch = tuple(range(256))
    first = StepPlan(1, batch, longest_decode=5000)
    decoder.decode(encoder.encode(first))
    for step in range(2, 6):
        plan = StepPlan(step, batch, longest_decode=5000 + step - 1)
        data = encoder.encode(plan)
        assert data == AGAIN
        assert decoder.decode(data) == plan
    masked = [StepPlan(step, batch, 5000 + step, parts=(MaskPlan(batch),)) for step in (6, 7)]
    sent = [encoder.encode(plan) for plan in masked]
    assert (sent[0] == AGAIN, sent[1] == AGAIN) == (False, True)
    assert [decoder.decode(data) for data in sent] == masked
    # New pages do not send the batch again.
    grown = StepPlan(8, batch, 5008, grants=(PageGrant(7, 3, (9,)),))
    data = encoder.encode(grown)
    assert len(data) < 200
    assert as_tuples(decoder.decode(data)) == grown


def test_steady_decode_of_runs_sends_one_byte() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    batch = tuple(range(256))
    for step in range(1, 6):
        plan = StepPlan(step, batch, longest_decode=5000 + 4 * step, max_run=4)
        data = encoder.encode(plan)
        assert (data == AGAIN) == (step > 1)
        assert decoder.decode(data) == plan


def test_steady_decode_of_groups_that_take_turns_sends_one_byte() -> None:
    encoder, decoder = PlanEncoder(3), PlanDecoder(3)
    groups = [tuple(range(first, first + 50)) for first in (0, 50, 100)]
    for step in range(1, 10):
        place = step % 3
        plan = StepPlan(step, groups[place], longest_decode=100 * place + step // 3, lag=3)
        data = encoder.encode(plan)
        assert (data == AGAIN) == (step > 3)
        assert decoder.decode(data) == plan
