"""Executes step plans on one device, as one rank.

Every step is a forward pass, and then sampling. Both are queued together, or the sampling later if
it needs masks of tokens that are not known yet. Either is captured or not; an unmasked step that
was captured is a single replay.

Of a pipeline, a rank executes its stage of each plan. Its rows are received on the compute lane
right before they are computed, and sent without holding it up, so that the stages work on different
steps. The last stage samples, and returns the last token of every slot to the first, which waits
for those that a plan needs (`StepPlan.lag`).

`launch` returns at once and `collect` blocks, so a caller keeps the device busy by launching step
N + 1 before it collects step N. A captured step without chunks and copies is queued by the caller
itself, which takes microseconds; one worker thread queues the others (on a CPU it runs them). Plans
take effect in launch order.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.state import distinct
from minisgl.config import Capacity
from minisgl.device.copy_lanes import CopyMark
from minisgl.distributed.addresses import Listening
from minisgl.errors import EngineStoppedError, StepError
from minisgl.kvcache.copies import ALWAYS, HostTraffic, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.moves import Done, Move
from minisgl.matcher import MaskRows, mask_words
from minisgl.runner.capture import Capture
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import CapturedStep, GraphKey, StepGraphs
from minisgl.runner.launching import LaunchThread
from minisgl.runner.pooled_rows import pool_rows
from minisgl.runner.prompt_scores import score_prompts
from minisgl.runner.queued_step import ForwardedStep, QueuedStep, StepHandle
from minisgl.runner.sampling_features import SamplingFeatures
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.tiers.tiers import Tiers

T = TypeVar("T")


class ModelRunner:
    """Runs the plans of one rank. One thread calls `launch`, `sample` and `move`; one thread calls
    `collect`, in launch order, and one `loads`.

    With several ranks, each runs the same plans and samples the same tokens. In a pipeline only
    the ranks of the last stage sample; the results of the others have no tokens.
    """

    def __init__(
        self,
        computation: Computation,
        capacity: Capacity,
        *,
        tiers: Tiers | None = None,
        load_rule: LoadRule = ALWAYS,
        disk: Disk | None = None,
    ) -> None:
        """tiers: carry out the copies of plans, with `load_rule` and `disk` for whoever
        makes them."""
        self.capacity = capacity
        self.vocab_size = computation.vocab_size
        self.lanes = computation.lanes
        self.load_rule = load_rule
        self.disk = disk
        self._tiers = tiers
        self._computation = computation
        self._capture = Capture(computation)
        self._graphs = StepGraphs()
        self._worker = LaunchThread(self.lanes.enter_thread)
        # The last plan, if it is deferred and not sampled.
        self._deferred: Future[tuple[ForwardedStep, dict[int, CopyMark]]] | None = None
        # The device may still copy from these while the host is two steps ahead, and in a pipeline
        # one more for each further stage.
        self._masks: deque[Tensor] = deque(maxlen=3 + computation.stage.pipeline.size)
        self._decode_features: tuple[tuple[int, ...], SamplingFeatures] = ((), SamplingFeatures())
        self._failed_epoch = -1

    @property
    def state_bytes(self) -> int:
        """Of the KV cache, and of what else layers keep."""
        states = distinct(self._computation.states)
        return sum(tensor.nbytes for state in states for tensor in state.tensors)

    def capture(self, keys: Sequence[GraphKey], progress: Callable[[int], None]) -> None:
        """Capture more steps, as Capture.extend does. Must be called while no step is in flight;
        a step that could not be captured runs eagerly."""
        steps = self._capture.extend(self._graphs.steps, keys, progress)
        self._graphs = StepGraphs(steps, self._computation.tables.order.shape_of)
        if self._graphs.steps:  # while they are captured, the host cannot count
            self._computation.tables.counts_lengths = False
        self.capacity = replace(self.capacity, max_graph_batch=self._graphs.max_batch)

    def new_masks(self, plan: StepPlan) -> MaskRows:
        """Pinned memory for the plan's masks, [len(masked_slots), mask_words(vocab_size)]."""
        self._masks.append(
            torch.empty(
                (len(plan.masked_slots), mask_words(self.vocab_size)),
                dtype=torch.int32,
                pin_memory=self.lanes.device.type == "cuda",
            )
        )
        return self._masks[-1].numpy().view(np.uint32)

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepHandle:
        """Queue one step. Returns at once; errors are raised by `collect`.

        masks: of the plan's masked slots; None if there are none, or the plan is deferred.
        """
        handle, replay = StepHandle(plan.step, Future()), self._quick_replay(plan)
        quick = replay is not None
        if plan.deferred and self._computation.stage.is_last:
            self._deferred = Future()
            self._worker.run(
                self._deferred,
                lambda: self._unless_failed(plan, lambda: self._queue_forward(plan, replay)),
                quick=quick,
            )
        else:
            self._worker.run(
                handle.queued,
                lambda: self._unless_failed(plan, lambda: self._queue(plan, replay, masks)),
                quick=quick,
            )
        return handle

    def sample(self, handle: StepHandle, masks: MaskRows) -> None:
        """Queue the sampling of a deferred plan, the last one launched. Returns at once."""
        is_idle, stage = self._worker.is_idle, self._computation.stage
        if not stage.is_last:
            noted: Future[None] = Future()
            self._worker.run(noted, lambda: stage.will_return(handle.step), quick=is_idle)
            return
        deferred, self._deferred = self._deferred, None
        assert deferred is not None, "only a deferred plan is sampled, and once"
        quick = is_idle and not deferred.exception() and deferred.result()[0].captured is not None

        def queue() -> QueuedStep:
            step, loads = deferred.result()
            return self._unless_failed(step.plan, lambda: self._queue_sampling(step, loads, masks))

        self._worker.run(handle.queued, queue, quick=quick)

    def _quick_replay(self, plan: StepPlan) -> CapturedStep | None:
        """The graph that the calling thread may replay itself for a plan: the worker has no earlier
        plan to queue. None if the plan takes longer to queue; it may be a replay even so."""
        if plan.chunks or plan.copies is not None or not plan.num_tokens:
            return None
        if not self._worker.is_idle:
            return None
        return self._graphs.find(plan, self._features(plan).variant)

    def may_compile(self) -> bool:
        """True while a step is being queued on a GPU, which compiles kernels at their first use."""
        return self.lanes.device.type == "cuda" and not self._worker.is_idle

    def collect(self, handle: StepHandle) -> StepResult:
        """Block until the step is done and return its tokens.

        Raises StepError if the step failed and the device is still usable, else
        EngineStoppedError.
        """
        try:
            return handle.queued.result().collect(self._computation.outputs)
        except Exception as error:
            # The traceback's frames hold the activations of the failed step; free their memory.
            traceback.clear_frames(error.__traceback__)
            raise self._explain(handle.step, error) from error

    def loads(self, handle: StepHandle) -> Iterator[int]:
        """Block for each load of a step's plan, and yield its id. Nothing for a step that fails."""
        try:
            marks = handle.queued.result().loads
        except Exception:  # `collect` raises it
            return
        for load_id, mark in marks.items():
            mark.wait()
            yield load_id

    def move(self, moves: Sequence[Move], done: Done) -> None:
        """Begin moves after the launched steps and their copies.

        Returns at once; `done` is called on any thread, unless the runner is closed before.
        """
        assert self._tiers is not None, "there are no host pages"
        self._worker.submit(self._tiers.move, moves, done)

    def traffic(self) -> HostTraffic | None:
        """The copies to and from host memory; None without a host cache."""
        return None if self._tiers is None else self._tiers.traffic()

    def listen(self, address: str, token: bytes) -> Listening:
        """Take part in moves between engines. Raises OSError. Any thread may call it, before any of
        them."""
        assert self._tiers is not None, "there are no host pages"
        return self._tiers.listen(address, token, self._computation.ranks.rank)

    def close(self) -> None:
        """Wait for the steps in flight, end the worker thread, and free graphs and KV cache."""
        self._worker.close()
        computation, stage = self._computation, self._computation.stage
        with self.lanes.compute("drain"):
            stage.drain(computation.tables.returned)
        self.lanes.synchronize()
        self._graphs = StepGraphs()
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None
        computation.states.clear()

    # -- queueing a step ---------------------------------------------------------------------------

    def _unless_failed(self, plan: StepPlan, queue: Callable[[], T]) -> T:
        """Queue a part of a step, or refuse it with StepError if an earlier step of its epoch has
        failed.

        The failed step may have left the tables half updated, so this one could write to pages of
        other requests. The scheduler has discarded it, too.
        """
        if plan.epoch <= self._failed_epoch:
            raise StepError(f"Step {plan.step} was launched after one that failed.")
        try:
            return queue()
        except Exception:
            self._failed_epoch = plan.epoch
            with contextlib.suppress(RuntimeError):  # the device is lost
                self._computation.recount()
            raise

    @torch.inference_mode()
    def _queue(
        self, plan: StepPlan, replay: CapturedStep | None, masks: MaskRows | None
    ) -> QueuedStep:
        with self.lanes.compute(f"step {plan.step}: {plan.num_tokens} tokens"):
            queue_loads = self._queue_copies(plan)
            step = self._forward(plan, replay)
            return self._queue_end(step, masks, queue_loads)

    @torch.inference_mode()
    def _queue_forward(
        self, plan: StepPlan, replay: CapturedStep | None
    ) -> tuple[ForwardedStep, dict[int, CopyMark]]:
        """Queue a deferred plan up to its sampling; returns the ends of its loads, too."""
        with self.lanes.compute(f"forward of step {plan.step}: {plan.num_tokens} tokens"):
            queue_loads = self._queue_copies(plan)
            return self._forward(plan, replay), queue_loads()

    @torch.inference_mode()
    def _queue_sampling(
        self, step: ForwardedStep, loads: dict[int, CopyMark], masks: MaskRows
    ) -> QueuedStep:
        with self.lanes.compute(f"sampling of step {step.plan.step}"):
            return self._queue_end(step, masks, lambda: loads)

    def _queue_copies(self, plan: StepPlan) -> Callable[[], dict[int, CopyMark]]:
        """Queue what the plan copies between the tiers, before its step. Returns a function
        to be called after the step: it queues the loads, and returns their ends by id."""
        if plan.copies is None:
            return dict
        assert self._tiers is not None, "plans copy nothing without a host cache"
        return self._tiers.copies.queue(plan.copies)

    def _forward(self, plan: StepPlan, replay: CapturedStep | None) -> ForwardedStep:
        """Update the tables and queue the forward pass; rows of a stage that is not the last are
        sent to the next one. replay: of `_quick_replay`."""
        computation, stage = self._computation, self._computation.stage
        computation.join(plan.joins)
        computation.tables.update(plan)
        stage.begin(plan, computation.tables.returned)
        features = self._features(plan)
        captured = replay
        if captured is None and plan.num_tokens:
            captured = self._graphs.find(plan, features.variant)
        shape = StepShape.of(plan) if captured is None else captured.key.shape
        step = ForwardedStep(plan, shape, features, captured)
        chunks = computation.tables.upload_chunks(plan, shape)
        received = stage.receive(plan, shape.num_rows, captured=captured is not None)
        if captured is not None:
            if chunks is not None and captured.chunks is not None:
                captured.chunks.copy_(chunks)
            if captured.forward is not None:
                captured.forward()
            if not stage.is_last:
                stage.send(plan, stage.outbox[: shape.num_rows].clone())
        elif plan.num_tokens:  # otherwise it has copies, grants, or joins that wait for loads
            hidden, samples = computation.forward(shape, chunks, received, plan)
            if not stage.is_last:
                stage.send(plan, hidden)
                return step
            scores = score_prompts(plan, hidden, computation)
            pooled = pool_rows(plan, hidden, computation)
            logits = computation.logits(hidden, samples)
            return replace(
                step, logits=logits, samples=samples, prompt_scores=scores, pooled=pooled
            )
        return step

    def _queue_end(
        self,
        step: ForwardedStep,
        masks: MaskRows | None,
        queue_loads: Callable[[], dict[int, CopyMark]],
    ) -> QueuedStep:
        """Queue the sampling, which only the last stage does, and the loads that follow the step.

        queue_loads: of `_queue_copies`.
        """
        computation, plan, shape = self._computation, step.plan, step.shape
        if not computation.stage.is_last:
            return QueuedStep(
                plan.step, self.lanes.mark(), step.captured is not None, queue_loads()
            )
        if masks is not None:
            computation.sampler.mask(plan.masked_slots, self.lanes.upload_masks(masks))
        ring_entry = 0
        if step.captured is not None:
            ring_entry = computation.outputs.open()
            step.captured.replay_sampling(step.features.variant)
        elif step.logits is not None and step.samples is not None:
            ring_entry = computation.outputs.open()
            computation.sample(step.logits, step.samples, step.features)
        elif step.samples is not None:  # chunks that sample nothing
            computation.draft(step.samples, step.samples.slots, step.features)
        computation.stage.return_tokens(plan, computation.tables.returned)
        wants_logprobs = step.features.num_logprobs >= 0
        return QueuedStep(
            step=plan.step,
            done=self.lanes.mark(),
            captured=step.captured is not None,
            loads=queue_loads(),
            ring_entry=ring_entry,
            parts=computation.tables.order.sampled_rows(plan, shape),
            num_logprobs=computation.sampler.logprobs_wanted(plan.sampled_slots)
            if wants_logprobs
            else (),
            run=shape.run,
            prompt_scores=step.prompt_scores,
            pooled=step.pooled,
        )

    def _features(self, plan: StepPlan) -> SamplingFeatures:
        """The features of the sampled rows, cached while the decode slots are the same object."""
        sampler = self._computation.sampler
        if plan.chunks:
            return sampler.features(plan.sampled_slots)
        slots, features = self._decode_features
        if slots is not plan.decode_slots:
            features = sampler.features(plan.decode_slots)
            self._decode_features = plan.decode_slots, features
        return features

    def _explain(self, step: int, error: Exception) -> StepError | EngineStoppedError:
        if isinstance(error, torch.OutOfMemoryError):
            return StepError(
                f"Step {step} ran out of device memory; lower --memory-ratio, "
                "--max-prefill-length or --max-running-requests."
            )
        try:
            self.lanes.synchronize()
        except RuntimeError:  # a sticky error: the device is unusable
            return EngineStoppedError(f"The GPU failed in step {step}: {error}")
        return StepError(f"Step {step} failed: {type(error).__name__}: {error}")
