"""Decode rows of several tokens: whatever is drafted, requests get the tokens and logprobs that
single tokens give."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from support.draft_policies import SameDrafts
from support.parity import case_of
from torch import Tensor

from minisgl.attention.base import Attention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import Capacity
from minisgl.device.lanes import Lanes
from minisgl.kvcache.manager import KVCacheManager
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.request import Request, SamplingParams
from minisgl.runner.computation import Computation
from minisgl.runner.memory import allocate_states
from minisgl.runner.queued_step import StepHandle
from minisgl.runner.runner import ModelRunner
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import SlotJoin, StepPlan
from minisgl.scheduler.runs import Speculation
from minisgl.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 4, 40, 3
MAX_SEQ_LEN, NUM_TOKENS = 120, 23


class Drafting(Computation):
    """Drafts what a request is known to get, of which a part may be wrong."""

    streams: dict[tuple[int, ...], list[int]]  # all tokens of a request by its prompt
    wrong: float = 0.0  # the share of drafts that are

    def join(self, joins: Sequence[SlotJoin]) -> None:
        super().join(joins)
        self._slots = getattr(self, "_slots", {})
        for join in joins:
            self._slots[join.slot] = self.streams.get(tuple(join.prompt_token_ids), [])

    def forward(
        self,
        shape: StepShape,
        packed_chunks: Tensor | None,
        received: Tensor | None,
        plan: StepPlan | None = None,
    ) -> tuple[Tensor, SampleRows]:
        assert plan is not None
        state, rng = self.tables.state, random.Random(plan.step)
        for slot in plan.decode_slots:
            known = int(state.lengths[slot]) + 1
            for column, token in enumerate(self._slots[slot][known : known + plan.max_run - 1]):
                state.drafts[slot, column] = token ^ (rng.random() < self.wrong)
        return super().forward(shape, packed_chunks, received, plan)


def answers(
    max_run: int, streams: dict[tuple[int, ...], list[int]], wrong: float
) -> tuple[list[Request], list[int]]:
    """The ended requests, and the lengths of all runs."""
    case = case_of("llama3")
    config = read_model_config(case.folder)
    model = load_model(
        config,
        case.folder,
        dtype=torch.float32,
        device=CPU,
        load_format="safetensors",
        max_seq_len=MAX_SEQ_LEN,
    )
    capacity = Capacity(NUM_PAGES, PAGE_SIZE, NUM_SLOTS, MAX_SEQ_LEN)
    attention = Attention(TorchAttention(), TorchAttention())
    computation = Drafting(
        model=model,
        states=allocate_states(model.layer_specs("float32"), capacity, CPU),
        capacity=capacity,
        vocab_size=config.vocab_size,
        attention=attention,
        captured_attention=attention,
        lanes=Lanes(CPU),
        max_run=max_run,
    )
    computation.streams, computation.wrong = streams, wrong
    runner = ModelRunner(computation, capacity, {})
    scheduler = Scheduler(
        kv=KVCacheManager(num_pages=NUM_PAGES, page_size=PAGE_SIZE, cache_type="radix"),
        num_slots=NUM_SLOTS,
        max_seq_len=MAX_SEQ_LEN,
        max_prefill_length=16,
        max_queued_requests=20,
        conservativeness=0.1,
        speculation=Speculation(SameDrafts(max_run - 1), NUM_SLOTS * max_run),
    )
    params = [
        SamplingParams(temperature=0, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, ignore_eos=True),
    ]
    requests = [
        Request(str(index), prompt[:60], params[index % 3], max_tokens=NUM_TOKENS, seed=index)
        for index, prompt in enumerate(case.prompts)
    ]
    for request in requests:
        scheduler.submit(request)
    launched: deque[StepHandle] = deque()
    run_lengths: list[int] = []
    while (plan := scheduler.plan()) is not None or launched:
        if plan is not None:
            launched.append(runner.launch(plan))
        if plan is None or len(launched) == 2:
            result = runner.collect(launched.popleft())
            run_lengths += result.run_lengths or ()
            scheduler.settle(result)
    scheduler.audit()
    runner.close()
    return requests, run_lengths


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("max_run", [2, 5])
def test_runs_give_the_tokens_that_single_rows_give(max_run: int, wrong: float) -> None:
    expected, none = answers(1, {}, 0)
    assert not none
    streams = {
        tuple(request.token_ids[: request.num_prompt_tokens]): list(request.token_ids)
        for request in expected
    }
    found, run_lengths = answers(max_run, streams, wrong)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    longest = max(run_lengths)
    assert longest == 1 if wrong == 1 else longest == max_run
