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
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.state import distinct
from minisgl.config import Capacity
from minisgl.distributed.addresses import Listening
from minisgl.errors import EngineStoppedError, StepError
from minisgl.kvcache.copies import ALWAYS, HostTraffic, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.moves import Done, Move
from minisgl.lora.files import AdapterReader
from minisgl.matcher import MaskRows, mask_words
from minisgl.models.refilling import Refilling
from minisgl.parts.device_part import DeviceParts
from minisgl.runner.capture import Capture
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import CapturedStep, GraphKey, StepGraphs
from minisgl.runner.launching import LaunchThread
from minisgl.runner.queued_step import ForwardedStep, QueuedStep, StepHandle
from minisgl.runner.sampling_features import SamplingFeatures
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.tiers.tiers import Tiers


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
        parts: DeviceParts,
        *,
        tiers: Tiers | None = None,
        load_rule: LoadRule = ALWAYS,
        disk: Disk | None = None,
        adapters: AdapterReader | None = None,
        weights: Refilling | None = None,
    ) -> None:
        """tiers: the memories behind the device, with `load_rule` and `disk` for whoever plans
        copies. adapters: None where there is no room for any. weights: what takes them anew."""
        self.capacity = capacity
        self.vocab_size = computation.vocab_size
        self.lanes = computation.lanes
        self.load_rule = load_rule
        self.disk = disk
        self.adapters = adapters
        self.weights = weights
        self._parts = parts
        self._tiers = tiers
        self._computation = computation
        self._capture = Capture(computation)
        self._graphs = StepGraphs()
        self._worker = LaunchThread(self.lanes.enter_thread)
        # The last plan, if it is deferred and not sampled.
        self._deferred: Future[ForwardedStep] | None = None
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
        """Capture more steps, as Capture.extend does, or forget them if there are no keys. No step
        may be in flight; one that could not be captured runs eagerly."""
        steps = self._capture.extend(self._graphs.steps if keys else (), keys, progress)
        self._graphs = StepGraphs(steps, self._computation.tables.order.shape_of)
        if self._graphs.steps:  # while they are captured, the host cannot count
            self._computation.tables.counts_lengths = False
        self.capacity = replace(self.capacity, max_graph_batch=self._graphs.max_batch)

    def new_masks(self, step: int, num_rows: int) -> MaskRows:
        """Pinned memory for the masks of a step, [num_rows, mask_words(vocab_size)]."""
        self._masks.append(
            torch.empty(
                (num_rows, mask_words(self.vocab_size)),
                dtype=torch.int32,
                pin_memory=self.lanes.device.type == "cuda",
            )
        )
        return self._masks[-1].numpy().view(np.uint32)

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepHandle:
        """Queue one step. Returns at once; errors are raised by `collect`.

        masks: if a part of the plan has any, and the plan is not deferred.
        """
        handle, replay = StepHandle(plan.step, Future()), self._quick_replay(plan)
        quick = replay is not None
        if plan.deferred and self._computation.stage.is_last:
            self._deferred = Future()
            forward = partial(self._queue_forward, plan, replay)
            self._worker.run(self._deferred, forward, quick=quick)
        else:
            whole = partial(self._queue, plan, replay, masks)
            self._worker.run(handle.queued, whole, quick=quick)
        return handle

    def sample(self, handle: StepHandle, masks: MaskRows) -> None:
        """Queue the sampling of a deferred plan, the last one launched. Returns at once."""
        is_idle, stage = self._worker.is_idle, self._computation.stage
        if not stage.is_last:
            noted: Future[None] = Future()
            self._worker.run(noted, partial(stage.will_return, handle.step), quick=is_idle)
            return
        deferred, self._deferred = self._deferred, None
        assert deferred is not None, "only a deferred plan is sampled, and once"
        quick = is_idle and not deferred.exception() and deferred.result().captured is not None
        rest = partial(self._queue_sampling, deferred, masks)
        self._worker.run(handle.queued, rest, quick=quick)

    def _quick_replay(self, plan: StepPlan) -> CapturedStep | None:
        """The graph that the calling thread may replay itself for a plan: the worker has no earlier
        plan to queue. None if the plan takes longer to queue; it may be a replay even so."""
        if plan.chunks or not plan.num_tokens or not self._worker.is_idle:
            return None
        if not all(part.is_quick for part in plan.parts):
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
            parts = handle.queued.result().parts
        except Exception:  # `collect` raises it
            return
        for part in parts:
            yield from part.follow()

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
        return self._tiers.listen(address, token)

    def close(self) -> None:
        """Wait for the steps in flight, end the worker thread, and free graphs and KV cache."""
        self._worker.close()
        if self.weights is not None:
            self.weights.close()  # first, since nothing else ends where it waits for a trainer
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

    @contextlib.contextmanager
    def _queueing(self, plan: StepPlan) -> Iterator[None]:
        """For a half of a step, or all of it. Raises StepError if an earlier step of the epoch has
        failed.

        The failed step may have left the tables half updated, so this one could write to pages of
        other requests. The scheduler has discarded it, too.
        """
        if plan.epoch <= self._failed_epoch:
            raise StepError(f"Step {plan.step} was launched after one that failed.")
        try:
            yield
        except Exception:
            self._failed_epoch = plan.epoch
            with contextlib.suppress(RuntimeError):  # the device is lost
                self._computation.recount()
            raise

    @torch.inference_mode()
    def _queue(
        self, plan: StepPlan, replay: CapturedStep | None, masks: MaskRows | None
    ) -> QueuedStep:
        name = f"step {plan.step}: {plan.num_tokens} tokens"
        with self._queueing(plan), self.lanes.compute(name):
            step = self._forward(plan, replay)
            queued = self._queue_end(step, masks)
            for part in step.parts:
                part.end()
            return queued

    @torch.inference_mode()
    def _queue_forward(self, plan: StepPlan, replay: CapturedStep | None) -> ForwardedStep:
        """Queue a deferred plan up to its sampling, and what follows it."""
        name = f"forward of step {plan.step}: {plan.num_tokens} tokens"
        with self._queueing(plan), self.lanes.compute(name):
            step = self._forward(plan, replay)
            for part in step.parts:
                part.end()
            return step

    @torch.inference_mode()
    def _queue_sampling(self, forwarded: Future[ForwardedStep], masks: MaskRows) -> QueuedStep:
        step = forwarded.result()
        name = f"sampling of step {step.plan.step}"
        with self._queueing(step.plan), self.lanes.compute(name):
            return self._queue_end(step, masks)

    def _forward(self, plan: StepPlan, replay: CapturedStep | None) -> ForwardedStep:
        """Update the tables and queue the forward pass; rows of a stage that is not the last are
        sent to the next one. replay: of `_quick_replay`."""
        computation, stage = self._computation, self._computation.stage
        parts = [self._parts[type(part)](part) for part in plan.parts]
        for part in parts:
            part.begin()
        computation.join(plan.joins)
        computation.tables.update(plan)
        stage.begin(plan, computation.tables.returned)
        features = self._features(plan)
        captured = replay
        if captured is None and plan.num_tokens:
            captured = self._graphs.find(plan, features.variant)
        shape = StepShape.of(plan) if captured is None else captured.key.shape
        step = ForwardedStep(plan, shape, features, captured, parts)
        chunks = computation.tables.upload_chunks(plan, shape)
        received = stage.receive(plan, shape.num_rows, captured=captured is not None)
        if captured is not None:
            if chunks is not None and captured.chunks is not None:
                captured.chunks.copy_(chunks)
            if captured.forward is not None:
                captured.forward()
            if not stage.is_last:
                stage.send(plan, stage.outbox[: shape.num_rows].clone())
        elif plan.num_tokens:  # otherwise it has parts, grants, or joins that wait for loads
            hidden, samples = computation.forward(shape, chunks, received, plan)
            if not stage.is_last:
                stage.send(plan, hidden)
                return step
            logits = computation.logits(hidden, samples)
            if any(part.reads_rows for part in plan.parts):
                order = computation.tables.order
                first_rows, runs = order.first_rows(plan), order.runs(plan, shape)
                for part in parts:
                    part.read_rows(hidden, first_rows)
                    if logits is not None:
                        part.read_logits(logits, runs)
            return replace(step, logits=logits, samples=samples)
        return step

    def _queue_end(self, step: ForwardedStep, masks: MaskRows | None) -> QueuedStep:
        """Queue the sampling, which only the last stage does."""
        computation, plan, shape = self._computation, step.plan, step.shape
        if not computation.stage.is_last:
            is_captured = step.captured is not None
            return QueuedStep(plan.step, self.lanes.mark(), is_captured, step.parts)
        if masks is not None:
            for part in step.parts:
                part.change_sampling(masks)
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
            parts=step.parts,
            ring_entry=ring_entry,
            sampled=computation.tables.order.sampled_rows(plan, shape),
            num_logprobs=computation.sampler.logprobs_wanted(plan.sampled_slots)
            if wants_logprobs
            else (),
            run=shape.run,
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
