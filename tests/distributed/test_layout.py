"""Which rank is in which stage, group and node."""

from __future__ import annotations

from itertools import product

import pytest

from minisgl.distributed.layout import RankLayout

LAYOUTS = [
    RankLayout(tp=tp, pp=pp, num_nodes=nodes)
    for tp, pp, nodes in product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4))
    if tp * pp % nodes == 0
]


def test_one_rank_is_the_default() -> None:
    layout = RankLayout(tp=1)
    assert (layout.world_size, layout.num_nodes, layout.pp) == (1, 1, 1)
    assert (layout.node(0), layout.stage(0), layout.local_rank(0)) == (0, 0, 0)


def test_two_nodes_of_two_stages_have_a_stage_each() -> None:
    layout = RankLayout(tp=4, pp=2, num_nodes=2)
    assert [layout.stage(rank) for rank in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [layout.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.local_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert not layout.spans_nodes(0) and not layout.spans_nodes(1)


def test_a_group_larger_than_a_node_spans_nodes() -> None:
    layout = RankLayout(tp=4, num_nodes=2)
    assert layout.spans_nodes(0)
    assert list(layout.ranks_of_node(1)) == [2, 3]


def test_only_the_group_across_the_border_of_nodes_spans_them() -> None:
    layout = RankLayout(tp=2, pp=3, num_nodes=2)
    assert [layout.spans_nodes(stage) for stage in range(3)] == [True, False, False]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_and_nodes_divide_the_ranks(layout: RankLayout) -> None:
    ranks = list(range(layout.world_size))
    stages = [layout.pp - 1, *range(layout.pp - 1)]  # rank 0 is in the last
    assert [rank for stage in stages for rank in layout.ranks_of_stage(stage)] == ranks
    nodes = range(layout.num_nodes)
    assert [rank for node in nodes for rank in layout.ranks_of_node(node)] == ranks
    for rank in ranks:
        assert rank in layout.ranks_of_stage(layout.stage(rank))
        assert rank in layout.ranks_of_node(layout.node(rank))
        assert layout.rank(layout.stage(rank), rank % layout.tp) == rank
        assert layout.ranks_of_node(layout.node(rank))[0] + layout.local_rank(rank) == rank
    for stage in range(layout.pp):
        found = {layout.node(rank) for rank in layout.ranks_of_stage(stage)}
        assert layout.spans_nodes(stage) == (len(found) > 1)


@pytest.mark.parametrize(("tp", "pp", "nodes"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 1, -1)])
def test_numbers_below_one_are_refused(tp: int, pp: int, nodes: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        RankLayout(tp=tp, pp=pp, num_nodes=nodes)


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="evenly"):
        RankLayout(tp=3, num_nodes=2)
