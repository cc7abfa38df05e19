"""One rank: it executes step plans on its device.

`launch` returns at once and `collect` blocks, so a caller keeps the device busy by launching step
N + 1 before it collects step N. A step that was captured is queued by the caller itself, which
takes microseconds; one worker thread queues the others (on a CPU it runs them), hence plans take
effect in the order of their launch.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.attention.base import Attention, LayerKV
from minisgl.config import Capacity
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.errors import EngineStoppedError, StepError
from minisgl.kernels.sampling.reference import TokenScores, top_logprobs
from minisgl.models.transformer import CausalLM
from minisgl.request import MAX_EDITS, MAX_LOGPROBS, TokenLogprobs
from minisgl.runner.graphs import MAX_CHUNKS, CapturedStep, GraphKey, StepGraphs, Variant
from minisgl.runner.lanes import Download, Lanes, Mark
from minisgl.runner.outbox import Outbox
from minisgl.runner.sampler import Needs, Sampler, list_logprobs
from minisgl.runner.tables import Chunks, SlotTables, StepShape
from minisgl.scheduler.plan import StepPlan, StepResult

# float32 logits of prompt rows that are scored at once.
MAX_SCORED_BYTES = 256 << 20

# What a captured step is ready for, whatever its rows ask for.
_UNFILTERED = Needs(random=True)
_PLAIN = _UNFILTERED._replace(min_p=True, top_k=True, top_p=True)
_FULL = _PLAIN._replace(penalties=True, num_edits=MAX_EDITS, num_logprobs=MAX_LOGPROBS)
NEEDS = {Variant.UNFILTERED: _UNFILTERED, Variant.PLAIN: _PLAIN, Variant.FULL: _FULL}


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores of the prompt tokens behind one chunk's rows, in blocks of rows."""

    chunk: int
    token_ids: list[int]
    num_logprobs: int
    blocks: list[TokenScores]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose work is queued on the device."""

    done: Mark
    outbox_row: int
    parts: tuple[range, ...]  # where in that row its sampled tokens are
    num_logprobs: Sequence[int | None]  # what each sampled row asked for; empty where none did
    scored: list[_Scored]
    download: Download | None  # of `scored`
    captured: bool


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be collected once."""

    step: int
    queued: Future[_Queued]


def _variant(needs: Needs) -> Variant:
    if needs.full:
        return Variant.FULL
    return Variant.PLAIN if needs.filters else Variant.UNFILTERED


