"""How memory is divided between pages of full and of windowed layers, and where it is not."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from support.resolving import CPU, GPU, MODEL, resolved

from minisgl.config import (
    AttentionSpec,
    KVSpec,
    LayerSpec,
    ResolvedConfig,
    StateSpec,
    WindowSizes,
    divide,
)

FULL = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=64, scale=0.125)
WINDOWED, WIDER = replace(FULL, window=128), replace(FULL, window=1000)
STATE = StateSpec(((8, 4),), ("float32",))


WHOLE = {"whole_pages": True}


def options_for(
    *layers: AttentionSpec | StateSpec, max_seq_len: int = 131_072, **options: Any
) -> ResolvedConfig:
    model = replace(MODEL, layers=layers, max_seq_len=max_seq_len)
    return resolved(model, options.pop("machine", GPU), page_size=16, attn="torch", **options)


def test_the_widest_window_that_is_shorter_than_a_sequence_counts() -> None:
    sizes = options_for(WINDOWED, FULL, WIDER).windows
    assert sizes is not None and sizes.window == 1000
    # 63 pages hold the 999 tokens before a query; 1 the query, and 1 the 16 in flight.
    assert (sizes.span, sizes.spare) == (63 + 2, 2048 // 16)
    sizes = options_for(WINDOWED, FULL, WIDER, max_seq_len=1000).windows
    assert sizes is not None and sizes.window == 128
    assert not sizes.hold_all_of(WIDER) and sizes.hold_all_of(WINDOWED)
    assert sizes.spare == 63


@pytest.mark.parametrize(("draft_tokens", "in_flight"), [(3, 16), (7, 16), (8, 18), (15, 32)])
def test_runs_of_any_length_are_in_flight(draft_tokens: int, in_flight: int) -> None:
    sizes = options_for(WINDOWED, FULL, speculative="ngram", draft_tokens=draft_tokens).windows
    assert sizes is not None and sizes.in_flight == in_flight


def test_a_request_of_few_tokens_needs_a_page_for_each() -> None:
    sizes = options_for(WINDOWED, FULL).windows
    assert sizes is not None
    assert [sizes.num_needed(count) for count in (1, 16, 16.1, 159, 161)] == [1, 1, 2, 10, 10]


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        pytest.param([FULL, FULL], {}, id="no-window"),
        pytest.param([WINDOWED, FULL], {"max_seq_len": 128}, id="short-sequences"),
        pytest.param([WINDOWED, FULL], {"whole_pages": True}, id="whole-pages"),
        pytest.param([WINDOWED], {"host_cache": 0.1}, id="host-cache-without-full-layers"),
        pytest.param([WINDOWED, FULL], {"num_pages": 1 + 128 + 256 * 10}, id="few-pages"),
        pytest.param([WINDOWED, FULL], {"machine": replace(CPU, free_cpu_bytes=1 << 28)}, id="cpu"),
    ],
)
def test_one_page_table_for_all_layers(layers: list[Any], options: dict[str, Any]) -> None:
    assert options_for(*layers, **options).windows is None


@pytest.mark.parametrize("num_windowed", [1, 3])
def test_host_memory_has_pages_of_full_layers(num_windowed: int) -> None:
    layers = [FULL, FULL] + [WINDOWED] * num_windowed
    config, whole = (options_for(*layers, host_cache=0.1, **each) for each in ({}, WHOLE))
    assert config.windows is not None and whole.windows is None
    ratio = (2 + num_windowed) / 2
    assert config.num_host_pages == pytest.approx(whole.num_host_pages * ratio, abs=ratio)
    specs = [spec.kv("bfloat16") for spec in (WINDOWED, FULL)]
    assert (config.whole_layers(specs), whole.whole_layers(specs)) == (specs[1:], specs)


def test_states_and_drafting_networks_go_with_windows() -> None:
    assert options_for(WINDOWED, FULL, STATE).windows is not None
    drafters = replace(WINDOWED, window=1), WINDOWED, WIDER, FULL
    model = replace(MODEL, layers=(WINDOWED, FULL), max_seq_len=131_072, draft_layers=drafters)
    options = {"page_size": 16, "attn": "torch", "speculative": "drafter"}
    sizes = resolved(model, GPU, **options).windows
    assert sizes is not None and sizes.window == WINDOWED.window
    assert [sizes.has(spec.kv("bfloat16")) for spec in drafters] == [True, True, False, False]
    assert resolved(replace(model, layers=(FULL,)), GPU, **options).windows is None


def test_each_rank_that_attends_for_requests_needs_the_pages_of_its_own() -> None:
    options = {"num_pages": 2 + 128 + 128 * 10, "tp": 2}
    assert options_for(WINDOWED, FULL, machine=replace(GPU, num_gpus=2), **options).windows is None
    divided = options_for(
        WINDOWED, FULL, machine=replace(GPU, num_gpus=2), **options, dp_attention=True
    )
    assert divided.windows is not None


def test_few_requests_at_once_need_few_pages() -> None:
    sizes = options_for(WINDOWED, FULL, num_pages=2 + 128 + 256 * 10).windows
    assert sizes is not None and sizes.pages_for(256) == 1 + 128 + 256 * 10


def layers_of(num_full: int, num_windowed: int) -> tuple[list[LayerSpec], WindowSizes]:
    """Like gpt-oss: 16 KB a page and layer, in bfloat16."""
    sizes = options_for(WINDOWED, FULL).windows
    assert sizes is not None
    specs = [FULL] * num_full + [WINDOWED] * num_windowed
    layers: list[LayerSpec] = [replace(spec, num_kv_heads=4).kv("bfloat16") for spec in specs]
    return layers, sizes


def test_memory_is_divided_for_typical_requests() -> None:
    layers, sizes = layers_of(12, 12)
    full, windowed = sizes.page_bytes(layers)
    assert full == windowed == 12 * 16 * 4 * 2 * 64 * 2
    room = 40 << 30
    num_pages, num_windowed = divide(sizes, layers, room, 131_072)
    used = num_pages * full + num_windowed * windowed
    assert room - full < used <= room, "a page more does not fit"
    # For each 2,048 tokens of full layers there are 160 of windowed ones, and 2,048 for chunks.
    assert num_windowed == 1 + 128 + num_pages * 10 // 128
    assert num_pages / (room // (full + windowed)) == pytest.approx(2 * 128 / 138, rel=1e-3)


def test_little_memory_leaves_one_request_its_window() -> None:
    layers, sizes = layers_of(12, 12)
    full, windowed = sizes.page_bytes(layers)
    room = (1 + 128 + 10) * windowed + 5 * full
    assert divide(sizes, layers, room, 131_072) == (5, 1 + 128 + 10)
    assert divide(sizes, layers, 1000, 131_072) == (0, 1 + 128 + 10)


def test_stages_without_one_kind_of_layers_leave_its_number_to_others() -> None:
    layers, sizes = layers_of(12, 0)
    assert divide(sizes, layers, 10 * sizes.page_bytes(layers).full, 4096) == (10, sys.maxsize)
    layers, sizes = layers_of(0, 12)
    room = 500 * sizes.page_bytes(layers).windowed
    num_pages, num_windowed = divide(sizes, layers, room, 4096)
    assert num_pages == sys.maxsize and 490 < num_windowed <= 500
    assert divide(sizes, [], 0, 4096) == (sys.maxsize, sys.maxsize)


def test_a_cache_that_several_layers_read_has_the_widest_window_of_them() -> None:
    kv = WINDOWED.kv("float32")
    assert kv == KVSpec(num_kv_heads=8, key_dim=64, value_dim=64, dtype="float32", window=128)
    assert kv.read_by(WIDER).window == kv.read_by(WIDER).read_by(WINDOWED).window == 1000
    assert kv.read_by(FULL).read_by(WIDER).window is None
