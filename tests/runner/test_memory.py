"""Errors for insufficient memory name an option and a value with which it suffices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from support.resolving import GPU, MODEL, resolved

from minisgl.config import Capacity
from minisgl.errors import DeviceMemoryError
from minisgl.runner.memory import (
    GIB,
    MIN_PAGES,
    StepMemory,
    WeightMemory,
    allocate_states,
    fit_caches,
)

LAYERS = MODEL.kv_specs("bfloat16")
WEIGHTS = WeightMemory(free_at_start=80 * GIB, weight_bytes=60 * GIB)
STEPS = StepMemory(activation_bytes=8 * GIB, graph_bytes=3 * GIB)


def num_pages_of(*arguments: Any) -> int:
    return fit_caches(*arguments)[0]


def test_pages_fill_the_memory_that_everything_else_leaves() -> None:
    config = resolved(machine=GPU, memory_ratio=0.9)
    page_bytes = MODEL.kv_bytes_per_token(config.dtype) * config.page_size
    assert num_pages_of(config, LAYERS, WEIGHTS, STEPS) == GIB // page_bytes


def test_twice_the_pages_in_fp8() -> None:
    config = resolved(machine=GPU, kv_cache_dtype="fp8")
    num_pages = num_pages_of(config, MODEL.kv_specs(config.kv_dtype), WEIGHTS, STEPS)
    assert num_pages // 2 == num_pages_of(config, LAYERS, WEIGHTS, STEPS)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.88])
def test_a_memory_ratio_that_leaves_no_page_is_refused_with_one_that_does(ratio: float) -> None:
    """The one that is named is enough, and little more than that."""
    with pytest.raises(
        DeviceMemoryError, match=f"--memory-ratio {ratio} of the 80.0 GiB"
    ) as caught:
        num_pages_of(resolved(machine=GPU, memory_ratio=ratio), LAYERS, WEIGHTS, STEPS)
    named = re.search(r"Raise it to ([0-9.]+) or more", str(caught.value))
    assert named is not None
    least = float(named[1])
    enough = resolved(machine=GPU, memory_ratio=least)
    assert num_pages_of(enough, LAYERS, WEIGHTS, STEPS) >= MIN_PAGES
    with pytest.raises(DeviceMemoryError):
        num_pages_of(resolved(machine=GPU, memory_ratio=least - 0.02), LAYERS, WEIGHTS, STEPS)


def test_a_step_too_large_for_any_memory_ratio_is_refused() -> None:
    steps = dataclasses.replace(STEPS, activation_bytes=20 * GIB)
    with pytest.raises(DeviceMemoryError) as caught:
        num_pages_of(resolved(machine=GPU, memory_ratio=1.0), LAYERS, WEIGHTS, steps)
    assert "Raise" not in str(caught.value)
    assert "Lower --max-prefill-length" in str(caught.value)


def test_dense_copies_that_leave_no_page_are_named_with_the_option() -> None:
    weights = WeightMemory(80 * GIB, weight_bytes=70 * GIB, copy_bytes=50 * GIB)
    with pytest.raises(DeviceMemoryError) as caught:
        num_pages_of(resolved(machine=GPU), LAYERS, weights, STEPS)
    assert "weights take 70.0 (50.0 of that dense copies), the largest step" in str(caught.value)
    assert str(caught.value).endswith(" --dense-copies never does without the copies.")
    with pytest.raises(DeviceMemoryError) as caught:
        num_pages_of(
            resolved(machine=GPU), LAYERS, dataclasses.replace(weights, copy_bytes=0), STEPS
        )
    assert "dense" not in str(caught.value)


def test_more_pages_than_fit_in_memory_are_refused() -> None:
    with pytest.raises(DeviceMemoryError, match="without --num-pages as many are made as fit"):
        allocate_states(
            MODEL.kv_specs("float32"),
            Capacity(num_pages=1 << 40, page_size=16, num_slots=1, max_seq_len=16),
            torch.device("cpu"),
        )
