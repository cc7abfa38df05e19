"""Where copies of busy experts go: property tests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.expert_copies import Copies, place_copies, ranks_of
from minisgl.shards import uneven_shard


@st.composite
def uses(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """The tokens of each expert, ranks that can divide these, and a number of copies."""
    counts = draw(st.lists(st.integers(0, 20) | st.integers(0, 10**15), min_size=2, max_size=24))
    return counts, draw(st.integers(2, len(counts))), draw(st.integers(0, len(counts)))


def loads(counts: list[int], num_ranks: int, copies: Copies) -> list[int]:
    """Twice the tokens of each rank, if each half of an expert's has as many."""
    load = [0] * num_ranks
    for ranks in ranks_of(len(counts), num_ranks, copies):
        for expert, rank in enumerate(ranks):
            load[rank] += counts[expert]
    return load


@given(uses())
def test_copies_are_few_and_help(use: tuple[list[int], int, int]) -> None:
    counts, num_ranks, num_copies = use
    copies = place_copies(counts, num_ranks, num_copies)
    assert len(copies) in (0, num_ranks)
    placed = [expert for experts in copies for expert in experts]
    assert len(placed) == len(set(placed)) <= num_copies
    for rank, experts in enumerate(copies):
        own = uneven_shard(len(counts), rank, num_ranks)
        assert not {*experts} & {*range(own.first, own.first + own.size)}
        assert len(experts) <= -(-num_copies // num_ranks)
    assert all(counts[expert] for expert in placed)
    before, after = loads(counts, num_ranks, ()), loads(counts, num_ranks, copies)
    assert sum(after) == sum(before) == 2 * sum(counts)
    assert sorted(after)[::-1] < sorted(before)[::-1] if placed else after == before
    assert max(after) <= max(before)
    assert copies == place_copies(counts, num_ranks, num_copies)


@given(uses())
def test_each_half_of_an_expert_is_computed_by_one_rank_that_has_it(
    use: tuple[list[int], int, int],
) -> None:
    counts, num_ranks, num_copies = use
    copies = place_copies(counts, num_ranks, num_copies)
    even, odd = ranks_of(len(counts), num_ranks, copies)
    for rank in range(num_ranks):
        own = uneven_shard(len(counts), rank, num_ranks)
        for expert in range(len(counts)):
            num_halves = (even[expert] == rank) + (odd[expert] == rank)
            if 0 <= expert - own.first < own.size:
                assert num_halves == 2 - any(expert in experts for experts in copies)
            else:
                assert num_halves == (bool(copies) and expert in copies[rank])


@pytest.mark.parametrize(
    ("counts", "num_copies", "copies"),
    [
        ([90, 0, 0, 10], 1, ((), (0,))),
        ([90, 0, 0, 10], 2, ((3,), (0,))),  # 45 and 55 become 50 each
        ([90, 0, 0, 0], 2, ((), (0,))),  # no other makes the fullest rank emptier
        ([90, 80, 10, 0], 2, ((), (0,))),  # of two copies one is for each rank
        ([90, 80, 10, 0], 3, ((2,), (0, 1))),
        ([50, 50, 50, 50], 4, ()),
        ([0, 0, 0, 0], 4, ()),
        ([100, 0, 0, 1], 0, ()),
        ([100, 0, 0, 90], 2, ()),  # half of 100 would be more than 100 beside the 90
    ],
)
def test_the_fullest_rank_gives_its_busiest_experts(
    counts: list[int], num_copies: int, copies: Copies
) -> None:
    assert place_copies(counts, 2, num_copies) == copies


def test_both_halves_of_the_tokens_use_copies() -> None:
    assert ranks_of(4, 2, ((), (0, 1))) == [[0, 1, 1, 1], [1, 0, 1, 1]]
