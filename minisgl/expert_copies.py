"""Where experts of a layer stand a second time, so that no rank has much more to do than others.

With --ep each rank has experts of its own, `uneven_shard`. An expert may have a copy on another
rank. The tokens that take it are then divided in halves, by the parity of their positions: one half
goes to the expert, the other to the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.shards import uneven_shard

# Of a layer: for each rank the experts of which it has copies; () if none has any.
Copies = tuple[tuple[int, ...], ...]


def place_copies(counts: Sequence[int], num_ranks: int, num_copies: int) -> Copies:
    """The copies that a layer gets: at most `num_copies`, and on a rank at most an equal part of
    them, rounded up. Fewer where another would not relieve the fullest rank.

    counts: the tokens of each expert. Again and again the fullest rank gives half of an expert of
    its own, the busiest that leaves the other rank emptier than it was itself, to the emptiest rank
    that has room.
    """
    own = [uneven_shard(len(counts), rank, num_ranks) for rank in range(num_ranks)]
    alone = [set(range(part.first, part.first + part.size)) for part in own]
    load = [2 * sum(counts[expert] for expert in part) for part in alone]  # in halves of tokens
    copies: list[list[int]] = [[] for _ in own]
    most = -(-num_copies // num_ranks)
    for _ in range(num_copies):
        fullest = max(range(num_ranks), key=load.__getitem__)
        with_room = [rank for rank, held in enumerate(copies) if len(held) < most]
        emptiest = min(with_room, key=load.__getitem__)
        room = load[fullest] - load[emptiest]
        fitting = [expert for expert in sorted(alone[fullest]) if 0 < counts[expert] < room]
        if not fitting:
            break
        busiest = max(fitting, key=counts.__getitem__)
        alone[fullest].remove(busiest)
        copies[emptiest].append(busiest)
        load[fullest] -= counts[busiest]
        load[emptiest] += counts[busiest]
    return tuple(map(tuple, copies)) if any(copies) else ()


def ranks_of(num_experts: int, num_ranks: int, copies: Copies) -> list[list[int]]:
    """The rank that computes each expert for the tokens of even positions, and for those of odd
    ones.

    Of copied experts with an even number the tokens of odd positions go to the copy; of the others
    those of even positions. So the token of a lone request uses some copies in each step.
    """
    home: list[int] = []
    for rank in range(num_ranks):
        home += [rank] * uneven_shard(num_experts, rank, num_ranks).size
    halves = [home, [*home]]
    for rank, experts in enumerate(copies):
        for expert in experts:
            halves[(expert + 1) % 2][expert] = rank
    return halves
