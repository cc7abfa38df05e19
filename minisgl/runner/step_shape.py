"""The *shape* of a step: its number of decode rows and of chunk rows.

An eager step has the shape of its plan. The shape of a captured step is at least as large, with
padding: decode rows of the scratch slot, empty chunks, and chunk rows of the scratch slot at
position 0.
"""

from __future__ import annotations

from typing import NamedTuple

from minisgl.scheduler.plan import StepPlan


class StepShape(NamedTuple):
    """The number of rows of each kind in a step; without chunk rows there are no chunks."""

    num_decodes: int
    num_chunk_rows: int = 0
    num_chunks: int = 0
    num_chunk_samples: int = 0  # chunks whose last row is sampled
    num_snapshots: int = 0  # that the chunks leave of the states of their requests
    run: int = 1  # rows of each decoded request
    adapted: bool = False  # some rows have adapters, or are rotated by other positions than theirs

    @property
    def num_decode_rows(self) -> int:
        return self.num_decodes * self.run

    @property
    def num_segments(self) -> int:
        """Of Segments; 0 if each chunk is one."""
        return self.num_chunks + self.num_snapshots if self.num_snapshots else 0

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_chunk_rows

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        return StepShape(
            num_decodes=len(plan.decode_slots),
            num_chunk_rows=sum(len(chunk.token_ids) for chunk in plan.chunks),
            num_chunks=len(plan.chunks),
            num_chunk_samples=plan.num_chunk_samples,
            num_snapshots=sum(len(chunk.snapshots) for chunk in plan.chunks),
            run=plan.max_run,
            adapted=any(part.adapts_rows for part in plan.parts),
        )
