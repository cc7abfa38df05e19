"""Sizes and allocates the KV cache, and what else layers keep."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.attention.state import LayerState, PagedKV, StateBySlot
from minisgl.config import (
    SNAPSHOT_SHARE,
    Capacity,
    KVSpec,
    LayerSpec,
    ResolvedConfig,
    SharedKV,
    StateSpec,
    WindowSizes,
    divide,
    page_bytes,
    slot_bytes,
)
from minisgl.distributed.pipeline import Pipeline
from minisgl.errors import DeviceMemoryError

GIB = 1 << 30
MIN_PAGES = 2  # the scratch page and one for requests

# Of full pages where all layers have a window, unless the longest sequence needs more.
MOST_NUMBERS = 1 << 22


def allocate_states(
    layers: Sequence[LayerSpec],
    capacity: Capacity,
    device: torch.device,
    windows: WindowSizes | None = None,
) -> list[LayerState]:
    """Allocate what all layers keep between steps. windows: which layers have the capacity's
    windowed pages, if it has any.

    Zeroed, because attention may multiply unwritten positions by 0, which needs finite values.
    Raises DeviceMemoryError if it does not fit.
    """

    def zeros(dtype: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    num_pages, num_windowed = capacity.num_pages, capacity.num_window_pages
    page_size, num_snapshots = capacity.page_size, capacity.num_snapshots
    num_states = capacity.num_slots // capacity.num_attending + 1 + num_snapshots
    states: list[LayerState] = []
    try:
        for spec in layers:
            match spec:
                case KVSpec():
                    windowed = bool(windows and num_windowed and windows.has(spec))
                    num = num_windowed if windowed else num_pages
                    k, v = (zeros(spec.dtype, num, page_size, *shape) for shape in spec.shapes)
                    states.append(PagedKV.of(spec, k, v, windowed=windowed))
                case StateSpec():
                    of_slots = (zeros(dtype, num_states, *shape) for dtype, shape in spec.tensors)
                    states.append(StateBySlot(tuple(of_slots)))
                case SharedKV():
                    states.append(states[spec.layer])
        return states
    except RuntimeError as error:  # on a CPU; OutOfMemoryError on a GPU
        beside, also = "", ""
        if num_snapshots:
            beside, also = f" and {num_snapshots} snapshots of states", ", --state-cache"
        raise DeviceMemoryError(
            f"No room for a KV cache of {num_pages} pages of {page_size} tokens{beside}: lower "
            f"--memory-ratio{also} or --num-pages; without --num-pages as many are made as fit."
        ) from error


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """A GPU once the weights are in place, in bytes. On a CPU nothing is measured, and all is 0."""

    free_at_start: int
    weight_bytes: int  # that are not free any more, with the dense copies
    copy_bytes: int = 0  # of dense copies of quantised weights
    held_bytes: int = 0  # that tensors take

    @staticmethod
    def measured(device: torch.device, free_at_start: int, copy_bytes: int) -> WeightMemory:
        weight_bytes = free_at_start - free_bytes(device)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return WeightMemory(free_at_start, weight_bytes, copy_bytes, held)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the largest steps have taken beside the weights."""

    activation_bytes: int  # of the largest step, including the tables
    graph_bytes: int
    prefill_s: float = 0.0  # to compute a token of a prompt, if there is a host cache


