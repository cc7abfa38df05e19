"""The KV cache in memory: how many pages there is room for, and their storage."""

from __future__ import annotations

import torch

from minisgl.attention.base import LayerKV
from minisgl.config import ModelFacts, ResolvedConfig
from minisgl.errors import DeviceMemoryError

GIB = 1 << 30


def allocate_kv(
    facts: ModelFacts, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerKV]:
    """Zeroed storage: what no request has written yet must at least be finite.

    Raises DeviceMemoryError where it does not fit.
    """
    shape = (num_pages, page_size, facts.num_kv_heads, facts.head_dim)
    try:
        return [
            LayerKV(
                k=torch.zeros(shape, dtype=dtype, device=device),
                v=torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(facts.num_layers)
        ]
    except RuntimeError as error:  # OutOfMemoryError on a GPU; the CPU's allocator has no own type
        raise DeviceMemoryError(
            f"No room for a KV cache of {num_pages} pages of {page_size} tokens: "
            "lower --num-pages, --memory-ratio or --page-size."
        ) from error


def fit_num_pages(
    config: ResolvedConfig,
    facts: ModelFacts,
    *,
    free_at_start: int,
    free_now: int,
    activation_bytes: int,
) -> int:
    """Pages that `memory_ratio` leaves room for on a GPU.

    free_at_start: bytes free before the weights were loaded; free_now: with them in place;
    activation_bytes: what the largest step takes on top. Raises DeviceMemoryError if nothing is
    left for the cache.
    """
    page_bytes = facts.kv_bytes_per_token(config.dtype) * config.page_size
    weight_bytes = free_at_start - free_now
    budget = int(free_at_start * config.memory_ratio)
    room = budget - weight_bytes - activation_bytes
    num_pages = room // page_bytes
    if num_pages < 2:
        raise DeviceMemoryError(
            f"--memory-ratio {config.memory_ratio} of the {free_at_start / GIB:.1f} GiB free is "
            f"{budget / GIB:.1f} GiB; weights take {weight_bytes / GIB:.1f} and the largest step "
            f"{activation_bytes / GIB:.1f}, which leaves nothing for the KV cache. Raise it, or "
            "lower --max-prefill-length or --max-running-requests."
        )
    return num_pages
