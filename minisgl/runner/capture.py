"""Captures the steps of a computation as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.device.lanes import GraphPool
from minisgl.errors import CaptureError, in_one_line
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import CapturedStep, GraphKey
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.sampling_features import VARIANT_FEATURES, SamplingFeatures, SamplingVariant
from minisgl.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)


class Capture:
    """Captures steps that contain padding only, in memory that all of their graphs share."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._pool: GraphPool = None

    def extend(
        self,
        captured: Iterable[CapturedStep],
        keys: Sequence[GraphKey],
        progress: Callable[[int], None],
    ) -> list[CapturedStep]:
        """Capture more steps, in the order of `keys`; `progress` gets the number done.

        A step that does not fit into memory is left out, as is a masked step that cannot be
        captured; with several ranks the error is raised instead. Raises CaptureError.
        """
        computation, steps = self._computation, list(captured)
        stage = computation.stage
        if not steps:
            with torch.inference_mode(), computation.lanes.compute("no rows"):
                computation.tables.update(StepPlan(0, ()))
        if stage.is_last and any(key.masked or key.variant is SamplingVariant.FULL for key in keys):
            computation.sampler.tables.allocate_history()
        stage.make_boxes(max((key.shape.num_rows for key in keys), default=0))
        for done, key in enumerate(keys):
            progress(done)
            if not steps:
                self._pool = computation.lanes.graph_pool()  # one ends with the last of its graphs
            try:
                steps.append(self._same_rows(key, steps) or self._capture(key))
            except (RuntimeError, CaptureError) as error:
                out_of_memory = isinstance(error, torch.OutOfMemoryError)
                several_ranks = computation.ranks.size > 1 or stage.pipeline.size > 1
                if not (out_of_memory or key.masked) or several_ranks:
                    raise  # other ranks may wait for this one in the same step
                if not out_of_memory:
                    why = in_one_line(error.__cause__ or error)
                    logger.warning("A masked step of %s runs without a graph: %s", key.shape, why)
                computation.recount()
        progress(len(keys))
        computation.lanes.synchronize()
        return steps

    def _same_rows(self, key: GraphKey, steps: Iterable[CapturedStep]) -> CapturedStep | None:
        """The captured step that computes the same rows; None on the last stage, which samples."""
        if self._computation.stage.is_last:
            return None
        same = (replace(step, key=key) for step in steps if step.key.shape == key.shape)
        return next(same, None)

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedStep:
        """Run the step once, to compile its kernels; then capture it.

        The logits between two halves stay in the memory that all graphs share, which is safe:
        nothing is replayed between the halves. So sampling is captured while the logits are alive,
        and only then.
        """
        computation, lanes = self._computation, self._computation.lanes
        with lanes.compute("capture"):
            step = self._uncaptured(key)
            if step.forward is not None:
                step.forward()
            for sample in step.samplers.values():
                computation.outputs.open()
                sample()
        return replace(
            step,
            forward=None if step.forward is None else self._captured(step.forward),
            samplers={variant: self._captured(work) for variant, work in step.samplers.items()},
        )

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._computation.lanes.capture(work, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(in_one_line(error)) from error

    def _uncaptured(self, key: GraphKey) -> CapturedStep:
        """The step as functions to be captured."""
        computation, shape = self._computation, key.shape
        stage = computation.stage
        packed_chunks = computation.tables.upload_chunks(StepPlan(0, ()), shape)
        chunks = None if packed_chunks is None else packed_chunks.clone()
        half: list[tuple[Tensor, SampleRows]] = []

        def forward() -> tuple[Tensor, SampleRows]:
            return computation.forward(shape, chunks, stage.boxed_rows(shape.num_rows))

        def logits() -> tuple[Tensor, SampleRows]:
            hidden, samples = forward()
            logits = computation.logits(hidden, samples)
            assert logits is not None
            return logits, samples

        def rows() -> None:
            hidden, _ = forward()
            stage.outbox[: len(hidden)].copy_(hidden)

        def whole() -> None:
            computation.sample(*logits(), VARIANT_FEATURES[key.variant])

        def first_half() -> None:
            half[:] = [logits()]

        def second_half(features: SamplingFeatures) -> Callable[[], None]:
            return lambda: computation.sample(*half[0], features._replace(masked=True))

        if not stage.is_last:
            return CapturedStep(key, chunks, rows, {})
        if not key.masked:
            return CapturedStep(key, chunks, None, {key.variant: whole})
        samplers = {
            variant: second_half(features)
            for variant, features in VARIANT_FEATURES.items()
            if variant is not SamplingVariant.BASIC or computation.ranks.size > 1
        }
        return CapturedStep(key, chunks, first_half, samplers)
