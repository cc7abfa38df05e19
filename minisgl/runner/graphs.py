"""Selects the step shapes to capture, and the captured step that replays a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from minisgl.runner.sampling_features import SamplingVariant
from minisgl.runner.step_inputs import StepShape
from minisgl.scheduler.plan import StepPlan

# Maximum number of chunks in a captured step, and the captured numbers of chunk rows. With more of
# either, the step takes longer on the device than to queue, so a graph gains nothing.
MAX_CHUNKS = 16
CHUNK_ROWS = (128, 256, 512)
# Numbers of decode rows in captured steps with chunks. Few, because padding costs little there.
MIXED_BATCHES = (8, 32)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The shape and the sampling variant of a captured step."""

    shape: StepShape
    variant: SamplingVariant = SamplingVariant.FILTERED


@dataclass(frozen=True, slots=True)
class CapturedStep:
    key: GraphKey
    chunks: Tensor | None  # packed by SlotTables.upload_chunks; must be filled before each replay
    replay: Callable[[], None]


def graph_keys(max_batch: int, max_chunk_rows: int, num_ranks: int = 1) -> list[GraphKey]:
    """List the steps to capture for batches of up to `max_batch` rows; empty if that is 0.

    Largest first, so that later graphs reuse the memory of the first.
    max_chunk_rows: the prefill budget of a step.
    """
    if max_batch == 0:
        return []
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 32), max_batch}
    powers = {1 << bit for bit in range(max_batch.bit_length())} | {max_batch}
    plain = (
        [SamplingVariant.FILTERED]
        if num_ranks == 1
        else [SamplingVariant.BASIC, SamplingVariant.FILTERED]
    )
    keys = [GraphKey(StepShape(n), variant) for n in sizes if n <= max_batch for variant in plain]
    keys += [GraphKey(StepShape(size), SamplingVariant.FULL) for size in powers]
    keys += [
        GraphKey(StepShape(size, rows, MAX_CHUNKS))
        for size in {*MIXED_BATCHES, max_batch}
        for smaller, rows in pairwise((0, *CHUNK_ROWS))
        if size <= max_batch and smaller < max_chunk_rows
    ]
    return sorted(keys, key=_num_rows, reverse=True)


def _num_rows(key: GraphKey) -> tuple[int, SamplingVariant]:
    return key.shape.num_decodes + key.shape.num_chunk_rows, key.variant


class StepGraphs:
    """Finds the smallest captured step that a plan fits into."""

    def __init__(self, steps: Iterable[CapturedStep] = ()) -> None:
        self.steps = tuple(steps)
        by_size = sorted(self.steps, key=lambda step: _num_rows(step.key))
        self._mixed = [step for step in by_size if step.chunks is not None]
        decodes = [step for step in by_size if step.chunks is None]
        self._decodes = {
            variant: [step for step in decodes if step.key.variant is variant]
            for variant in SamplingVariant
        }
        # A single rank captures no BASIC steps.
        self._decodes[SamplingVariant.BASIC] = (
            self._decodes[SamplingVariant.BASIC] or self._decodes[SamplingVariant.FILTERED]
        )

    @property
    def max_batch(self) -> int:
        """The largest decode batch that is captured; 0 if none is."""
        steps = self._decodes[SamplingVariant.FILTERED]
        return steps[-1].key.shape.num_decodes if steps else 0

    def find(self, plan: StepPlan, variant: SamplingVariant) -> CapturedStep | None:
        """Return the smallest captured step with room for `plan`; None if it must run eagerly."""
        if not plan.chunks:
            num_rows = len(plan.decode_slots)
            for step in self._decodes[variant]:
                if step.key.shape.num_decodes >= num_rows:
                    return step
            return None
        if variant is SamplingVariant.FULL or any(chunk.scored_token_ids for chunk in plan.chunks):
            return None
        shape = StepShape.of(plan)
        for step in self._mixed:
            if all(size <= room for size, room in zip(shape, step.key.shape, strict=True)):
                return step
        return None
