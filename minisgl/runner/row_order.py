"""The rows of a step in the order of its plan, all of them of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from minisgl.runner.chunk_tensors import StepShape
from minisgl.scheduler.plan import SlotJoin, StepPlan


class RowOrder:
    """Which rows of a step are whose: first come the decode rows, then those of chunks."""

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The shape that a captured step must have room for to compute a plan."""
        return StepShape.of(plan)

    def sampled_rows(self, plan: StepPlan, shape: StepShape) -> tuple[range, ...]:
        """Which rows of the outputs are the plan's, in its order: of decode rows, then of chunks.

        shape: of the step, which may be captured and have more rows.
        """
        decodes = range(len(plan.decode_slots) * shape.run)
        return decodes, range(shape.num_decode_rows, shape.num_decode_rows + plan.num_chunk_samples)

    def first_rows(self, plan: StepPlan) -> list[int]:
        """The first row of each chunk, in a step that has the shape of the plan."""
        lengths = (len(chunk.token_ids) for chunk in plan.chunks)
        return [*accumulate(lengths, initial=StepShape.of(plan).num_decode_rows)][:-1]

    def own_states(self, joins: Sequence[SlotJoin]) -> list[tuple[int, int | None]]:
        """Where layers keep the states of the requests that join, and the snapshots from which
        these start."""
        return [(join.slot, join.snapshot) for join in joins]