def page_table_bytes(config: ResolvedConfig) -> int:
    """Bytes of the page tables of all slots and of a step's decode rows, each wide enough for the
    longest sequence, and of a second pair where windowed layers have pages of their own; and of the
    tokens of all slots if n-grams are looked for in them."""
    columns = -(-config.max_seq_len // config.page_size)
    num_tables = 1 if config.windows is None else 2
    numbers = num_tables * (1 + config.max_run) * columns
    if config.speculative == "ngram":
        numbers += config.max_seq_len + 1
    return (config.max_running_requests + 1) * numbers * 4


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including unused blocks of the caching allocator; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def state_bytes(config: ResolvedConfig, layers: Sequence[LayerSpec]) -> int:
    """Bytes of the states of all slots of a rank, the scratch slot included."""
    return (config.max_running_requests // config.num_attending + 1) * slot_bytes(layers)


def fit_slots(config: ResolvedConfig, layers: Sequence[LayerSpec], room: int) -> int:
    """Number of requests whose states fit into half of `room`, the bytes that the weights leave on
    a GPU; at least one, and at most as many as may run. Of one rank, as all of this.

    With prompts and answers of 1,500 tokens, as many fit into the KV cache that the other half
    leaves.
    """
    bytes_each = slot_bytes(layers)
    most = config.max_running_requests // config.num_attending
    fitting = room // 2 // bytes_each - 1 if bytes_each else most
    return max(1, min(most, fitting))


def fit_caches(
    config: ResolvedConfig, layers: Sequence[LayerSpec], weights: WeightMemory, steps: StepMemory
) -> tuple[int, int]:
    """Number of pages, and of snapshots of states, that fit into `memory_ratio` of a GPU's free
    memory next to weights, steps and the states of all slots.

    Raises DeviceMemoryError if nothing is left for the pages.
    """
    bytes_each, of_state = page_bytes(layers, config.page_size), slot_bytes(layers)
    budget = int(weights.free_at_start * config.memory_ratio)
    of_slots = state_bytes(config, layers)
    taken = weights.weight_bytes + steps.activation_bytes + steps.graph_bytes + of_slots
    num_snapshots = config.num_snapshots or 0
    # The other stages decide where one has no states, or no KV cache.
    if config.num_snapshots is None:
        room = max(0, int((budget - taken) * SNAPSHOT_SHARE))
        num_snapshots = room // of_state if of_state else sys.maxsize
    taken += num_snapshots * of_state
    room = budget - taken
    num_pages = room // bytes_each if bytes_each else sys.maxsize * (room >= 0)
    if num_pages < MIN_PAGES:
        least = math.ceil(100 * (taken + MIN_PAGES * bytes_each) / weights.free_at_start) / 100
        of_weights, remedy = f"{weights.weight_bytes / GIB:.1f}", ""
        step = f"{steps.activation_bytes / GIB:.1f}"
        if of_slots:
            of_all = of_slots + num_snapshots * of_state
            step += f", the states of requests and their snapshots {of_all / GIB:.1f}"
        if weights.copy_bytes:
            of_weights += f" ({weights.copy_bytes / GIB:.1f} of that dense copies)"
            remedy = " --dense-copies never does without the copies."
        raise DeviceMemoryError(
            f"--memory-ratio {config.memory_ratio} of the {weights.free_at_start / GIB:.1f} GiB "
            f"free is {budget / GIB:.1f} GiB; weights take {of_weights}, the largest step {step} "
            f"and CUDA graphs {steps.graph_bytes / GIB:.1f}, which leaves nothing for the KV "
            "cache. "
            + (f"Raise it to {least} or more, or lower " if least <= 1 else "Lower ")
            + "--max-prefill-length, --max-running-requests"
            + (", --state-cache" if config.num_snapshots else "")
            + " or --cuda-graph-max-bs."
            + remedy
        )
    return num_pages, num_snapshots


def divide_pages(
    config: ResolvedConfig, layers: Sequence[LayerSpec], num_pages: int, pipeline: Pipeline
) -> tuple[int, int]:
    """The numbers of pages of full and of windowed layers; as many of these as of those, or 0 if
    all layers have the same, where that is more. num_pages: as many as fit then, or the option's.
    All ranks must call this together."""
    sizes, num_slots = config.windows, config.max_running_requests // config.num_attending
    room = num_pages * page_bytes(layers, config.page_size)
    num_pages = pipeline.host_min(num_pages)
    if sizes is None:
        return num_pages, 0
    if config.num_pages:
        num_cached = num_pages // sizes.typical_pages(config.max_seq_len)
        return num_pages, sizes.pages_for(max(num_slots, num_cached))
    full, windowed = map(pipeline.host_min, divide(sizes, layers, room, config.max_seq_len))
    if full == sys.maxsize:  # no layer needs them: they are only numbers
        longest = -(-config.max_seq_len // config.page_size)
        wanted = max(num_slots, windowed // sizes.span) * longest
        full = 1 + min(wanted, max(longest, MOST_NUMBERS))
    if full > num_pages:
        return full, windowed
    return num_pages, num_pages if config.num_host_pages else 0


@dataclass(frozen=True, slots=True)
class HostPages:
    """The pages of host memory."""

    num_bytes: int  # of one on this rank
    state_parts: int  # pages that a snapshot takes, on every rank
    window_parts: int  # and a page of windowed layers

    @staticmethod
    def agreed(
        config: ResolvedConfig, layers: Sequence[LayerSpec], pipeline: Pipeline
    ) -> HostPages:
        """Pages as large as those of the full layers of each stage, and as many for what is beside
        one as the stage with the least room in them needs. Where a stage has no full layers, its
        pages are as large as its parts of the rest. All ranks must call this together."""
        whole = page_bytes(config.whole_layers(layers), config.page_size)
        beside = [slot_bytes(layers), page_bytes(layers, config.page_size) - whole]
        own = [-(-each // whole) if whole else 1 for each in beside]
        state, window = (max(1, -pipeline.host_min(-num)) for num in own)
        of_parts = (-(-each // num) for each, num in zip(beside, (state, window), strict=True))
        return HostPages(whole or max(1, *of_parts), state, window)


def fit_capacity(
    config: ResolvedConfig,
    layers: Sequence[LayerSpec],
    pipeline: Pipeline,
    weights: WeightMemory,
    steps: StepMemory,
) -> Capacity:
    """What the options ask for, or as much as fits; the same on all ranks, which must call this
    together. Raises DeviceMemoryError if nothing is left for the pages."""
    num_pages, num_snapshots = config.num_pages, config.num_snapshots or 0
    if not num_pages:
        num_pages, num_snapshots = fit_caches(config, layers, weights, steps)
    num_snapshots = pipeline.host_min(num_snapshots)
    num_pages, num_window_pages = divide_pages(config, layers, num_pages, pipeline)
    return Capacity.of(config, num_pages, num_snapshots, num_window_pages)
