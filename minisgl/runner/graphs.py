"""Selects the step shapes to capture, and the captured step that replays a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torch import Tensor

from minisgl.config import ResolvedConfig
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
# The same of masked steps: fewer, since each is several graphs; and of those with adapters, which
# come on top of those without. Decode rows alone come in powers of two and, from here on, in three
# quarters of them.
MASKED_CHUNK_ROWS = (128, 512)
MASKED_MIXED_BATCHES = (32,)
MASKED_QUARTERS_FROM = 96

# Of captured steps: the variant of those of unmasked decode rows alone, or what others are.
Kind = SamplingVariant | Literal["masked", "mixed"]


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


def graph_keys(config: ResolvedConfig, *, turns: bool = False) -> list[GraphKey]:
    """The steps to capture, also those of runs of tokens; none if the largest batch is 0.

    Largest first, so that later graphs reuse the memory of the first. Stages agree on them, also
    those without states. turns: rows may be rotated by other positions than theirs.
    """
    max_run, max_batch = config.max_run, config.cuda_graph_max_bs
    keys = _keys_of_run(config, 1, max_batch, adapts=turns)
    if max_run > 1:
        keys += _keys_of_run(config, max_run, min(max_batch, config.max_run_rows // max_run))
    keys.sort(key=_num_rows, reverse=True)
    return list(dict.fromkeys(key.divided(config.num_attending) for key in keys))


def _keys_of_run(
    config: ResolvedConfig, run: int, max_batch: int, *, adapts: bool = False
) -> list[GraphKey]:
    if max_batch == 0:
        return []
    max_snapshots = MAX_SNAPSHOTS if config.num_snapshots != 0 else 0
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 32), max_batch}
    powers = {1 << bit for bit in range(max_batch.bit_length())} | {max_batch}
    plain = (
        [SamplingVariant.FILTERED]
        if config.tp == 1
        else [SamplingVariant.BASIC, SamplingVariant.FILTERED]
    )
    keys = [GraphKey(StepShape(n), variant) for n in sizes if n <= max_batch for variant in plain]
    keys += [GraphKey(StepShape(size), SamplingVariant.FULL) for size in powers]

    def mixed(batches: Sequence[int], chunk_rows: Sequence[int]) -> list[StepShape]:
        return [
            mixed_shape(size, rows, max_snapshots)
            for size in {*batches, max_batch}
            for smaller, rows in pairwise((0, *chunk_rows))
            if size <= max_batch and smaller < config.max_prefill_length
        ]

    keys += [GraphKey(shape) for shape in mixed(MIXED_BATCHES, CHUNK_ROWS)]
    quarters = (3 << bit for bit in range(max_batch.bit_length()))
    masked = {*powers, *(size for size in quarters if MASKED_QUARTERS_FROM <= size <= max_batch)}
    masked_shapes = [StepShape(size) for size in masked]
    masked_shapes += mixed(MASKED_MIXED_BATCHES, MASKED_CHUNK_ROWS)
    keys += [GraphKey(shape, masked=True) for shape in masked_shapes]
    if config.max_loras or adapts:
        few = [key for key in keys if key.shape in masked_shapes]
        keys += [replace(key, shape=key.shape._replace(adapted=True)) for key in few]
    return [replace(key, shape=key.shape._replace(run=run)) for key in keys]


def mixed_shape(num_decodes: int, num_chunk_rows: int, max_snapshots: int = 0) -> StepShape:
    """The shape of a captured step with chunks, each of which may be sampled."""
    return StepShape(num_decodes, num_chunk_rows, MAX_CHUNKS, MAX_CHUNKS, max_snapshots)


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
        self._shape_of = shape_of
        # In order of size, by the rows of each decoded request, whether some have adapters, and the
        # kind.
        self._of_kind: defaultdict[tuple[int, bool, Kind], list[CapturedStep]] = defaultdict(list)
        for step in sorted(self.steps, key=lambda step: _num_rows(step.key)):
            kind: Kind = step.key.variant if step.chunks is None else "mixed"
            run, adapted = step.key.shape.run, step.key.shape.adapted
            self._of_kind[run, adapted, "masked" if step.key.masked else kind].append(step)
        # A single rank captures no BASIC steps.
        for of_run in {(step.key.shape.run, step.key.shape.adapted) for step in self.steps}:
            if not self._of_kind[*of_run, SamplingVariant.BASIC]:
                filtered = self._of_kind[*of_run, SamplingVariant.FILTERED]
                self._of_kind[*of_run, SamplingVariant.BASIC] = filtered

    @property
    def max_batch(self) -> int:
        """The largest decode batch that is captured; 0 if none is."""
        steps = self._of_kind.get((1, False, SamplingVariant.FILTERED))
        return steps[-1].key.shape.num_decodes if steps else 0

    def find(self, plan: StepPlan, variant: SamplingVariant) -> CapturedStep | None:
        """Return the smallest captured step with room for `plan`; None if it must run eagerly."""
        if any(part.reads_rows or part.is_eager for part in plan.parts):
            return None
        masked = any(part.changes_sampling for part in plan.parts)
        shape = self._shape_of(plan)
        if not (masked or plan.chunks):
            for step in self._of_kind.get((plan.max_run, shape.adapted, variant), ()):
                if step.key.shape.num_decodes >= shape.num_decodes:
                    return step
            return None
        kind: Kind = "masked" if masked else "mixed"
        if kind == "mixed" and variant is SamplingVariant.FULL:
            return None
        for step in self._of_kind.get((plan.max_run, shape.adapted, kind), ()):
            if all(size <= room for size, room in zip(shape, step.key.shape, strict=True)):
                return step
        return None
