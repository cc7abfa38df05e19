"""The scheduler's half: which chunks have rows that vectors are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import InvalidRequestError
from minisgl.pooling import PooledRows, Pooling
from minisgl.request import Extra, SamplingParams
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(slots=True)
class PromptVector(Extra):
    """One vector, of a prompt that no token follows."""

    samples: ClassVar[bool] = False

    pooling: Pooling
    num_tokens: int  # of the prompt
    found: list[NDArray[np.float32]] = field(default_factory=list)  # of chunks with pooled rows

    @property
    def computes_all_tokens(self) -> bool:
        return self.pooling.needs_all_rows

    def num_shared(self, num_tokens: int) -> int:
        """The last token of a prompt is computed each time."""
        return 0 if self.pooling.needs_all_rows else min(num_tokens, self.num_tokens - 1)

    def retracted(self) -> None:
        self.found.clear()

    @property
    def vector(self) -> NDArray[np.float64]:
        """Once the request has ended."""
        sums: NDArray[np.float64] = np.sum(np.array(self.found, dtype=np.float64), axis=0)
        if self.pooling.rows is PooledRows.MEAN:
            return sums / max(1, self.num_tokens - self.pooling.num_skipped)
        return sums

    def has_rows(self, start: int, end: int) -> bool:
        """Whether tokens `start` to `end` have some of the rows of its pooling."""
        match self.pooling.rows:
            case PooledRows.LAST:
                return end == self.num_tokens
            case PooledRows.FIRST:
                return start == 0
            case PooledRows.MEAN:
                return end > self.pooling.num_skipped


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
    kind = PromptVector

    def __init__(self, task: str) -> None:
        """task: for which the model was loaded."""
        self._task = task

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        if given is None:
            check_task(self._task, "generate")
        return given

    def plan(self, work: StepWork) -> VectorPlan | None:
        chunks: list[PooledChunk] = []
        for index, (chunk, running) in enumerate(work.owned_chunks):
            wanted = running.request.extra(PromptVector)
            if wanted is not None and wanted.has_rows(chunk.start, chunk.end):
                num_rows = len(chunk.token_ids)
                chunks.append(PooledChunk(index, chunk.start, num_rows, wanted.pooling))
        return VectorPlan(tuple(chunks)) if chunks else None

    def settle(self, work: StepWork, outcome: object) -> None:
        assert isinstance(outcome, dict)
        for index, vector in outcome.items():
            running = work.chunk_owners[index]
            wanted = running.request.extra(PromptVector)
            if running.active and wanted is not None:
                wanted.found.append(vector)


def check_task(loaded: str, needed: str) -> None:
    """Raise InvalidRequestError if the model was loaded for another task."""
    if loaded != needed:
        raise InvalidRequestError(
            "task", f"the model was loaded with --task {loaded}; this needs {needed}."
        )
