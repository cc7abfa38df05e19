"""Where experts of a layer stand a second time, so that no rank has much more to do than others.

With --ep each rank has experts of its own, `uneven_shard`. An expert may have a copy on another
rank. The tokens that take it are then divided in halves, by the parity of their KV slots: one half
goes to the expert, the other to the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.shards import uneven_shard

# Of a layer: the experts of which each rank has copies, () where none has. In the order of the
# ranks.
Copies = tuple[tuple[int, ...], ...]


def place_copies(counts: Sequence[int], num_ranks: int, num_copies: int) -> Copies:
    """The copies that a layer gets: at most `num_copies`, spread over the ranks as evenly as whole
    numbers allow, or fewer where more would help no rank.

    counts: the tokens of each expert. Again and again the fullest rank gives half of its busiest
    expert to the emptiest rank that has room, if that one is then not as full. So no rank gets
    more than the fullest had.
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
    """The rank that computes each expert for the tokens of even KV slots, and for those of odd
    ones.

    Of copied experts with an even number the tokens of odd slots go to the copy; of the others
    those of even slots, so that a token alone does not use copies only.
    """
    home: list[int] = []
    for rank in range(num_ranks):
        home += [rank] * uneven_shard(num_experts, rank, num_ranks).size
    halves = [home, [*home]]
    for rank, experts in enumerate(copies):
        for expert in experts:
            halves[(expert + 1) % 2][expert] = rank
    return halves
