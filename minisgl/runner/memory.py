"""Sizes and allocates the KV cache, and what else layers keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.attention.state import LayerState, PagedKV, StateBySlot
from minisgl.config import (
    KVSpec,
    LayerSpec,
    ResolvedConfig,
    SharedKV,
    StateSpec,
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
    device: torch.device,
) -> list[LayerState]:
    """Allocate what all layers keep between steps.

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
                    k, v = (zeros(spec.dtype, num_pages, page_size, *its) for its in spec.shapes)
                    states.append(PagedKV(k, v, spec.scales))
                case StateSpec():
                    sizes = zip(spec.dtypes, spec.shapes, strict=True)
                    tensors = (zeros(dtype, num_slots + 1, *shape) for dtype, shape in sizes)
                    states.append(StateBySlot(tuple(tensors)))
                case SharedKV():
                    states.append(states[spec.layer])
        return states
    except RuntimeError as error:  # on a CPU; OutOfMemoryError on a GPU
        raise DeviceMemoryError(
            f"No room for a KV cache of {num_pages} pages of {page_size} tokens: "
            "lower --memory-ratio or --num-pages; without --num-pages as many are made as fit."
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
    longest sequence."""
    columns = -(-config.max_seq_len // config.page_size)
    return 2 * (config.max_running_requests + 1) * columns * 4


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including unused blocks of the caching allocator; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def state_bytes(config: ResolvedConfig, layers: Sequence[LayerSpec]) -> int:
    """Bytes of the states of all slots, the scratch slot included."""
    return (config.max_running_requests + 1) * slot_bytes(layers)


def fit_num_pages(config: ResolvedConfig, layers: Sequence[LayerSpec], use: MemoryUse) -> int:
    """Number of pages that fit into `memory_ratio` of a GPU's free memory next to `use` and the
    states of all slots.

    Raises DeviceMemoryError if nothing is left for the cache.
    """
    bytes_each = page_bytes(layers, config.page_size)
    budget = int(use.free_at_start * config.memory_ratio)
    of_slots = state_bytes(config, layers)
    taken = use.weight_bytes + use.activation_bytes + use.graph_bytes + of_slots
    num_pages = (budget - taken) // bytes_each
    if num_pages < MIN_PAGES:
        least = math.ceil(100 * (taken + MIN_PAGES * bytes_each) / use.free_at_start) / 100
        weights, remedy = f"{use.weight_bytes / GIB:.1f}", ""
        step = f"{use.activation_bytes / GIB:.1f}"
        if of_slots:
            step += f", the states of requests {of_slots / GIB:.1f}"
        if use.copy_bytes:
            weights += f" ({use.copy_bytes / GIB:.1f} of that dense copies)"
            remedy = " --dense-copies never does without the copies."
        raise DeviceMemoryError(
            f"--memory-ratio {config.memory_ratio} of the {use.free_at_start / GIB:.1f} GiB free "
            f"is {budget / GIB:.1f} GiB; weights take {weights}, the largest step "
            f"{step} and CUDA graphs {use.graph_bytes / GIB:.1f}, which "
            "leaves nothing for the KV cache. "
            + (f"Raise it to {least} or more, or lower " if least <= 1 else "Lower ")
            + "--max-prefill-length, --max-running-requests or --cuda-graph-max-bs."
            + remedy
        )
    return num_pages
