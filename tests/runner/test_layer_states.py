"""A model that keeps a state of each slot, keys without values, and a layer without a cache of its
own: in the runner it gives the tokens of a plain loop over each request."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

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
from minisgl.errors import DeviceMemoryError
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.manager import KVCacheManager
from minisgl.models.decoder import Taps
from minisgl.request import Request, SamplingParams
from minisgl.runner.computation import Computation
from minisgl.runner.graphs import GraphKey, mixed_shape
from minisgl.runner.memory import (
    GIB,
    StepMemory,
    WeightMemory,
    allocate_states,
    fit_caches,
    fit_slots,
)
from minisgl.runner.queued_step import StepHandle
from minisgl.runner.runner import ModelRunner
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
VOCAB = 97
PAGE_SIZE, NUM_PAGES, NUM_SLOTS, NUM_SNAPSHOTS = 4, 12, 3, 4
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
        taps: Taps | None = None,
    ) -> Tensor:
        by_slot, kv, shared = states
        assert isinstance(by_slot, StateBySlot) and isinstance(kv, PagedKV) and shared is kv
        kv.k.flatten(0, 1)[batch.slot_mapping] = batch.token_ids[:, None, None].float()
        num_decodes, tables = batch.decodes.num_rows, list(batch.decodes.page_table)
        hidden = torch.zeros(len(batch.token_ids))

        def advance(source: int, slot: int, rows: range, table: Tensor) -> None:
            for tensor in by_slot.tensors:
                tensor[slot] = tensor[source]
            for row in rows:
                found = [tensor[slot].tolist() for tensor in by_slot.tensors]
                state, count = updated(found[0], found[1], int(batch.token_ids[row]))
                by_slot.tensors[0][slot] = torch.tensor(state)
                by_slot.tensors[1][slot] = count
                length = int(batch.own.positions[row]) + 1
                keys = kv.k[table[: -(-length // PAGE_SIZE)].long()].flatten(0, 1)[:length]
                hidden[row] = next_token(state, count, float(keys[:, 0, 2].sum()))

        for row, slot in enumerate(batch.slots.decodes.tolist()):
            advance(slot, slot, range(row, row + 1), tables[row])
        ends = batch.chunks.row_starts[1:].tolist()
        sources, slots, starts = (part.tolist() for part in batch.slots.segments)
        for source, slot, (start, end) in zip(sources, slots, pairwise(starts), strict=True):
            chunk = sum(end > last for last in ends)
            rows = range(num_decodes + start, num_decodes + end)
            advance(source, slot, rows, batch.chunks.page_table[min(chunk, len(ends) - 1)])
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
    capacity = capacity_of(NUM_PAGES)
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
    return ModelRunner(computation, capacity, {})


def capacity_of(num_pages: int) -> Capacity:
    longest = (num_pages - 1) * PAGE_SIZE
    return Capacity(num_pages, PAGE_SIZE, NUM_SLOTS, longest, num_snapshots=NUM_SNAPSHOTS)


def states_of(num_pages: int) -> list[LayerState]:
    return allocate_states(LAYERS, capacity_of(num_pages), CPU)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_snapshots", [0, 1, NUM_SNAPSHOTS])
def test_requests_that_share_slots_pages_and_steps_get_the_tokens_of_a_loop(
    num_snapshots: int, captured: bool
) -> None:
    """Slots and pages are too few: requests wait, are retracted, and begin anew in other slots.
    Others begin from snapshots, of which there are too few, too."""
    runner = runner_of_toy()
    if captured:
        shapes = (StepShape(3), mixed_shape(3, 8, 2))
        runner.capture([GraphKey(shape) for shape in shapes], lambda done: None)
    scheduler = Scheduler(
        kv=KVCacheManager(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            cache_type="radix",
            num_snapshots=num_snapshots,
        ),
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
    prompts += [[*prompts[2][:9], 1], [*prompts[2][:9], 2, 3], [*prompts[2][:9], 4], prompts[2]]
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
    assert bool(scheduler.counters.num_cached_tokens) is bool(num_snapshots)
    assert bool(num_captured) is captured
    runner.close()


def test_memory_counts_the_states_of_slots_and_each_cache_once() -> None:
    states = states_of(num_pages=NUM_PAGES)
    tensors = [tensor for state in distinct(states) for tensor in state.tensors]
    num_states = NUM_SLOTS + 1 + NUM_SNAPSHOTS
    num_bytes = NUM_PAGES * page_bytes(LAYERS, PAGE_SIZE) + num_states * slot_bytes(LAYERS)
    assert sum(tensor.nbytes for tensor in tensors) == num_bytes
    planes = Planes.of([plane for state in distinct(states) for plane in state.planes])
    assert planes.page_bytes == page_bytes(LAYERS, PAGE_SIZE)


WEIGHTS = WeightMemory(free_at_start=80 * GIB, weight_bytes=60 * GIB)
STEPS = StepMemory(activation_bytes=GIB, graph_bytes=0)


def test_states_of_slots_and_snapshots_are_taken_off_the_pages() -> None:
    pages, state = LAYERS[1:2], StateSpec(shapes=((1 << 20,),), dtypes=("float32",))
    config = resolved(machine=GPU)
    whole, none = fit_caches(config, pages, WEIGHTS, STEPS)
    assert none == 0
    of_slots = (config.max_running_requests + 1) * 4 << 20
    left = dataclasses.replace(WEIGHTS, weight_bytes=60 * GIB + of_slots)
    assert (
        fit_caches(config, [*pages, state], WEIGHTS, STEPS)[0]
        == fit_caches(config, pages, left, STEPS)[0]
    )
    given = dataclasses.replace(config, num_snapshots=7)
    left = dataclasses.replace(left, weight_bytes=left.weight_bytes + 7 * (4 << 20))
    assert fit_caches(given, [*pages, state], WEIGHTS, STEPS) == (
        fit_caches(config, pages, left, STEPS)[0],
        7,
    )
    too_many = dataclasses.replace(config, num_snapshots=10_000)
    with pytest.raises(DeviceMemoryError, match="--max-running-requests, --state-cache or"):
        fit_caches(too_many, [*pages, state], WEIGHTS, STEPS)
    fitting = dataclasses.replace(config, num_snapshots=None)
    num_pages, num_snapshots = fit_caches(fitting, [*pages, state], WEIGHTS, STEPS)
    share = num_snapshots * (4 << 20) / (11 * GIB - of_slots)
    assert 0.33 < share <= 1 / 3
    assert num_pages < whole


def test_a_stage_without_states_or_without_a_cache_leaves_the_numbers_to_the_others() -> None:
    state = StateSpec(shapes=((1 << 20,),), dtypes=("float32",))
    config = dataclasses.replace(resolved(machine=GPU), num_snapshots=None)
    both = fit_caches(config, [LAYERS[1], state], WEIGHTS, STEPS)
    assert fit_caches(config, [state], WEIGHTS, STEPS)[0] > both[0]
    assert fit_caches(config, LAYERS[1:2], WEIGHTS, STEPS)[1] > both[1]
    with pytest.raises(DeviceMemoryError):
        fit_caches(dataclasses.replace(config, num_snapshots=10_000), [state], WEIGHTS, STEPS)


def test_the_states_of_requests_take_at_most_half_of_what_weights_leave() -> None:
    config = resolved(machine=GPU)
    state = StateSpec(shapes=((1 << 20,),), dtypes=("float32",))
    assert fit_slots(config, [state], 2 * GIB) == 255  # and the scratch slot
    assert fit_slots(config, [state], GIB) == 127
    assert fit_slots(config, [state], 0) == 1
    assert fit_slots(config, [state], 80 * GIB) == config.max_running_requests
    assert fit_slots(config, LAYERS[1:2], GIB) == config.max_running_requests
