"""Executes step plans on one device, as one rank.

Of a pipeline, that is the rank's stage of each plan. Its rows are received on the compute lane
right before they are computed, and sent without holding it up, so that the stages work on different
steps. The last stage samples, and returns the last token of every slot to the first, which waits
for those that a plan needs (`StepPlan.lag`).

`launch` returns at once and `collect` blocks, so a caller keeps the device busy by launching step
N + 1 before it collects step N. A step that was captured is queued by the caller itself, which
takes microseconds; one worker thread queues the others (on a CPU it runs them). Plans take effect
in launch order.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import Attention, LayerKV
from minisgl.config import Capacity
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.errors import EngineStoppedError, StepError
from minisgl.kernels.sampling.reference import TokenScores, top_logprobs
from minisgl.kvcache.copies import ALWAYS, HostTraffic, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.store import Done, Transfer
from minisgl.matcher import MaskRows, mask_words
from minisgl.models.transformer import CausalLM
from minisgl.request import TokenLogprobs
from minisgl.runner.copy_lanes import CopyMark
from minisgl.runner.graphs import MAX_CHUNKS, CapturedStep, GraphKey, StepGraphs
from minisgl.runner.host_cache import HostCache
from minisgl.runner.lanes import EventMark, HostCopy, Lanes
from minisgl.runner.sampler import Sampler, list_logprobs
from minisgl.runner.sampling_features import VARIANT_FEATURES, SamplingFeatures, SamplingVariant
from minisgl.runner.stage import Stage, whole_model
from minisgl.runner.step_inputs import ChunkTensors, SampleRows, SlotTables, StepShape
from minisgl.runner.step_outputs import RING_SIZE, StepOutputs
from minisgl.scheduler.plan import StepPlan, StepResult

# Maximum size of the float32 logits of prompt rows that are scored together.
logger = logging.getLogger(__name__)

MAX_SCORED_BYTES = 256 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Scored:
    """Prompt logprobs from the rows of one chunk, in blocks of rows."""

    chunk: int  # index in the plan
    token_ids: list[int]
    num_logprobs: int
    blocks: list[TokenScores]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose work is queued on the device."""

    done: EventMark
    ring_entry: int
    parts: tuple[range, ...]  # batch rows that are sampled, in the order of the plan
    num_logprobs: Sequence[int | None]  # requested by each sampled row; empty if none
    scored: list[_Scored]
    download: HostCopy | None  # of `scored`
    captured: bool
    loads: dict[int, CopyMark]  # the ends of the loads that the plan carries, by id


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A masked step whose forward pass is queued, and not its sampling."""

    plan: StepPlan
    shape: StepShape
    features: SamplingFeatures
    captured: CapturedStep | None
    logits: Tensor | None  # of the sampled rows; None where a graph has them
    samples: SampleRows | None
    scored: list[_Scored]
    loads: dict[int, CopyMark]


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be passed to `collect` once, and before that to `loads`."""

    step: int
    queued: Future[_Queued]


