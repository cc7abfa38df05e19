"""Runs the largest steps that the options allow, before the KV cache is allocated, and measures
what they take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from minisgl.config import Capacity, ResolvedConfig
from minisgl.errors import CheckpointError, DeviceMemoryError, StepError
from minisgl.parts.adapters.host import AdapterPlan
from minisgl.parts.scores.host import ScoredChunk, ScorePlan
from minisgl.request import SamplingParams
from minisgl.runner.graphs import GraphKey
from minisgl.runner.memory import free_bytes
from minisgl.runner.runner import ModelRunner
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan

# On a CPU, where memory is not measured, this suffices to check that the logits are finite.
SELF_TEST_LENGTH = 4


def trial_capacity(config: ResolvedConfig) -> Capacity:
    """The pages, of each kind, that `longest_step` and `widest_step` use."""
    num_pages = 1 + -(-_longest_chunk(config) // config.page_size)  # with the scratch page
    return Capacity.of(config, num_pages, num_window_pages=num_pages)


def run_largest_steps(runner: ModelRunner, config: ResolvedConfig) -> int:
    """Run the largest steps; returns the peak memory in bytes on a GPU, 0 on a CPU, where this is
    only a self-test.

    Raises CheckpointError if the model's logits are not finite, and DeviceMemoryError.
    """
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        for rank in range(config.num_attending):
            plan = longest_step(config, runner.vocab_size, rank=rank)
            result = runner.collect(runner.launch(plan))
        if on_gpu:
            runner.collect(runner.launch(widest_step(config)))
    except StepError as error:
        raise DeviceMemoryError(f"The largest step cannot run here. {error}") from error
    scores = result.parts[0]
    assert isinstance(scores, dict)
    if not all(math.isfinite(entry.logprob) for entry in scores.get(0, ())):
        raise CheckpointError(
            f"The model's logits are not finite in {config.dtype}: its weights are broken, or too "
            "large for this --dtype."
        )
    return torch.cuda.max_memory_allocated() if on_gpu else 0


def try_graphs(runner: ModelRunner, keys: Sequence[GraphKey]) -> int:
    """Estimate the bytes of all graphs: those of the first, which allocates the shared pool, plus
    the average of two smaller ones for each graph."""
    device = runner.lanes.device
    if not keys or device.type != "cuda":
        return 0
    free = [free_bytes(device)]
    tried = (keys[:1], keys[len(keys) // 2 :][:2])
    for some in tried:  # the graphs live until the runner is closed
        runner.capture(some, lambda done: None)
        free.append(free_bytes(device))
    each = (free[1] - free[2]) // len(tried[1])
    return max(0, free[0] - free[1]) + max(0, each) * len(keys)


def time_prefill(runner: ModelRunner, config: ResolvedConfig) -> float:
    """Seconds to compute a token of a prompt in the largest step, whose kernels are compiled."""
    plan = longest_step(config, runner.vocab_size, scored=False)
    runner.collect(runner.launch(plan))
    began = time.perf_counter()
    runner.collect(runner.launch(plan))
    return (time.perf_counter() - began) / plan.num_tokens


def longest_step(
    config: ResolvedConfig, vocab_size: int, *, scored: bool = True, rank: int = 0
) -> StepPlan:
    """A step of one chunk that uses the whole prefill budget. scored: with all prompt logprobs.
    rank: that has it, of those that divide requests."""
    slot = rank * (config.max_running_requests // config.num_attending)
    tokens = [index % vocab_size for index in range(_longest_chunk(config))]
    scores = ScorePlan((ScoredChunk(0, tokens[1:], num_top=0),))
    pages = tuple(range(1, trial_capacity(config).num_pages))
    grants = _grants(config, (slot,), pages)
    return StepPlan(
        1,
        (),
        chunks=(Chunk(slot, 0, tokens, samples=True),),
        joins=(_join(slot),),
        grants=grants,
        parts=(scores, *_adapted(config)) if scored else _adapted(config),
    )


def widest_step(config: ResolvedConfig) -> StepPlan:
    """A step that samples as many rows as steps do, with the filters that take most memory.

    All rows write to the same page, which does no harm here.
    """
    slots = range(config.max_running_requests)
    rows = range(max(len(slots), config.max_run_rows))  # those of runs have their slot in common
    return StepPlan(
        2,
        (),
        chunks=tuple(Chunk(row % len(slots), 0, (0,), samples=True) for row in rows),
        joins=tuple(_join(slot) for slot in slots),
        grants=_grants(config, slots, (1,)),
        parts=_adapted(config),
    )


def _adapted(config: ResolvedConfig) -> tuple[AdapterPlan, ...]:
    """The part of a step that computes what adapters add."""
    return (AdapterPlan(adapts_rows=True, is_quick=True, is_alone=False),) * (config.max_loras > 0)


def _grants(
    config: ResolvedConfig, slots: Sequence[int], pages: Sequence[int]
) -> tuple[PageGrant, ...]:
    """The same pages for each slot, in each page table."""
    kinds = (False,) if config.windows is None else (False, True)
    return tuple(PageGrant(slot, 0, pages, windowed) for slot in slots for windowed in kinds)


def _longest_chunk(config: ResolvedConfig) -> int:
    limit = config.max_prefill_length if config.device == "cuda" else SELF_TEST_LENGTH
    return min(limit, config.max_seq_len)


def _join(slot: int) -> SlotJoin:
    return SlotJoin(
        slot=slot,
        params=SamplingParams(top_k=50, top_p=0.9, repetition_penalty=1.1),
        seed=slot,
        stop_token_ids=frozenset(),
        prompt_token_ids=(0,),
        output_token_ids=(),
    )
