"""One rank: it executes step plans on its device.

`launch` returns at once and `collect` blocks, so a caller keeps the device busy by launching step
N + 1 before it collects step N. One worker thread queues the work (on a CPU it does it), hence
plans take effect in the order of their launch.
"""

from __future__ import annotations

import math
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minisgl.attention.backends import make_attention
from minisgl.attention.base import Attention, LayerKV
from minisgl.config import Capacity, ResolvedConfig
from minisgl.errors import CheckpointError, DeviceMemoryError, EngineStoppedError, StepError
from minisgl.kernels.sampling import TokenScores, top_logprobs
from minisgl.models.config import ModelConfig
from minisgl.models.loader import Progress, load_model
from minisgl.models.transformer import CausalLM
from minisgl.request import TokenLogprobs
from minisgl.runner.lanes import Download, Lanes
from minisgl.runner.memory import allocate_kv, fit_num_pages
from minisgl.runner.profile import longest_step, pages_for_largest_step, widest_step
from minisgl.runner.sampler import SampledRows, Sampler, list_logprobs
from minisgl.runner.tables import SlotTables
from minisgl.scheduler.plan import StepPlan, StepResult

# float32 logits of prompt rows that are scored at once.
MAX_SCORED_BYTES = 256 << 20


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

    sampled: SampledRows
    scored: list[_Scored]
    download: Download


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be collected once."""

    step: int
    queued: Future[_Queued]


class ModelRunner:
    """`launch` from one thread; `collect` from any one thread, in launch order."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv: list[LayerKV],
        capacity: Capacity,
        vocab_size: int,
        attention: Attention,
        lanes: Lanes,
    ) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._model = model
        self._kv = kv
        self._attention = attention
        self._lanes = lanes
        self._tables = SlotTables(
            num_slots=capacity.num_slots,
            max_pages=-(-capacity.max_seq_len // capacity.page_size),
            page_size=capacity.page_size,
            lanes=lanes,
        )
        self._sampler = Sampler(capacity.num_slots, vocab_size, lanes.device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="minisgl-runner")
        self._failed_epoch = -1

    @classmethod
    def load(
        cls,
        config: ResolvedConfig,
        model_config: ModelConfig,
        folder: Path,
        progress: Progress | None = None,
    ) -> ModelRunner:
        """Load weights, find out how large the largest step is, and fill the rest with pages.

        Blocks, for seconds or minutes. Raises CheckpointError or DeviceMemoryError.
        """
        facts = model_config.facts()
        device = torch.device(config.device)
        dtype: torch.dtype = getattr(torch, config.dtype)
        lanes = Lanes(device)
        free_at_start = _free_bytes(device)
        try:
            model = load_model(
                model_config,
                folder,
                dtype=dtype,
                device=device,
                load_format=config.load_format,
                max_seq_len=config.max_seq_len,
                progress=progress,
            )
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"The weights do not fit into the {free_at_start / (1 << 30):.1f} GiB that are "
                "free on the device; choose a smaller model or --dtype bfloat16."
            ) from error

        def build(num_pages: int) -> ModelRunner:
            kv = allocate_kv(
                facts,
                num_pages=num_pages,
                page_size=config.page_size,
                dtype=dtype,
                device=device,
            )
            runner = cls(
                model=model,
                kv=kv,
                capacity=Capacity.of(config, num_pages),
                vocab_size=facts.vocab_size,
                attention=make_attention(config.attn_prefill, config.attn_decode),
                lanes=lanes,
            )
            # Weights, tables and pages were filled on the default stream, which no lane waits for.
            lanes.synchronize()
            return runner

        free_now = _free_bytes(device)
        activation_bytes = _try_largest_steps(build(pages_for_largest_step(config)), config)
        num_pages = config.num_pages or fit_num_pages(
            config,
            facts,
            free_at_start=free_at_start,
            free_now=free_now,
            activation_bytes=activation_bytes,
        )
        return build(num_pages)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue one step. Returns at once; what goes wrong is raised by `collect`."""
        return StepHandle(plan.step, self._worker.submit(self._execute, plan))

    def collect(self, handle: StepHandle) -> StepResult:
        """Block until the step is done and return its tokens.

        Raises StepError if the step failed and the device is still good, EngineStoppedError if it
        is not.
        """
        try:
            queued = handle.queued.result()
            tensors = iter(queued.download.wait())
        except Exception as error:
            # The frames of the failed step hold its activations, which the next one needs room for.
            traceback.clear_frames(error.__traceback__)
            raise self._explain(handle.step, error) from error
        token_ids: list[int] = next(tensors).tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if queued.sampled.scores is not None:
            scores = TokenScores(next(tensors), next(tensors), next(tensors))
            logprobs = list_logprobs(token_ids, scores, queued.sampled.num_logprobs)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for scored in queued.scored:
            rows = prompt_logprobs[scored.chunk] = []
            for _ in scored.blocks:
                scores = TokenScores(next(tensors), next(tensors), next(tensors))
                count = len(scores.logprob)
                targets = scored.token_ids[len(rows) : len(rows) + count]
                rows += list_logprobs(targets, scores, [scored.num_logprobs] * count).values()
        return StepResult(handle.step, token_ids, logprobs, prompt_logprobs)

    def close(self) -> None:
        """Wait for what is launched and end the worker thread."""
        self._worker.shutdown()

    # -- on the worker thread ----------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> _Queued:
        """After a failure the plans launched behind it would run on tables that it left half made,
        and write into pages of others. They are refused; the scheduler has given them up too."""
        if plan.epoch <= self._failed_epoch:
            raise StepError(f"Step {plan.step} was launched behind one that failed.")
        try:
            return self._queue(plan)
        except Exception:
            self._failed_epoch = plan.epoch
            raise

    @torch.inference_mode()
    def _queue(self, plan: StepPlan) -> _Queued:
        with self._lanes.compute(f"step {plan.step}: {plan.num_tokens} tokens"):
            self._sampler.join(plan.joins)
            inputs, samples = self._tables.prepare(plan)
            hidden = self._model(inputs, self._kv, self._attention)
            rows = hidden if samples.rows is None else hidden[samples.rows]
            if samples.slots_host:
                prompt_lengths = self._sampler.num_prompt_tokens[samples.slots]
                sampled = self._sampler.sample(
                    self._model.logits(rows),
                    samples.slots,
                    samples.slots_host,
                    output_index=samples.positions + 1 - prompt_lengths,
                )
                self._tables.feed(samples, sampled.token_ids)
            else:
                sampled = SampledRows(samples.slots, None, ())
            scored = list(self._score_prompts(plan, hidden))
        tensors = [sampled.token_ids]
        for scores in (sampled.scores, *(block for entry in scored for block in entry.blocks)):
            if scores is not None:
                tensors += [scores.logprob, scores.top_ids, scores.top_logprobs]
        return _Queued(sampled, scored, self._lanes.download(tensors))

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> list[_Scored]:
        scored: list[_Scored] = []
        row = len(plan.decode_slots)
        block = max(1, MAX_SCORED_BYTES // (4 * self.vocab_size))
        for index, chunk in enumerate(plan.chunks):
            targets = list(chunk.scored_token_ids)
            if targets:
                entry = _Scored(index, targets, chunk.prompt_logprobs, [])
                (device_targets,) = self._lanes.upload([targets])
                for first in range(0, len(targets), block):
                    part = device_targets[first : first + block]
                    logits = self._model.logits(hidden[row + first : row + first + len(part)])
                    entry.blocks.append(top_logprobs(logits, part, chunk.prompt_logprobs))
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
            self._lanes.synchronize()
        except RuntimeError:  # the error sticks: nothing will run on this device any more
            return EngineStoppedError(f"The GPU failed in step {step}: {error}")
        return StepError(f"Step {step} failed: {type(error).__name__}: {error}")


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _try_largest_steps(runner: ModelRunner, config: ResolvedConfig) -> int:
    """Returns the bytes that they take on a GPU; on a CPU it is a self-test only.

    Raises CheckpointError if the model's logits are not finite.
    """
    on_gpu = config.device == "cuda"
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    try:
        result = runner.collect(runner.launch(longest_step(config, runner.vocab_size)))
        if on_gpu:
            runner.collect(runner.launch(widest_step(config)))
    except StepError as error:
        raise DeviceMemoryError(f"The largest step cannot run here. {error}") from error
    finally:
        runner.close()
    if not all(math.isfinite(entry.logprob) for entry in result.prompt_logprobs.get(0, ())):
        raise CheckpointError(
            f"The model's logits are not finite in {config.dtype}: its weights are broken, or too "
            "large for this --dtype."
        )
    return torch.cuda.max_memory_allocated() - before if on_gpu else 0
