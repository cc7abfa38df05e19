"""Sizes and allocates the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.attention.base import LayerKV
from minisgl.config import KVSpec, ResolvedConfig
from minisgl.errors import DeviceMemoryError

GIB = 1 << 30
MIN_PAGES = 2  # the scratch page and one for requests


def allocate_kv(
    layers: Sequence[KVSpec], *, num_pages: int, page_size: int, device: torch.device
) -> list[LayerKV]:
    """Allocate the KV cache of all layers; k and v of each are [num_pages, page_size, *spec.shape].

    Zeroed, because attention may multiply unwritten positions by 0, which needs finite values.
    Raises DeviceMemoryError if it does not fit.
    """

    def zeros(spec: KVSpec) -> torch.Tensor:
        shape = (num_pages, page_size, *spec.shape)
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    try:
        return [LayerKV(zeros(spec), zeros(spec), spec.scales) for spec in layers]
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


def page_bytes(layers: Sequence[KVSpec], page_size: int) -> int:
    """Bytes of a page in the KV cache of all layers."""
    return sum(spec.bytes_per_token for spec in layers) * page_size


def fit_num_pages(config: ResolvedConfig, layers: Sequence[KVSpec], use: MemoryUse) -> int:
    """Number of pages that fit into `memory_ratio` of a GPU's free memory next to `use`.

    Raises DeviceMemoryError if nothing is left for the cache.
    """
    bytes_each = page_bytes(layers, config.page_size)
    budget = int(use.free_at_start * config.memory_ratio)
    taken = use.weight_bytes + use.activation_bytes + use.graph_bytes
    num_pages = (budget - taken) // bytes_each
    if num_pages < MIN_PAGES:
        least = math.ceil(100 * (taken + MIN_PAGES * bytes_each) / use.free_at_start) / 100
        weights, remedy = f"{use.weight_bytes / GIB:.1f}", ""
        if use.copy_bytes:
            weights += f" ({use.copy_bytes / GIB:.1f} of that dense copies)"
            remedy = " --dense-copies never does without the copies."
        raise DeviceMemoryError(
            f"--memory-ratio {config.memory_ratio} of the {use.free_at_start / GIB:.1f} GiB free "
            f"is {budget / GIB:.1f} GiB; weights take {weights}, the largest step "
            f"{use.activation_bytes / GIB:.1f} and CUDA graphs {use.graph_bytes / GIB:.1f}, which "
            "leaves nothing for the KV cache. "
            + (f"Raise it to {least} or more, or lower " if least <= 1 else "Lower ")
            + "--max-prefill-length, --max-running-requests or --cuda-graph-max-bs."
            + remedy
        )
    return num_pages
