"""A step whose work is queued on the device, until its result is read."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, repeat

from torch import Tensor

from minisgl.device.lanes import EventMark
from minisgl.kernels.sampling.listed import list_logprobs
from minisgl.parts.device_part import StepPart
from minisgl.request import TokenLogprobs
from minisgl.runner.graphs import CapturedStep
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.sampling_features import SamplingFeatures
from minisgl.runner.step_outputs import StepOutputs
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """The end of a step's work, and where its outputs will be."""

    step: int
    done: EventMark
    captured: bool
    parts: Sequence[StepPart]  # of the plan
    ring_entry: int = 0
    # Rows of the entry that are sampled, in the order of the plan; last those of chunks.
    sampled: tuple[range, ...] = ()
    num_logprobs: Sequence[int | None] = ()  # requested by each sampled slot; empty if none
    run: int = 1  # rows per request in the others; the ring says how many are valid

    def collect(self, outputs: StepOutputs) -> StepResult:
        """Block until the step is done, and read its outputs."""
        self.done.wait()
        parts: Sequence[range] = self.sampled
        num_logprobs, run_lengths, num_drafted = self.num_logprobs, None, None
        if self.run > 1:
            *decodes, chunks = parts
            starts = [*chain.from_iterable(part[:: self.run] for part in decodes)]
            runs = [start // self.run for start in starts]
            run_lengths, num_drafted = outputs.runs(self.ring_entry, runs)
            pairs = zip(starts, run_lengths, strict=True)
            parts = [*(range(first, first + n) for first, n in pairs), chunks]
            run_lengths += [1] * len(chunks)
            num_drafted += [0] * len(chunks)
            num_logprobs = [*chain.from_iterable(map(repeat, num_logprobs, run_lengths))]
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for part in filter(len, parts):
            first = len(token_ids)
            part_ids = outputs.token_ids(self.ring_entry, part)
            token_ids += part_ids
            wanted = num_logprobs[first : len(token_ids)]
            if any(num is not None for num in wanted):
                scores = outputs.scores(self.ring_entry, part)
                listed = list_logprobs(part_ids, scores, wanted)
                logprobs |= {first + row: entry for row, entry in listed.items()}
        for step_part in self.parts:
            step_part.add_logprobs(logprobs, run_lengths)
        return StepResult(
            self.step,
            token_ids,
            logprobs,
            [part.outcome() for part in self.parts],
            self.captured,
            run_lengths,
            num_drafted,
        )


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A step whose forward pass is queued, and not its sampling. If it was captured as a whole,
    nothing is queued."""

    plan: StepPlan
    shape: StepShape
    features: SamplingFeatures
    captured: CapturedStep | None
    parts: Sequence[StepPart]
    logits: Tensor | None = None  # of `samples`; None if there are none, or a graph has them
    samples: SampleRows | None = None


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be passed to `collect` once, and to `loads` if its plan has any."""

    step: int
    queued: Future[QueuedStep]
