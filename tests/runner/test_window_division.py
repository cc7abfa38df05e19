"""How many pages a runner gets of each kind, on one rank and where the ranks have to agree."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.resolving import GPU, MODEL, resolved

from minisgl.config import AttentionSpec, LayerSpec, ResolvedConfig, StateSpec, page_bytes
from minisgl.runner.memory import HostPages, divide_pages

FULL = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=64, scale=0.125)
WINDOWED = replace(FULL, window=128)


@dataclass
class Others:
    """Ranks that have no more than these numbers, in the order in which they are asked."""

    numbers: list[int]

    def host_min(self, value: int) -> int:
        return min(value, self.numbers.pop(0))


def options_for(*layers: AttentionSpec, **options: Any) -> ResolvedConfig:
    model = replace(MODEL, layers=layers, max_seq_len=8192)
    return resolved(model, GPU, page_size=16, attn="torch", **options)


def divided(
    config: ResolvedConfig, num_pages: int, *layers: AttentionSpec, others: Any = None
) -> tuple[int, int]:
    specs: list[LayerSpec] = [spec.kv("bfloat16") for spec in layers]
    pipeline = Others(others or [sys.maxsize] * 3)
    return divide_pages(config, specs, num_pages, pipeline)  # type: ignore[arg-type]


def test_pages_of_both_kinds_take_the_memory_of_pages_alike() -> None:
    config = options_for(FULL, WINDOWED)
    num_full, num_windowed = divided(config, 10_000, FULL, WINDOWED)
    each = page_bytes([FULL.kv("bfloat16")], 16)
    assert 10_000 * 2 * each - each < (num_full + num_windowed) * each <= 10_000 * 2 * each
    assert 18_000 < num_full < 19_000


def test_pages_are_alike_where_that_holds_as_many_tokens() -> None:
    config = options_for(FULL, WINDOWED)
    assert divided(config, 100, FULL, WINDOWED) == (100, 0)
    assert divided(options_for(FULL, FULL), 100, FULL, FULL) == (100, 0)
    tiered = options_for(FULL, WINDOWED, host_cache=0.1)  # whose pages there have full layers
    assert divided(tiered, 100, FULL, WINDOWED) == (100, 100)


def test_windowed_pages_for_all_requests_beside_the_full_pages_of_the_option() -> None:
    config = options_for(FULL, WINDOWED, num_pages=5000, max_running_requests=100)
    assert divided(config, 5000, FULL, WINDOWED) == (5000, 1 + 128 + 100 * 10)


def test_windowed_pages_for_all_that_the_full_pages_of_the_option_may_cache() -> None:
    config = options_for(FULL, WINDOWED, num_pages=25_600, max_running_requests=100)
    num_typical = 25_600 * 16 // 2048
    assert divided(config, 25_600, FULL, WINDOWED) == (25_600, 1 + 128 + num_typical * 10)


@pytest.mark.parametrize(("layers", "kind"), [([FULL], 1), ([WINDOWED], 0)])
def test_a_stage_with_one_kind_of_layers_takes_the_number_of_the_other(
    layers: list[AttentionSpec], kind: int
) -> None:
    config = options_for(FULL, WINDOWED)
    others = [5000, sys.maxsize, sys.maxsize]
    others[1 + kind] = 9000
    assert divided(config, 8000, *layers, others=others)[kind] == 9000


def test_where_all_layers_have_a_window_full_pages_are_only_numbers() -> None:
    """There are as many as the longest requests have that fit into the windowed pages."""
    config = options_for(WINDOWED, WINDOWED, max_running_requests=100)
    num_full, num_windowed = divided(config, 20_000, WINDOWED, WINDOWED)
    assert 19_980 < num_windowed <= 20_000
    assert num_full == 1 + num_windowed // 10 * (8192 // 16)


STATE = StateSpec(((4, 8, 9),), ("float32",), num_heads=4)


def host_pages(
    *layers: AttentionSpec | StateSpec, others: tuple[int, int] = (1, 1), **options: Any
) -> HostPages:
    """Of a stage with these layers. others: pages that the other stages need for a snapshot, and
    for a page of windowed layers."""
    config = options_for(FULL, WINDOWED, host_cache=0.1, **options)
    specs: list[LayerSpec] = [
        spec if isinstance(spec, StateSpec) else spec.kv("bfloat16") for spec in layers
    ]
    pipeline = Others([-num for num in others])
    return HostPages.agreed(config, specs, pipeline)  # type: ignore[arg-type]


def test_stages_agree_on_the_pages_of_host_memory_that_states_and_windows_take() -> None:
    each, of_state = page_bytes([FULL.kv("bfloat16")], 16), STATE.bytes_per_slot
    assert each == 16384 and of_state == 1152
    assert host_pages(FULL, WINDOWED) == HostPages(each, 1, 1)
    assert host_pages(FULL, *[WINDOWED] * 3) == HostPages(each, 1, 3)
    assert host_pages(FULL, FULL, *[WINDOWED] * 3) == HostPages(2 * each, 1, 2)
    assert host_pages(FULL, *[STATE] * 15) == HostPages(each, 2, 1)
    assert host_pages(FULL, WINDOWED, STATE, others=(7, 5)) == HostPages(each, 7, 5)
    assert host_pages(FULL, WINDOWED, whole_pages=True) == HostPages(2 * each, 1, 1)


def test_pages_of_a_stage_without_full_layers_are_as_large_as_its_parts() -> None:
    each, of_state = page_bytes([FULL.kv("bfloat16")], 16), STATE.bytes_per_slot
    assert host_pages(WINDOWED, WINDOWED) == HostPages(2 * each, 1, 1)
    assert host_pages(WINDOWED, WINDOWED, others=(1, 3)) == HostPages(-(-2 * each // 3), 1, 3)
    assert host_pages(STATE, others=(5, 1)) == HostPages(-(-of_state // 5), 5, 1)
    assert host_pages() == HostPages(1, 1, 1)