class ModelRunner:
    """Runs the plans of one rank. One thread calls `launch`; one thread calls `collect`, in launch
    order.

    With several ranks, each runs the same plans and samples the same tokens. In a pipeline only
    the ranks of the last stage sample; the results of the others have no tokens.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv: list[LayerKV],
        capacity: Capacity,
        vocab_size: int,
        attention: Attention,
        captured_attention: Attention,
        lanes: Lanes,
        ranks: Communicator = SINGLE_RANK,
        stage: Stage | None = None,
        host_cache: HostCache | None = None,
        load_rule: LoadRule = ALWAYS,
        disk: Disk | None = None,
    ) -> None:
        """captured_attention: for captured steps, whose chunks only the device knows. ranks: of
        the stage. host_cache: carries out the copies of plans, with `load_rule` and `disk` for
        whoever makes them."""
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.lanes = lanes
        self.load_rule = load_rule
        self.disk = disk
        self._host_cache = host_cache
        self._model = model
        self._kv = kv
        self._attention = attention
        self._captured_attention = captured_attention
        self._ranks = ranks
        self._stage = stage = stage or whole_model()
        self._received: Tensor | None = None  # for the forward pass to be queued next
        self._sampler = Sampler(
            capacity.num_slots, vocab_size, lanes.device, ranks=ranks, samples=stage.is_last
        )
        self._tables = SlotTables(
            num_slots=capacity.num_slots,
            max_pages=-(-capacity.max_seq_len // capacity.page_size),
            page_size=capacity.page_size,
            prompt_lengths=self._sampler.num_prompt_tokens,
            lanes=lanes,
        )
        num_stages = stage.pipeline.size
        num_rows, ring_size = capacity.num_slots + MAX_CHUNKS, RING_SIZE + num_stages - 1
        self._outputs = StepOutputs(num_rows, lanes.device, ring_size)
        self._graphs = StepGraphs()
        self._graph_pool = lanes.graph_pool()
        self._worker = ThreadPoolExecutor(1, "minisgl-runner", lanes.enter_thread)
        self._last_on_worker: Future[Any] | None = None
        self._forwarded: Future[_Forwarded] | None = None  # of the last plan, if not sampled
        # The device may still copy from these while the host is two steps ahead, and in a pipeline
        # one more for each further stage.
        self._masks: deque[Tensor] = deque(maxlen=3 + num_stages)
        self._decode_features: tuple[tuple[int, ...], SamplingFeatures] = ((), SamplingFeatures())
        self._failed_epoch = -1

    @property
    def kv_bytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self._kv)

    def capture(self, keys: Sequence[GraphKey], progress: Callable[[int], None]) -> None:
        """Capture more steps, in the order of `keys`; `progress` gets the number done.

        Must be called while no step is in flight. A step that does not fit into memory is skipped
        and will run eagerly, as does a masked step that cannot be captured; with several ranks the
        error is raised instead.
        """
        samples = self._stage.is_last
        if samples and any(key.masked or key.variant is SamplingVariant.FULL for key in keys):
            self._sampler.allocate_history()
        self._stage.make_boxes(max((key.shape.num_rows for key in keys), default=0))
        steps = list(self._graphs.steps)
        for done, key in enumerate(keys):
            progress(done)
            try:
                if not samples:
                    steps.append(self._capture_rows(key, steps))
                else:
                    steps.append(self._capture_masked(key) if key.masked else self._capture(key))
            except RuntimeError as error:
                out_of_memory = isinstance(error, torch.OutOfMemoryError)
                several_ranks = self._ranks.size > 1 or self._stage.pipeline.size > 1
                if not (out_of_memory or key.masked) or several_ranks:
                    raise  # other ranks may wait for this one in the same step
                if not out_of_memory:
                    logger.warning("A masked step of %s runs without a graph: %s", key.shape, error)
                self._recount()
        progress(len(keys))
        self.lanes.synchronize()
        self._graphs = StepGraphs(steps)
        # The host cannot count the lengths of slots while steps are captured.
        self._tables.counts_lengths = not self._graphs.max_batch
        self.capacity = replace(self.capacity, max_graph_batch=self._graphs.max_batch)

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedStep:
        """Run the step once, with padding only, to compile its kernels; then capture it."""
        features = VARIANT_FEATURES[key.variant]
        chunks: Tensor | None = None

        def run() -> None:
            self._receive_captured(key)
            self._run(key.shape, chunks, key.shape.num_chunks, features)

        with self.lanes.compute("capture"):
            chunks = self._no_chunks(key)
            self._outputs.open()
            run()
        return CapturedStep(key, chunks, self.lanes.capture(run, self._graph_pool))

    @torch.inference_mode()
    def _capture_rows(self, key: GraphKey, steps: Iterable[CapturedStep]) -> CapturedStep:
        """As `_capture`, of a stage that does not sample, whose work is that of the shape alone."""
        for step in steps:
            if step.key.shape == key.shape:
                return replace(step, key=key)
        chunks: Tensor | None = None

        def run() -> None:
            self._receive_captured(key)
            rows, _, _ = self._forward(key.shape, chunks, key.shape.num_chunks)
            self._stage.outbox[: len(rows)].copy_(rows)

        with self.lanes.compute("capture"):
            chunks = self._no_chunks(key)
            run()
        return CapturedStep(key, chunks, self.lanes.capture(run, self._graph_pool))

    def _no_chunks(self, key: GraphKey) -> Tensor | None:
        """The chunks of a step that is captured with padding only."""
        if not key.shape.num_chunks:
            return None
        nothing, size = StepPlan(0, ()), key.shape.num_chunks
        return self._tables.upload_chunks(nothing, key.shape, size).clone()

    def _receive_captured(self, key: GraphKey) -> None:
        """Let the forward pass that is captured read the inbox."""
        if not self._stage.is_first:
            self._received = self._stage.inbox[: key.shape.num_rows]

    @torch.inference_mode()
    def _capture_masked(self, key: GraphKey) -> CapturedStep:
        """As `_capture`, of the two halves of a masked step.

        The logits stay in the memory that all graphs share, which is safe: nothing is replayed
        between the halves. So sampling is captured while the logits are alive, and only then.
        """
        chunks: Tensor | None = None
        half: list[tuple[Tensor, SampleRows]] = []  # the logits, and their rows

        def forward() -> None:
            self._receive_captured(key)
            _, logits, samples = self._forward(key.shape, chunks, key.shape.num_chunks)
            assert logits is not None
            half[:] = [(logits, samples)]

        def sampling(features: SamplingFeatures) -> Callable[[], None]:
            return lambda: self._sample(*half[0], features)

        variants = {
            variant: sampling(features._replace(masked=True))
            for variant, features in VARIANT_FEATURES.items()
            if variant is not SamplingVariant.BASIC or self._ranks.size > 1
        }
        with self.lanes.compute("capture"):
            chunks = self._no_chunks(key)
            forward()
            for sample in variants.values():
                self._outputs.open()
                sample()
        replay = self.lanes.capture(forward, self._graph_pool)
        samplers = {
            variant: self.lanes.capture(sample, self._graph_pool)
            for variant, sample in variants.items()
        }
        if replay is not forward:
            half.clear()
        return CapturedStep(key, chunks, replay, samplers)

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepHandle:
        """Queue one step. Returns at once; errors are raised by `collect`.

        masks: of the plan's masked slots; None if there are none, or the plan is deferred.
        """
        if plan.masked_slots and self._stage.is_last:
            return self._launch_masked(plan, masks)
        queue = self._queue if self._stage.is_last else self._queue_rows
        if not self._is_quick(plan):
            queued = self._last_on_worker = self._worker.submit(self._execute, plan, queue)
            return StepHandle(plan.step, queued)
        queued = Future()
        try:
            queued.set_result(self._execute(plan, queue))
        except Exception as error:
            queued.set_exception(error)
        return StepHandle(plan.step, queued)

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

    def sample(self, handle: StepHandle, masks: MaskRows) -> None:
        """Queue the sampling of a deferred plan, the last one launched. Returns at once."""
        if not self._stage.is_last:
            noted: Future[None] = Future()
            self._enqueue(
                noted, lambda: self._stage.will_return(handle.step), quick=self._is_idle()
            )
            return
        forwarded, self._forwarded = self._forwarded, None
        assert forwarded is not None, "only a deferred plan is sampled, and once"

        def work() -> _Queued:
            half = forwarded.result()
            return self._execute(half.plan, lambda _: self._queue_sampling(half, masks))

        captured = forwarded.done() and not forwarded.exception() and forwarded.result().captured
        self._enqueue(handle.queued, work, quick=bool(captured) and self._is_idle())

    def _launch_masked(self, plan: StepPlan, masks: MaskRows | None) -> StepHandle:
        """Queue the two halves of a masked step, of which a deferred one has the first."""
        handle = StepHandle(plan.step, Future())
        self._forwarded = Future()

        def work() -> _Forwarded:
            return self._execute(plan, self._queue_forward)

        self._enqueue(self._forwarded, work, quick=self._is_quick(plan))
        if masks is not None:
            self.sample(handle, masks)
        return handle

    def _enqueue(self, future: Future[T], work: Callable[[], T], *, quick: bool) -> None:
        """Fulfil `future` with `work`: here if it is quick, otherwise on the worker."""

        def fulfil() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        if quick:
            fulfil()
        else:
            self._last_on_worker = self._worker.submit(fulfil)

    def _is_idle(self) -> bool:
        last = self._last_on_worker
        return last is None or last.done()

    def _is_quick(self, plan: StepPlan) -> bool:
        """True if the calling thread may queue the plan itself: it is a graph replay, and the
        worker has no earlier plan to queue."""
        if plan.chunks or plan.copies is not None or not self._is_idle():
            return False
        return self._graphs.find(plan, self._features(plan).variant) is not None

    def may_compile(self) -> bool:
        """True while a step is being queued on a GPU, which compiles kernels at their first use."""
        last = self._last_on_worker
        return self.lanes.device.type == "cuda" and not (last is None or last.done())

    def collect(self, handle: StepHandle) -> StepResult:
        """Block until the step is done and return its tokens.

        Raises StepError if the step failed and the device is still usable, else
        EngineStoppedError.
        """
        try:
            queued = handle.queued.result()
            queued.done.wait()
            prompt_logprobs = _list_prompt_logprobs(queued)
        except Exception as error:
            # The traceback's frames hold the activations of the failed step; free their memory.
            traceback.clear_frames(error.__traceback__)
            raise self._explain(handle.step, error) from error
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for part in queued.parts:
            first = len(token_ids)
            part_ids = self._outputs.token_ids(queued.ring_entry, part)
            token_ids += part_ids
            wanted = queued.num_logprobs[first : len(token_ids)]
            if any(num is not None for num in wanted):
                scores = self._outputs.scores(queued.ring_entry, part)
                listed = list_logprobs(part_ids, scores, wanted)
                logprobs |= {first + row: entry for row, entry in listed.items()}
        return StepResult(handle.step, token_ids, logprobs, prompt_logprobs, queued.captured)

    def loads(self, handle: StepHandle) -> Iterator[int]:
        """Block for each load of a step's plan, and yield its id. Nothing for a step that fails."""
        try:
            marks = handle.queued.result().loads
        except Exception:  # `collect` raises it
            return
        for load, mark in marks.items():
            mark.wait()
            yield load

    def transfer(self, transfers: Sequence[Transfer], done: Done) -> None:
        """Begin transfers after the launched steps and their copies.

        Returns at once; `done` is called on any thread, unless the runner is closed before.
        """
        assert self._host_cache is not None, "there are no host pages"
        self._worker.submit(self._host_cache.transfer, transfers, done)

    def traffic(self) -> HostTraffic | None:
        """The copies to and from host memory; None without a host cache."""
        return None if self._host_cache is None else self._host_cache.traffic()

    def listen(self, address: str, token: bytes) -> tuple[str, ...]:
        """Take part in transfers between engines. Returns where this rank, as the only one of its
        runner, is found by others; raises OSError. Any thread may call it, before any of them."""
        assert self._host_cache is not None, "there are no host pages"
        return (self._host_cache.listen(address, token, self._ranks.rank),)

    @property
    def shares_device(self) -> bool:
        return self._host_cache is not None and self._host_cache.shares_device

    def close(self) -> None:
        """Wait for the steps in flight, end the worker thread, and free graphs and KV cache."""
        self._worker.shutdown()
        with self.lanes.compute("drain"):
            self._stage.drain(self._tables.state.last_tokens)
        self.lanes.synchronize()
        self._stage.write_times()
        self._graphs = StepGraphs()
        if self._host_cache is not None:
            self._host_cache.close()
            self._host_cache = None
        self._kv.clear()

    # -- queueing a step ---------------------------------------------------------------------------

    def _execute(self, plan: StepPlan, queue: Callable[[StepPlan], T]) -> T:
        """Queue the step, or refuse it with StepError if an earlier one of its epoch has failed.

        The failed step may have left the tables half updated, so this one could write to pages of
        other requests. The scheduler has discarded it, too.
        """
        if plan.epoch <= self._failed_epoch:
            raise StepError(f"Step {plan.step} was launched after one that failed.")
        try:
            return queue(plan)
        except Exception:
            self._failed_epoch = plan.epoch
            with contextlib.suppress(RuntimeError):  # the device is lost
                self._recount()
            raise

    def _recount(self) -> None:
        with self.lanes.compute("recount"):
            self._outputs.recount()

    @torch.inference_mode()
    def _queue(self, plan: StepPlan) -> _Queued:
        with self.lanes.compute(f"step {plan.step}: {plan.num_tokens} tokens"):
            load = self._copy(plan)
            features, captured, shape, chunks = self._begin(plan)
            ring_entry = self._outputs.open() if captured or plan.num_samples else 0
            scored: list[_Scored] = []
            if not plan.num_tokens:  # only copies, and requests that wait for them
                pass
            elif captured is None:
                num_chunk_samples = plan.num_samples - len(plan.decode_slots)
                hidden = self._run(shape, chunks, num_chunk_samples, features, plan)
                scored = list(self._score_prompts(plan, hidden))
            else:
                captured.replay()
            self._stage.return_tokens(plan, self._tables.state.last_tokens)
        return self._queued(plan, shape, features, ring_entry, scored, captured, load())

    @torch.inference_mode()
    def _queue_rows(self, plan: StepPlan) -> _Queued:
        """Queue a step of a stage that is not the last."""
        with self.lanes.compute(f"rows of step {plan.step}: {plan.num_tokens} tokens"):
            load = self._copy(plan)
            _, captured, shape, chunks = self._begin(plan)
            if captured is not None:
                captured.replay()
                self._stage.send(plan, self._stage.outbox[: shape.num_rows].clone())
            elif plan.num_tokens:
                num_chunk_samples = plan.num_samples - len(plan.decode_slots)
                rows, _, _ = self._forward(shape, chunks, num_chunk_samples, plan)
                self._stage.send(plan, rows)
            done = self.lanes.mark()
        return _Queued(done, 0, (), (), [], None, captured is not None, load())

    @torch.inference_mode()
    def _queue_forward(self, plan: StepPlan) -> _Forwarded:
        with self.lanes.compute(f"forward of step {plan.step}: {plan.num_tokens} tokens"):
            load = self._copy(plan)
            features, captured, shape, chunks = self._begin(plan)
            if captured is not None:
                captured.replay()
                return _Forwarded(plan, shape, features, captured, None, None, [], load())
            num_chunk_samples = plan.num_samples - len(plan.decode_slots)
            hidden, logits, samples = self._forward(shape, chunks, num_chunk_samples, plan)
            scored = self._score_prompts(plan, hidden)
        return _Forwarded(plan, shape, features, None, logits, samples, scored, load())

    @torch.inference_mode()
    def _queue_sampling(self, half: _Forwarded, masks: MaskRows) -> _Queued:
        plan, captured = half.plan, half.captured
        with self.lanes.compute(f"sampling of step {plan.step}"):
            self._sampler.mask(plan.masked_slots, self.lanes.upload_masks(masks))
            ring_entry = self._outputs.open()
            if captured is not None:
                captured.sampler(half.features.variant)()
            else:
                assert half.logits is not None and half.samples is not None
                self._sample(half.logits, half.samples, half.features)
            self._stage.return_tokens(plan, self._tables.state.last_tokens)
        return self._queued(
            plan, half.shape, half.features, ring_entry, half.scored, captured, half.loads
        )

    def _copy(self, plan: StepPlan) -> Callable[[], dict[int, CopyMark]]:
        """Queue what the plan copies between the tiers, before its step; returns what queues its
        loads after it, and returns their ends."""
        if plan.copies is None:
            return dict
        assert self._host_cache is not None, "plans copy nothing without a host cache"
        return self._host_cache.queue(plan.copies)

    def _begin(
        self, plan: StepPlan
    ) -> tuple[SamplingFeatures, CapturedStep | None, StepShape, Tensor | None]:
        """Update the tables, and wait for what other stages send; returns the step's features, its
        graph, its shape and its chunks."""
        self._sampler.join(plan.joins)
        self._tables.update(plan)
        self._stage.begin(plan, self._tables.state.last_tokens)
        features = self._features(plan)
        captured = self._graphs.find(plan, features.variant) if plan.num_tokens else None
        shape = StepShape.of(plan) if captured is None else captured.key.shape
        chunks: Tensor | None = None
        if plan.chunks:
            num_samples = plan.num_samples - len(plan.decode_slots)
            if captured is not None:
                num_samples = shape.num_chunks
            chunks = self._tables.upload_chunks(plan, shape, num_samples)
            if captured is not None and captured.chunks is not None:
                captured.chunks.copy_(chunks)
        self._received = self._stage.receive(plan, shape.num_rows, captured=captured is not None)
        return features, captured, shape, chunks

    def _queued(
        self,
        plan: StepPlan,
        shape: StepShape,
        features: SamplingFeatures,
        ring_entry: int,
        scored: list[_Scored],
        captured: CapturedStep | None,
        loads: dict[int, CopyMark],
    ) -> _Queued:
        """Mark the end of a step's work."""
        tensors = [
            tensor
            for entry in scored
            for block in entry.blocks
            for tensor in (block.logprob, block.top_ids, block.top_logprobs)
        ]
        num_decodes, num_samples = len(plan.decode_slots), plan.num_samples
        return _Queued(
            done=self.lanes.mark(),
            ring_entry=ring_entry,
            parts=(
                range(num_decodes),
                range(shape.num_decodes, shape.num_decodes + num_samples - num_decodes),
            ),
            num_logprobs=self._logprobs_wanted(plan) if features.num_logprobs >= 0 else (),
            scored=scored,
            download=self.lanes.download(tensors) if tensors else None,
            captured=captured is not None,
            loads=loads,
        )

    def _run(
        self,
        shape: StepShape,
        packed_chunks: Tensor | None,
        num_chunk_samples: int,
        features: SamplingFeatures,
        plan: StepPlan | None = None,
    ) -> Tensor:
        """Queue the work of a step, from inputs to tokens; returns the hidden states of its rows.

        plan: None while a step is captured.
        """
        hidden, logits, samples = self._forward(shape, packed_chunks, num_chunk_samples, plan)
        if logits is not None:
            self._sample(logits, samples, features)
        return hidden

    def _forward(
        self,
        shape: StepShape,
        packed_chunks: Tensor | None,
        num_chunk_samples: int,
        plan: StepPlan | None = None,
    ) -> tuple[Tensor, Tensor | None, SampleRows]:
        """Queue the work of a step up to its logits.

        Returns the hidden states of its rows, and of the sampled ones the logits, if there are any
        and this is the last stage.
        """
        received, self._received = self._received, None
        chunks = None
        if packed_chunks is not None:
            chunks = ChunkTensors.split(packed_chunks, shape, num_chunk_samples)
        inputs, samples = self._tables.inputs(plan, shape, chunks)
        attention = self._captured_attention if plan is None else self._attention
        attention.prepare(inputs)
        hidden: Tensor = self._model(inputs, self._kv, attention, received)
        if not len(samples.slots) or not self._stage.is_last:
            return hidden, None, samples
        rows = hidden if samples.rows is None else hidden[samples.rows]
        return hidden, self._model.logits(rows), samples

    def _sample(self, logits: Tensor, samples: SampleRows, features: SamplingFeatures) -> None:
        sampled = self._sampler.sample(logits, samples.slots, samples.output_index, features)
        self._outputs.send(samples.slots, sampled.token_ids, sampled.scores, self._tables.state)

    def _features(self, plan: StepPlan) -> SamplingFeatures:
        """The features of the sampled rows, cached while the decode slots are the same object."""
        if plan.chunks:
            return self._sampler.features(_sampled_slots(plan))
        slots, features = self._decode_features
        if slots is not plan.decode_slots:
            features = self._sampler.features(plan.decode_slots)
            self._decode_features = plan.decode_slots, features
        return features

    def _logprobs_wanted(self, plan: StepPlan) -> Sequence[int | None]:
        return self._sampler.logprobs_wanted(_sampled_slots(plan))

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> list[_Scored]:
        scored: list[_Scored] = []
        row = len(plan.decode_slots)
        block = max(1, MAX_SCORED_BYTES // (4 * self.vocab_size))
        for index, chunk in enumerate(plan.chunks):
            targets = list(chunk.scored_token_ids)
            if targets:
                entry = _Scored(index, targets, chunk.prompt_logprobs, [])
                (device_targets,) = self.lanes.upload([targets])
                for first in range(0, len(targets), block):
                    part = device_targets[first : first + block]
                    logits = self._model.logits(hidden[row + first : row + first + len(part)])
                    logits = self._ranks.all_gather(logits)[:, : self.vocab_size]
                    scores = top_logprobs(logits.float(), part, chunk.prompt_logprobs)
                    entry.blocks.append(scores)
                scored.append(entry)
            row += len(chunk.token_ids)
        return scored

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


def _sampled_slots(plan: StepPlan) -> tuple[int, ...]:
    return plan.decode_slots + tuple(chunk.slot for chunk in plan.chunks if chunk.samples)


def _list_prompt_logprobs(queued: _Queued) -> dict[int, list[TokenLogprobs]]:
    """The prompt logprobs by index of the chunk. Waits for the copies to the host."""
    listed: dict[int, list[TokenLogprobs]] = {}
    tensors = iter(queued.download.wait() if queued.download else ())
    for scored in queued.scored:
        rows = listed[scored.chunk] = []
        for _ in scored.blocks:
            scores = TokenScores(next(tensors), next(tensors), next(tensors))
            count = len(scores.logprob)
            targets = scored.token_ids[len(rows) : len(rows) + count]
            rows += list_logprobs(targets, scores, [scored.num_logprobs] * count).values()
    return listed
