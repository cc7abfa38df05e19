"""A model that keeps a state of each slot, keys without values, and a layer without a cache of its
own: in the runner it gives the tokens of a plain loop over each request."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from support.resolving import GPU, resolved
from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState, PagedKV, StateBySlot, distinct
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import (
    Capacity,
    KVSpec,
    LayerSpec,
    SharedKV,
    StateSpec,
    page_bytes,
    slot_bytes,
)
from minisgl.device.lanes import Lanes
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import Request, SamplingParams
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import GraphKey, mixed_shape
from minisgl.runner.memory import GIB, MemoryUse, allocate_states, fit_num_pages
from minisgl.runner.runner import ModelRunner, StepHandle
from minisgl.runner.step_inputs import StepShape
from minisgl.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
VOCAB = 97
PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 4, 12, 3
LAYERS: tuple[LayerSpec, ...] = (
    StateSpec(shapes=((2,), ()), dtypes=("float32", "float32")),
    KVSpec(num_kv_heads=1, key_dim=3, value_dim=0, dtype="float32"),
    SharedKV(1),
)


def updated(state: Sequence[float], count: float, token: int) -> tuple[list[float], float]:
    """The state after a token depends on the order of all tokens before it."""
    first, second = state
    return [(first * 3 + token + 1) % VOCAB, (second + first) % VOCAB], count + 1


def next_token(state: Sequence[float], count: float, sum_of_keys: float) -> int:
    return int(sum(state) + count + 2 * sum_of_keys) % VOCAB


class Toy:
    """A Decoder whose hidden states are the next tokens."""

    dense_copy_bytes = 0

    def prepare(self, *, dense_copies: bool = False) -> None:
        pass

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return LAYERS

    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
    ) -> Tensor:
        by_slot, kv, shared = states
        assert isinstance(by_slot, StateBySlot) and isinstance(kv, PagedKV) and shared is kv
        kv.k.flatten(0, 1)[batch.slot_mapping] = batch.token_ids[:, None, None].float()
        num_decodes, tables = batch.decodes.num_rows, list(batch.decodes.page_table)
        slots, ends = batch.slots.decodes.tolist(), list(range(1, num_decodes + 1))
        if batch.chunks.num_rows:
            slots += batch.slots.chunks.tolist()
            ends += (batch.chunks.row_starts[1:] + num_decodes).tolist()
            tables += list(batch.chunks.page_table)
        hidden = torch.zeros(len(batch.token_ids))
        start = 0
        for slot, end, table in zip(slots, ends, tables, strict=True):
            for row in range(start, end):
                found = [tensor[slot].tolist() for tensor in by_slot.tensors]
                state, count = updated(found[0], found[1], int(batch.token_ids[row]))
                by_slot.tensors[0][slot] = torch.tensor(state)
                by_slot.tensors[1][slot] = count
                length = int(batch.positions[row]) + 1
                keys = kv.k[table[: -(-length // PAGE_SIZE)].long()].flatten(0, 1)[:length]
                hidden[row] = next_token(state, count, float(keys[:, 0, 2].sum()))
            start = end
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden.long(), VOCAB).float()


def in_a_loop(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens, state, count = list(prompt), [0.0, 0.0], 0.0
    for token in prompt:
        state, count = updated(state, count, token)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(state, count, sum(tokens)))
        state, count = updated(state, count, tokens[-1])
    return tokens[len(prompt) :]


def runner_of_toy() -> ModelRunner:
    capacity = Capacity(NUM_PAGES, PAGE_SIZE, NUM_SLOTS, max_seq_len=(NUM_PAGES - 1) * PAGE_SIZE)
    lanes, attention = Lanes(CPU), Attention(TorchAttention(), TorchAttention())
    computation = Computation(
        model=Toy(),
        states=states_of(num_pages=NUM_PAGES),
        capacity=capacity,
        vocab_size=VOCAB,
        attention=attention,
        captured_attention=attention,
        lanes=lanes,
    )
    return ModelRunner(computation, capacity)


def states_of(num_pages: int) -> list[LayerState]:
    return allocate_states(
        LAYERS, num_pages=num_pages, page_size=PAGE_SIZE, num_slots=NUM_SLOTS, device=CPU
    )


@pytest.mark.parametrize("captured", [False, True])
def test_requests_that_share_slots_pages_and_steps_get_the_tokens_of_a_loop(captured: bool) -> None:
    """Slots and pages are too few: requests wait, are retracted, and begin anew in other slots."""
    runner = runner_of_toy()
    if captured:
        shapes = (StepShape(3), mixed_shape(3, 8))
        runner.capture([GraphKey(shape) for shape in shapes], lambda done: None)
    scheduler = Scheduler(
        kv=KVCacheManager(num_pages=NUM_PAGES, page_size=PAGE_SIZE, cache_type="naive"),
        num_slots=NUM_SLOTS,
        max_seq_len=(NUM_PAGES - 1) * PAGE_SIZE,
        max_prefill_length=5,
        max_queued_requests=20,
        conservativeness=0.1,
    )
    prompts = [
        [(index * 7 + place * place) % VOCAB for place in range(length)]
        for index, length in enumerate((1, 3, 13, 8, 5, 11, 2))
    ]
    params = SamplingParams(temperature=0, ignore_eos=True)
    requests = [
        Request(str(index), prompt, params, max_tokens=17, seed=0)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.submit(request)
    launched: deque[StepHandle] = deque()
    num_captured = 0
    while (plan := scheduler.plan()) is not None or launched:
        if plan is not None:
            launched.append(runner.launch(plan))
        if plan is None or len(launched) == 2:
            result = runner.collect(launched.popleft())
            num_captured += result.captured
            scheduler.settle(result)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.token_ids[len(prompt) :] == in_a_loop(prompt, 17)
    assert scheduler.counters.num_retractions > 0
    assert bool(num_captured) is captured
    runner.close()


def test_memory_counts_the_states_of_slots_and_each_cache_once() -> None:
    states = states_of(num_pages=NUM_PAGES)
    tensors = [tensor for state in distinct(states) for tensor in state.tensors]
    num_bytes = NUM_PAGES * page_bytes(LAYERS, PAGE_SIZE) + (NUM_SLOTS + 1) * slot_bytes(LAYERS)
    assert sum(tensor.nbytes for tensor in tensors) == num_bytes
    planes = Planes.of([plane for state in distinct(states) for plane in state.planes])
    assert planes.page_bytes == page_bytes(LAYERS, PAGE_SIZE)


def test_fewer_pages_fit_beside_the_states_of_slots() -> None:
    use = MemoryUse(
        free_at_start=80 * GIB, weight_bytes=60 * GIB, activation_bytes=GIB, graph_bytes=0
    )
    config = resolved(machine=GPU)
    pages, state = LAYERS[1:2], StateSpec(shapes=((1 << 20,),), dtypes=("float32",))
    fewer = fit_num_pages(config, [*pages, state], use)
    num_bytes = (config.max_running_requests + 1) * 4 << 20
    assert fewer == fit_num_pages(
        config, pages, dataclasses.replace(use, weight_bytes=use.weight_bytes + num_bytes)
    )
