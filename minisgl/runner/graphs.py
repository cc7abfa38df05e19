"""Captured steps: which shapes are captured, and which of them a plan runs as."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from minisgl.runner.step_inputs import StepShape
from minisgl.scheduler.plan import StepPlan

# Chunks that a captured step has room for, and their rows. With more of either the device needs
# longer for the step than the host to queue it, so that a graph would gain nothing.
MAX_CHUNKS = 16
CHUNK_ROWS = (128, 256, 512)
# Decode rows beside chunks; padded ones cost little there.
MIXED_BATCHES = (8, 32)


class Variant(enum.IntEnum):
    """What the rows of a step may ask of sampling. Each can do what those before it can."""

    UNFILTERED = 0  # greedy or with a temperature; its own only where several ranks share the work
    PLAIN = 1  # top_k, top_p and min_p too
    FULL = 2  # and penalties, logit bias and logprobs


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is captured for."""

    shape: StepShape
    variant: Variant = Variant.PLAIN


@dataclass(frozen=True, slots=True)
class CapturedStep:
    key: GraphKey
    chunks: Tensor | None  # packed as SlotTables.upload_chunks does; to be filled before a replay
    replay: Callable[[], None]


def graph_keys(max_batch: int, max_chunk_rows: int, num_ranks: int = 1) -> list[GraphKey]:
    """What to capture for batches up to `max_batch`, largest first: the memory of a large graph
    then serves all that follow."""
    if max_batch == 0:
        return []
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 32), max_batch}
    powers = {1 << bit for bit in range(max_batch.bit_length())} | {max_batch}
    plain = [Variant.PLAIN] if num_ranks == 1 else [Variant.UNFILTERED, Variant.PLAIN]
    keys = [GraphKey(StepShape(n), variant) for n in sizes if n <= max_batch for variant in plain]
    keys += [GraphKey(StepShape(size), Variant.FULL) for size in powers]
    keys += [
        GraphKey(StepShape(size, rows, MAX_CHUNKS))
        for size in {*MIXED_BATCHES, max_batch}
        for smaller, rows in pairwise((0, *CHUNK_ROWS))
        if size <= max_batch and smaller < max_chunk_rows
    ]
    return sorted(keys, key=_num_rows, reverse=True)


def _num_rows(key: GraphKey) -> tuple[int, Variant]:
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
            for variant in Variant
        }
        # One rank captures nothing for less than PLAIN.
        self._decodes[Variant.UNFILTERED] = (
            self._decodes[Variant.UNFILTERED] or self._decodes[Variant.PLAIN]
        )

    @property
    def max_batch(self) -> int:
        """The largest batch whose decoding is captured."""
        steps = self._decodes[Variant.PLAIN]
        return steps[-1].key.shape.num_decodes if steps else 0

    def find(self, plan: StepPlan, variant: Variant) -> CapturedStep | None:
        """None: the step is to be run eagerly."""
        if not plan.chunks:
            num_rows = len(plan.decode_slots)
            for step in self._decodes[variant]:
                if step.key.shape.num_decodes >= num_rows:
                    return step
            return None
        if variant is Variant.FULL or any(chunk.scored_token_ids for chunk in plan.chunks):
            return None
        shape = StepShape.of(plan)
        for step in self._mixed:
            if all(size <= room for size, room in zip(shape, step.key.shape, strict=True)):
                return step
        return None
