"""Which rows of a step are whose, where ranks may divide the requests among them.

Rank r has the requests in its own, consecutive slots: the keys, values and states of these are on
no other rank. All other tables are the same on all ranks, which compute the same tokens. A step's
rows are those of rank 0, then those of rank 1, and so on; of each first its decode rows, which the
plan has in the order of the ranks, then those of its chunks:

    [rank 0: decode rows | chunk rows] [rank 1: decode rows | chunk rows] ...

In an eager step each rank has as many as the plan says, perhaps none. In a captured step, whose
shape says how many all have together, they have equally many, and padding fills up each kind.
Where nothing is divided, a single rank has all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import Chunk, SlotJoin, StepPlan


class RankRows(NamedTuple):
    """How many rows of a step each rank has."""

    decodes: tuple[int, ...]  # slots, each with a run of rows
    chunk_rows: tuple[int, ...]
    run: int

    @property
    def are_divided(self) -> bool:
        """Whether several ranks divide them."""
        return len(self.decodes) > 1

    @property
    def shares(self) -> tuple[int, ...]:
        """The rows of each rank."""
        pairs = zip(self.decodes, self.chunk_rows, strict=True)
        return tuple(num * self.run + num_rows for num, num_rows in pairs)

    @property
    def starts(self) -> list[int]:
        """The first row of each rank."""
        return [*accumulate(self.shares, initial=0)][:-1]

    def rows(self, rank: int) -> slice:
        """The rows of a rank among those of all."""
        first = self.starts[rank]
        return slice(first, first + self.shares[rank])

    def decode_rows(self, rank: int) -> slice:
        """The rows of a rank among the decode rows of all."""
        first = sum(self.decodes[:rank]) * self.run
        return slice(first, first + self.decodes[rank] * self.run)

    def decode_places(self, device: torch.device) -> list[Tensor]:
        """The decode rows among all rows, of each rank."""
        starts = zip(self.starts, self.decodes, strict=True)
        return [torch.arange(start, start + n * self.run, device=device) for start, n in starts]

    def joined(self, decodes: Tensor, chunks: Tensor) -> Tensor:
        """The numbers [n, ...] of decode rows and of chunk rows in the order of the rows."""
        of_decodes = decodes.split([num * self.run for num in self.decodes], dim=1)
        pairs = zip(of_decodes, chunks.split([*self.chunk_rows], dim=1), strict=True)
        return torch.cat([*chain.from_iterable(pairs)], dim=1)


class RowOrder:
    """The order of the rows, as one of the ranks sees it."""

    def __init__(self, num_slots: int, num_ranks: int = 1, rank: int = 0) -> None:
        """num_slots: of all ranks together, each of which has as many. num_ranks: that divide the
        requests."""
        self.rank = rank
        self.num_slots, self._num_ranks = num_slots, num_ranks
        self._slots_each = num_slots // num_ranks
        # Where layers keep the state of padded rows. The snapshots follow.
        self.scratch_state = self._slots_each
        self._planned: tuple[int, ...] = ()  # the decode slots of the last plan,
        self._placed: tuple[int, ...] = ()  # as the table has them,
        self._decodes = (0,) * num_ranks  # and how many each rank has

    def rank_of(self, slot: int) -> int:
        """The rank that has the request in a slot."""
        return slot // self._slots_each

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The shape that a captured step must have room for to compute a plan: with equally many
        rows for all ranks."""
        shape, num_ranks = StepShape.of(plan), self._num_ranks
        if num_ranks == 1:
            return shape
        rows = self.rows_of(plan, shape)
        return shape._replace(
            num_decodes=num_ranks * max(rows.decodes),
            num_chunk_rows=num_ranks * max(rows.chunk_rows),
        )

    def sampled_rows(self, plan: StepPlan, shape: StepShape) -> tuple[range, ...]:
        """Which rows of the outputs are the plan's, in its order: of decode rows, a part for each
        rank, then of chunks.

        shape: of the step, which may be captured and have more rows.
        """
        run, first = shape.run, shape.num_decode_rows
        chunks = range(first, first + plan.num_chunk_samples)
        if self._num_ranks == 1:
            return range(len(plan.decode_slots) * run), chunks
        starts = accumulate(self.rows_of(plan, shape).decodes, initial=0)
        pairs = zip(starts, self._count(plan.decode_slots), strict=False)  # the sum follows
        return *(range(start * run, (start + num) * run) for start, num in pairs), chunks

    def runs(self, plan: StepPlan, shape: StepShape) -> list[range]:
        """The rows of the outputs of each request that is sampled, in the order of the plan."""
        *decodes, chunks = self.sampled_rows(plan, shape)
        starts = chain.from_iterable(part[:: shape.run] for part in decodes)
        runs = [range(start, start + shape.run) for start in starts]
        return runs + [range(row, row + 1) for row in chunks]

    def first_rows(self, plan: StepPlan, rows: RankRows | None = None) -> list[int]:
        """The first row of each chunk. rows: of a step of another shape than the plan's."""
        rows = rows or self.rows_of(plan, StepShape.of(plan))
        pairs = zip(rows.starts, rows.decodes, strict=True)
        following = [start + num * rows.run for start, num in pairs]
        firsts: list[int] = []
        for chunk in plan.chunks:
            rank = self.rank_of(chunk.slot)
            firsts.append(following[rank])
            following[rank] += len(chunk.token_ids)
        return firsts

    def rows_of(self, plan: StepPlan | None, shape: StepShape) -> RankRows:
        """The rows of each rank in a step of this shape: those of the plan, or more. plan: None of
        a captured step."""
        num_ranks = self._num_ranks
        if plan is None or num_ranks == 1:
            sizes = shape.num_decodes, shape.num_chunk_rows
            decodes, chunk_rows = ((size // num_ranks,) * num_ranks for size in sizes)
            return RankRows(decodes, chunk_rows, shape.run)
        rows = [0] * num_ranks
        for chunk in plan.chunks:
            rows[self.rank_of(chunk.slot)] += len(chunk.token_ids)
        decodes = self._fill_up(self._count(plan.decode_slots), shape.num_decodes)
        return RankRows(decodes, self._fill_up(tuple(rows), shape.num_chunk_rows), shape.run)

    def _fill_up(self, counts: tuple[int, ...], total: int) -> tuple[int, ...]:
        each, left = divmod(total, self._num_ranks)
        is_even = not left and max(counts) <= each
        return (each,) * self._num_ranks if is_even else counts

    # -- slots -------------------------------------------------------------------------------------

    def placed(self, decode_slots: tuple[int, ...]) -> tuple[int, ...]:
        """The decode slots of a plan as the tables have them: those of a rank begin where its slots
        do. The same object as before if they are."""
        self._count(decode_slots)
        return decode_slots if self._num_ranks == 1 else self._placed

    def taken(self, placed: Tensor, decodes: Sequence[int]) -> Tensor:
        """The first slots of each rank, so many, of a tensor of slots as `placed` has them."""
        if len(decodes) == 1:
            return placed[: decodes[0]]
        each = placed.split(self._slots_each)
        return torch.cat([part[:num] for part, num in zip(each, decodes, strict=True)])

    def _count(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """How many of these decode slots each rank has."""
        if self._num_ranks == 1:
            return (len(slots),)
        if slots is not self._planned:
            self._planned = slots
            by_rank: list[list[int]] = [[] for _ in range(self._num_ranks)]
            for slot in slots:
                by_rank[self.rank_of(slot)].append(slot)
            in_order = [*chain.from_iterable(by_rank)]
            assert [*slots] == in_order, "decode rows are in the order of their ranks"
            filler = [self.num_slots]
            placed = [own + filler * (self._slots_each - len(own)) for own in by_rank]
            self._placed = tuple(chain.from_iterable(placed))
            self._decodes = tuple(map(len, by_rank))
        return self._decodes

    # -- what is this rank's -----------------------------------------------------------------------

    def own_chunks(self, plan: StepPlan) -> tuple[Chunk, ...]:
        if self._num_ranks == 1:
            return plan.chunks
        return tuple(chunk for chunk in plan.chunks if self.rank_of(chunk.slot) == self.rank)

    def own_states(self, joins: Sequence[SlotJoin]) -> list[tuple[int, int | None]]:
        """Where layers keep the states of the requests that join, and the snapshots from which
        these start."""
        first = self.rank * self._slots_each
        own = [join for join in joins if self.rank_of(join.slot) == self.rank]
        return [(join.slot - first, join.snapshot) for join in own]

    def states_of(self, slots: Tensor) -> Tensor:
        """Where layers keep the states of these slots of this rank, of the scratch slot and of the
        snapshots behind it."""
        if self._num_ranks == 1:
            return slots
        first, others = self.rank * self._slots_each, self.num_slots - self._slots_each
        return torch.where(slots < self.num_slots, slots - first, slots - others)
