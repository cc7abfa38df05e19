"""Selects the step shapes to capture, and the captured step that replays a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from minisgl.runner.sampling_features import SamplingVariant
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan

# Maximum number of chunks in a captured step, and the captured numbers of chunk rows. With more of
# either, the step takes longer on the device than to queue, so a graph gains nothing.
MAX_CHUNKS = 16
CHUNK_ROWS = (128, 256, 512)
# Of models with states: snapshots that the chunks of a captured step may leave.
MAX_SNAPSHOTS = 16
# Numbers of decode rows in captured steps with chunks. Few, because padding costs little there.
MIXED_BATCHES = (8, 32)
# The same of masked steps: fewer, since each is several graphs. Decode rows alone come in powers of
# two and, from here on, in three quarters of them.
MASKED_CHUNK_ROWS = (128, 512)
MASKED_MIXED_BATCHES = (32,)
MASKED_QUARTERS_FROM = 96


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The shape and the sampling variant of a captured step.

    A masked step, for any variant, is captured in two halves: up to the logits, and from there on.
    Any other is captured as a whole.
    """

    shape: StepShape
    variant: SamplingVariant = SamplingVariant.FILTERED
    masked: bool = False

    def divided(self, num_ranks: int) -> GraphKey:
        """The key of a step at least as large, of which so many ranks have equally many rows."""
        sizes = self.shape.num_decodes, self.shape.num_chunk_rows
        decodes, chunk_rows = (-(-size // num_ranks) * num_ranks for size in sizes)
        shape = self.shape._replace(num_decodes=decodes, num_chunk_rows=chunk_rows)
        return replace(self, shape=shape)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of which each half is one replay, or both together are."""

    key: GraphKey
    chunks: Tensor | None  # packed by SlotTables.upload_chunks; must be filled before each replay
    forward: Callable[[], None] | None  # None: sampling replays the forward pass, too
    samplers: Mapping[SamplingVariant, Callable[[], None]]  # none if the stage does not sample

    def replay_sampling(self, variant: SamplingVariant) -> None:
        # A single rank captures no BASIC steps.
        (self.samplers.get(variant) or self.samplers[SamplingVariant.FILTERED])()


def graph_keys(
    max_batch: int,
    max_chunk_rows: int,
    num_ranks: int = 1,
    *,
    max_snapshots: int = 0,
    max_run: int = 1,
    max_run_rows: int = 0,
) -> list[GraphKey]:
    """List the steps to capture for batches of up to `max_batch` requests; empty if that is 0.

    Largest first, so that later graphs reuse the memory of the first.
    max_chunk_rows: the prefill budget of a step. max_snapshots: that the chunks of a step leave.
    max_run: if it is more than 1, steps with runs of so many tokens are captured as well, up to
    `max_run_rows` decode rows.
    """
    sizes = max_chunk_rows, num_ranks, max_snapshots
    keys = _keys_of_run(1, max_batch, *sizes)
    if max_run > 1:
        keys += _keys_of_run(max_run, min(max_batch, max_run_rows // max_run), *sizes)
    return sorted(keys, key=_num_rows, reverse=True)


def _keys_of_run(
    run: int, max_batch: int, max_chunk_rows: int, num_ranks: int, max_snapshots: int
) -> list[GraphKey]:
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
        GraphKey(mixed_shape(size, rows, max_snapshots))
        for size in {*MIXED_BATCHES, max_batch}
        for smaller, rows in pairwise((0, *CHUNK_ROWS))
        if size <= max_batch and smaller < max_chunk_rows
    ]
    masked = _masked_shapes(max_batch, max_chunk_rows, max_snapshots)
    keys += [GraphKey(shape, masked=True) for shape in masked]
    return [replace(key, shape=key.shape._replace(run=run)) for key in keys]


def mixed_shape(num_decodes: int, num_chunk_rows: int, max_snapshots: int = 0) -> StepShape:
    """The shape of a captured step with chunks, each of which may be sampled."""
    return StepShape(num_decodes, num_chunk_rows, MAX_CHUNKS, MAX_CHUNKS, max_snapshots)


def _masked_shapes(max_batch: int, max_chunk_rows: int, max_snapshots: int) -> list[StepShape]:
    powers = [1 << bit for bit in range(max_batch.bit_length())]
    quarters = [3 * size // 4 for size in (*powers, 2 * powers[-1])]
    sizes = {*powers, *(size for size in quarters if size >= MASKED_QUARTERS_FROM), max_batch}
    return [StepShape(size) for size in sizes if size <= max_batch] + [
        mixed_shape(size, rows, max_snapshots)
        for size in {*MASKED_MIXED_BATCHES, max_batch}
        for smaller, rows in pairwise((0, *MASKED_CHUNK_ROWS))
        if size <= max_batch and smaller < max_chunk_rows
    ]


def _num_rows(key: GraphKey) -> tuple[int, SamplingVariant, bool]:
    return key.shape.num_rows, key.variant, key.masked


class StepGraphs:
    """Finds the smallest captured step that a plan fits into."""

    def __init__(
        self,
        steps: Iterable[CapturedStep] = (),
        shape_of: Callable[[StepPlan], StepShape] = StepShape.of,
    ) -> None:
        """shape_of: of a plan, which a step must have room for."""
        self.steps = tuple(steps)
        every = sorted(self.steps, key=lambda step: _num_rows(step.key))
        runs = {step.key.shape.run for step in every}
        self._of_run = {
            run: _GraphsOfRun([step for step in every if step.key.shape.run == run], shape_of)
            for run in runs
        }

    @property
    def max_batch(self) -> int:
        """The largest decode batch that is captured; 0 if none is."""
        return self._of_run[1].max_batch if 1 in self._of_run else 0

    def find(self, plan: StepPlan, variant: SamplingVariant) -> CapturedStep | None:
        """Return the smallest captured step with room for `plan`; None if it must run eagerly."""
        graphs = self._of_run.get(plan.max_run)
        return None if graphs is None else graphs.find(plan, variant)


class _GraphsOfRun:
    """The captured steps with as many rows for each decoded request."""

    def __init__(
        self, steps: Sequence[CapturedStep], shape_of: Callable[[StepPlan], StepShape]
    ) -> None:
        """steps: in order of size."""
        self._shape_of = shape_of
        self._masked = [step for step in steps if step.key.masked]
        by_size = [step for step in steps if not step.key.masked]
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
        steps = self._decodes[SamplingVariant.FILTERED]
        return steps[-1].key.shape.num_decodes if steps else 0

    def find(self, plan: StepPlan, variant: SamplingVariant) -> CapturedStep | None:
        if plan.masked_slots:
            return None if _scores(plan) else self._smallest(self._masked, plan)
        if not plan.chunks:
            num_rows = self._shape_of(plan).num_decodes
            for step in self._decodes[variant]:
                if step.key.shape.num_decodes >= num_rows:
                    return step
            return None
        if variant is SamplingVariant.FULL or _scores(plan):
            return None
        return self._smallest(self._mixed, plan)

    def _smallest(self, steps: Iterable[CapturedStep], plan: StepPlan) -> CapturedStep | None:
        """The first of `steps`, which are in order of size, with room for the plan."""
        shape = self._shape_of(plan)
        for step in steps:
            if all(size <= room for size, room in zip(shape, step.key.shape, strict=True)):
                return step
        return None


def _scores(plan: StepPlan) -> bool:
    return any(chunk.scored_token_ids or chunk.pooling for chunk in plan.chunks)