class ModelRunner:
    """`launch` from one thread; `collect` from any one thread, in launch order.

    Of several ranks each runs the same plans, and has the same tokens at their end.
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
    ) -> None:
        """captured_attention: attends in captured steps, whose chunks only the device knows."""
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.lanes = lanes
        self._model = model
        self._kv = kv
        self._attention = attention
        self._captured_attention = captured_attention
        self._ranks = ranks
        self._sampler = Sampler(capacity.num_slots, vocab_size, lanes.device, ranks=ranks)
        self._tables = SlotTables(
            num_slots=capacity.num_slots,
            max_pages=-(-capacity.max_seq_len // capacity.page_size),
            page_size=capacity.page_size,
            prompt_lengths=self._sampler.num_prompt_tokens,
            lanes=lanes,
        )
        self._outbox = Outbox(capacity.num_slots + MAX_CHUNKS, lanes.device)
        self._graphs = StepGraphs()
        self._graph_pool = lanes.graph_pool()
        self._worker = ThreadPoolExecutor(1, "minisgl-runner", lanes.enter_thread)
        self._last_on_worker: Future[_Queued] | None = None
        self._decode_needs: tuple[tuple[int, ...], Needs] = ((), Needs())
        self._failed_epoch = -1

    @property
    def kv_bytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self._kv)

    def capture(self, keys: Sequence[GraphKey], progress: Callable[[int], None]) -> None:
        """Capture the steps of these keys too, in their order; `progress` gets the number done.

        To be called while no request runs. What there is no memory for is left out, and runs
        eagerly; among several ranks it raises OutOfMemoryError.
        """
        if any(key.variant is Variant.FULL for key in keys):
            self._sampler.allocate_history()
        steps = list(self._graphs.steps)
        for done, key in enumerate(keys):
            progress(done)
            try:
                steps.append(self._capture(key))
            except torch.OutOfMemoryError:
                if self._ranks.size > 1:  # the others may be waiting for it in this very step
                    raise
                self._recount()
        progress(len(keys))
        self.lanes.synchronize()
        self._graphs = StepGraphs(steps)
        # A captured step does not tell the host how long its rows are.
        self._tables.counts_lengths = not self._graphs.max_batch
        self.capacity = replace(self.capacity, max_graph_batch=self._graphs.max_batch)

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedStep:
        """It runs once, with padded rows alone."""
        needs = NEEDS[key.variant]
        chunks: Tensor | None = None

        def run() -> None:
            self._run(key.shape, chunks, key.shape.num_chunks, needs)

        with self.lanes.compute("capture"):
            if key.shape.num_chunks:
                nothing, size = StepPlan(0, ()), key.shape.num_chunks
                chunks = self._tables.upload_chunks(nothing, key.shape, size).clone()
            self._outbox.open()
            run()
        return CapturedStep(key, chunks, self.lanes.capture(run, self._graph_pool))

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue one step. Returns at once; what goes wrong is raised by `collect`."""
        if not self._is_quick(plan):
            queued = self._last_on_worker = self._worker.submit(self._execute, plan)
            return StepHandle(plan.step, queued)
        queued = Future()
        try:
            queued.set_result(self._execute(plan))
        except Exception as error:
            queued.set_exception(error)
        return StepHandle(plan.step, queued)

    def _is_quick(self, plan: StepPlan) -> bool:
        """Whether the caller may queue the plan itself: a replay, with nothing before it that the
        worker has still to queue."""
        last = self._last_on_worker
        if plan.chunks or not (last is None or last.done()):
            return False
        return self._graphs.find(plan, _variant(self._needs(plan))) is not None

    def may_compile(self) -> bool:
        """Whether the host is still queueing a step on a GPU, for which it compiles kernels that it
        has not met before."""
        last = self._last_on_worker
        return self.lanes.device.type == "cuda" and not (last is None or last.done())

    def collect(self, handle: StepHandle) -> StepResult:
        """Block until the step is done and return its tokens.

        Raises StepError if the step failed and the device is still good, EngineStoppedError if it
        is not.
        """
        try:
            queued = handle.queued.result()
            queued.done.wait()
            prompt_logprobs = _list_prompt_logprobs(queued)
        except Exception as error:
            # The frames of the failed step hold its activations, which the next one needs room for.
            traceback.clear_frames(error.__traceback__)
            raise self._explain(handle.step, error) from error
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for part in queued.parts:
            first = len(token_ids)
            part_ids = self._outbox.token_ids(queued.outbox_row, part)
            token_ids += part_ids
            wanted = queued.num_logprobs[first : len(token_ids)]
            if any(num is not None for num in wanted):
                scores = self._outbox.scores(queued.outbox_row, part)
                listed = list_logprobs(part_ids, scores, wanted)
                logprobs |= {first + row: entry for row, entry in listed.items()}
        return StepResult(handle.step, token_ids, logprobs, prompt_logprobs, queued.captured)

    def close(self) -> None:
        """Wait for what is launched, end the worker thread and give the memory back."""
        self._worker.shutdown()
        self.lanes.synchronize()
        self._graphs = StepGraphs()
        self._kv.clear()

    # -- queueing a step ---------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> _Queued:
        """After a failure the plans launched behind it would run on tables that it left half made,
        and write into pages of others. They are refused; the scheduler has given them up too."""
        if plan.epoch <= self._failed_epoch:
            raise StepError(f"Step {plan.step} was launched behind one that failed.")
        try:
            return self._queue(plan)
        except Exception:
            self._failed_epoch = plan.epoch
            with contextlib.suppress(RuntimeError):  # the device is lost, as the first error says
                self._recount()
            raise

    def _recount(self) -> None:
        with self.lanes.compute("recount"):
            self._outbox.recount()

    @torch.inference_mode()
    def _queue(self, plan: StepPlan) -> _Queued:
        with self.lanes.compute(f"step {plan.step}: {plan.num_tokens} tokens"):
            self._sampler.join(plan.joins)
            self._tables.update(plan)
            needs = self._needs(plan)
            captured = self._graphs.find(plan, _variant(needs))
            shape = StepShape.of(plan) if captured is None else captured.key.shape
            num_chunk_samples = plan.num_samples - len(plan.decode_slots)
            if captured is not None:
                num_chunk_samples = shape.num_chunks
            chunks: Tensor | None = None
            if plan.chunks:
                chunks = self._tables.upload_chunks(plan, shape, num_chunk_samples)
            row = self._outbox.open() if captured or plan.num_samples else 0
            scored: list[_Scored] = []
            if captured is None:
                hidden = self._run(shape, chunks, num_chunk_samples, needs, plan)
                scored = list(self._score_prompts(plan, hidden))
            else:
                if captured.chunks is not None and chunks is not None:
                    captured.chunks.copy_(chunks)
                captured.replay()
        tensors = [
            tensor
            for entry in scored
            for block in entry.blocks
            for tensor in (block.logprob, block.top_ids, block.top_logprobs)
        ]
        num_decodes, num_samples = len(plan.decode_slots), plan.num_samples
        return _Queued(
            done=self.lanes.mark(),
            outbox_row=row,
            parts=(
                range(num_decodes),
                range(shape.num_decodes, shape.num_decodes + num_samples - num_decodes),
            ),
            num_logprobs=self._logprobs_wanted(plan) if needs.num_logprobs >= 0 else (),
            scored=scored,
            download=self.lanes.download(tensors) if tensors else None,
            captured=captured is not None,
        )

    def _run(
        self,
        shape: StepShape,
        packed_chunks: Tensor | None,
        num_chunk_samples: int,
        needs: Needs,
        plan: StepPlan | None = None,
    ) -> Tensor:
        """Queue a step's work from its inputs to its tokens; returns the rows' hidden states.

        plan: of an eager step; None while a step is captured.
        """
        chunks = None
        if packed_chunks is not None:
            chunks = Chunks.split(packed_chunks, shape, num_chunk_samples)
        inputs, samples = self._tables.inputs(plan, shape, chunks)
        attention = self._captured_attention if plan is None else self._attention
        attention.prepare(inputs)
        hidden: Tensor = self._model(inputs, self._kv, attention)
        if len(samples.slots):
            rows = hidden if samples.rows is None else hidden[samples.rows]
            sampled = self._sampler.sample(
                self._model.logits(rows), samples.slots, samples.output_index, needs
            )
            self._outbox.send(samples.slots, sampled.token_ids, sampled.scores, self._tables.state)
        return hidden

    def _needs(self, plan: StepPlan) -> Needs:
        """Of the sampled rows. In steady decode the batch is the last step's."""
        if plan.chunks:
            return self._sampler.needs(_sampled_slots(plan))
        slots, needs = self._decode_needs
        if slots is not plan.decode_slots:
            needs = self._sampler.needs(plan.decode_slots)
            self._decode_needs = plan.decode_slots, needs
        return needs

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
        except RuntimeError:  # the error sticks: nothing will run on this device any more
            return EngineStoppedError(f"The GPU failed in step {step}: {error}")
        return StepError(f"Step {step} failed: {type(error).__name__}: {error}")


def _sampled_slots(plan: StepPlan) -> tuple[int, ...]:
    return plan.decode_slots + tuple(chunk.slot for chunk in plan.chunks if chunk.samples)


def _list_prompt_logprobs(queued: _Queued) -> dict[int, list[TokenLogprobs]]:
    """By chunk. Waits for the download."""
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
