"""The scheduler's half: which chunks have rows that vectors are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.request import PooledRows, Pooling, Request, Vector
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk that has rows of a vector."""

    index: int  # in the plan
    start: int  # position of the first token
    num_rows: int
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class VectorPlan(PartPlan):
    reads_rows: ClassVar[bool] = True

    chunks: tuple[PooledChunk, ...]


class Vectors(Part):
    def concerns(self, request: Request) -> bool:
        return request.pooling is not None

    def plan(self, work: StepWork) -> VectorPlan | None:
        chunks: list[PooledChunk] = []
        for index, (chunk, running) in enumerate(work.owned_chunks):
            pooling = running.request.pooling
            if pooling is not None and _has_rows(running.request, pooling, chunk.start, chunk.end):
                chunks.append(PooledChunk(index, chunk.start, len(chunk.token_ids), pooling))
        return VectorPlan(tuple(chunks)) if chunks else None

    def settle(self, work: StepWork, outcome: object) -> None:
        assert isinstance(outcome, dict)
        vectors: dict[int, Vector] = outcome
        for index, vector in vectors.items():
            running = work.chunk_owners[index]
            if running.active:
                running.request.pooled.append(vector)

    def retracted(self, request: Request) -> None:
        request.pooled.clear()


def _has_rows(request: Request, pooling: Pooling, start: int, end: int) -> bool:
    """Whether tokens `start` to `end` of a request have some of the rows of its pooling."""
    match pooling.rows:
        case PooledRows.LAST:
            return end == request.num_prompt_tokens
        case PooledRows.FIRST:
            return start == 0
        case PooledRows.MEAN:
            return end > pooling.num_skipped
