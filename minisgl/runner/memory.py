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
    KVSpec,
    LayerSpec,
    ResolvedConfig,
    SharedKV,
    StateSpec,
    WindowSizes,
    page_bytes,
    slot_bytes,
)
from minisgl.errors import DeviceMemoryError

GIB = 1 << 30
MIN_PAGES = 2  # the scratch page and one for requests


def allocate_states(
    layers: Sequence[LayerSpec],
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    num_snapshots: int = 0,
    windows: WindowSizes | None = None,
    num_window_pages: int = 0,
    device: torch.device,
) -> list[LayerState]:
    """Allocate what all layers keep between steps. windows: which of them have `num_window_pages`
    pages of their own; None: none.

    Zeroed, because attention may multiply unwritten positions by 0, which needs finite values.
    Raises DeviceMemoryError if it does not fit.
    """

    def zeros(dtype: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    states: list[LayerState] = []
    try:
        for spec in layers:
            match spec:
                case KVSpec():
                    windowed = windows is not None and windows.has(spec)
                    num = num_window_pages if windowed else num_pages
                    k, v = (zeros(spec.dtype, num, page_size, *shape) for shape in spec.shapes)
                    states.append(PagedKV.of(spec, k, v, windowed=windowed))
                case StateSpec():
                    num = num_slots + 1 + num_snapshots
                    tensors = tuple(zeros(dtype, num, *shape) for dtype, shape in spec.tensors)
                    states.append(StateBySlot(tensors))
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
class MemoryUse:
    """GPU memory that is not available to the KV cache, in bytes."""

    free_at_start: int  # before the weights were loaded
    weight_bytes: int  # with the dense copies
    activation_bytes: int  # of the largest step, including the tables
    graph_bytes: int
    copy_bytes: int = 0  # of dense copies of quantised weights


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
    config: ResolvedConfig, layers: Sequence[LayerSpec], use: MemoryUse
) -> tuple[int, int]:
    """Number of pages, and of snapshots of states, that fit into `memory_ratio` of a GPU's free
    memory next to `use` and the states of all slots.

    Raises DeviceMemoryError if nothing is left for the pages.
    """
    bytes_each, of_state = page_bytes(layers, config.page_size), slot_bytes(layers)
    budget = int(use.free_at_start * config.memory_ratio)
    of_slots = state_bytes(config, layers)
    taken = use.weight_bytes + use.activation_bytes + use.graph_bytes + of_slots
    num_snapshots = config.num_snapshots or 0
    # The other stages decide where one has no states, or no KV cache.
    if config.num_snapshots is None:
        room = max(0, int((budget - taken) * SNAPSHOT_SHARE))
        num_snapshots = room // of_state if of_state else sys.maxsize
    taken += num_snapshots * of_state
    room = budget - taken
    num_pages = room // bytes_each if bytes_each else sys.maxsize * (room >= 0)
    if num_pages < MIN_PAGES:
        least = math.ceil(100 * (taken + MIN_PAGES * bytes_each) / use.free_at_start) / 100
        weights, remedy = f"{use.weight_bytes / GIB:.1f}", ""
        step = f"{use.activation_bytes / GIB:.1f}"
        if of_slots:
            of_all = of_slots + num_snapshots * of_state
            step += f", the states of requests and their snapshots {of_all / GIB:.1f}"
        if use.copy_bytes:
            weights += f" ({use.copy_bytes / GIB:.1f} of that dense copies)"
            remedy = " --dense-copies never does without the copies."
        raise DeviceMemoryError(
            f"--memory-ratio {config.memory_ratio} of the {use.free_at_start / GIB:.1f} GiB free "
            f"is {budget / GIB:.1f} GiB; weights take {weights}, the largest step "
            f"{step} and CUDA graphs {use.graph_bytes / GIB:.1f}, which "
            "leaves nothing for the KV cache. "
            + (f"Raise it to {least} or more, or lower " if least <= 1 else "Lower ")
            + "--max-prefill-length, --max-running-requests"
            + (", --state-cache" if config.num_snapshots else "")
            + " or --cuda-graph-max-bs."
            + remedy
        )
    return num_pages, num_snapshots
