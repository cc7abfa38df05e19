"""The least time of a run: what each step moves and multiplies, in the formats that it does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import config_of

from minisgl.bench import peak as peak_module
from minisgl.bench.config import STANDARD
from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.peak import Peak, engine_peak, measure_peak
from minisgl.bench.roofline import DecodeStep, KernelWork, Work
from minisgl.bench.workload.requests import make_workload
from minisgl.config import ModelFacts
from minisgl.models.registry import read_model_config

H200 = Peak(bytes_per_s=4.28e12, operations_per_s=800e12)


def facts(folder: Path, name: str, quantization: str | None = None) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(config_of(name, quantization)))
    return read_model_config(folder).facts()


def request(num_prompt_tokens: int, num_output_tokens: int) -> RequestRecord:
    return RequestRecord(
        submitted_s=0.0,
        first_token_s=1.0,
        last_token_s=2.0,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=num_output_tokens,
    )


def run_of(requests: list[RequestRecord], num_steps: int) -> RunRecord:
    return RunRecord(requests, num_steps=num_steps, num_retractions=0)


def work(run: RunRecord, model: ModelFacts, peak: Peak = H200, **options: Any) -> Work:
    given = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "max_running": 256} | options
    return Work.of(run, model, peak, **given)


def test_a_kernel_takes_the_longer_of_moving_and_computing() -> None:
    peak = Peak(bytes_per_s=10.0, operations_per_s=100.0, fp8_operations_per_s=200.0)
    assert KernelWork(50.0, 300.0).seconds(peak) == 5.0
    assert KernelWork(50.0, 800.0).seconds(peak) == 8.0
    assert KernelWork(50.0, 1800.0, in_layers=True).seconds(peak) == 9.0


@pytest.mark.parametrize(
    ("name", "in_int4", "tokens_per_s"),
    [
        ("Qwen3-14B", False, 8_100),
        ("Qwen3-14B", True, 9_390),
        ("Qwen3-32B", False, 3_830),
        ("Qwen3-32B", True, 4_500),
    ],
)
def test_the_limit_of_the_standard_workload_adds_up_its_kernels(
    tmp_path: Path, name: str, in_int4: bool, tokens_per_s: int
) -> None:
    """By hand: with more than 187 rows, arithmetic limits products of bfloat16, of INT4 with 50."""
    jobs = make_workload(STANDARD, vocab_size=151_936, seed=0)
    requests = [request(len(job.prompt), job.max_tokens) for job in jobs]
    num_steps = max(one.num_output_tokens for one in requests)
    model = facts(tmp_path, name, "int4" if in_int4 else None)
    done = work(run_of(requests, num_steps), model)
    assert 133_966 / done.seconds == pytest.approx(tokens_per_s, rel=0.01)


def test_a_decode_step_of_many_rows_is_limited_by_its_operations(tmp_path: Path) -> None:
    model = facts(tmp_path, "Qwen3-14B")
    few, many = (
        work(run_of([request(1, 11)] * size, num_steps=11), model, replace(H200, bytes_per_s=4e12))
        for size in (100, 256)
    )
    weights = model.num_layer_weights + model.num_head_weights
    step_s = 2 * weights / 4e12  # 2 bytes a weight: as long as 200 rows multiply
    assert few.seconds == pytest.approx(11 * step_s, rel=0.02)
    assert many.seconds == pytest.approx((1 + 10 * 256 / 200) * step_s, rel=0.03)
    assert many.decode_operations == pytest.approx(10 * 256 * 2 * weights, rel=0.01)
    assert few.weight_bytes == many.weight_bytes == 11 * 2 * weights


def test_layers_multiply_at_the_peak_of_fp8_and_the_head_does_not(tmp_path: Path) -> None:
    model = facts(tmp_path, "Qwen3-14B")
    run = run_of([request(1, 3)] * 1000, num_steps=3)
    step = DecodeStep.of(run, model, dtype="bfloat16", kv_dtype="bfloat16")
    peak = Peak(bytes_per_s=1e18, operations_per_s=1e15, fp8_operations_per_s=2e15)
    attention = step.attention.operations
    by_hand = 2000 * model.num_layer_weights / 2 + 2000 * model.num_head_weights + attention
    assert step.seconds(peak) == pytest.approx(by_hand / 1e15)


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight"),
    [("fp8-block", 1 + 4 / 128**2), ("fp8-channel", 1.0), ("int4", 0.5 + 2 / 128)],
)
def test_quantised_weights_are_counted_as_they_are_stored(
    tmp_path: Path, quantization: str, bytes_per_weight: float
) -> None:
    for name in ("Qwen3-14B", "Qwen3-30B-A3B"):
        model = facts(tmp_path, name, quantization)
        layers = model.num_layer_weights * bytes_per_weight
        if model.experts is not None:
            layers += 48 * 8 * model.experts.num_weights * bytes_per_weight
        run = run_of([request(512, 3)], num_steps=3)
        step = DecodeStep.of(run, model, dtype="bfloat16", kv_dtype="bfloat16")
        assert step.weight_bytes == pytest.approx(layers + 2 * model.num_head_weights, rel=0.01)


def test_the_kv_cache_is_counted_in_its_own_dtype(tmp_path: Path) -> None:
    model, run = facts(tmp_path, "Qwen3-14B"), run_of([request(9, 3)], num_steps=3)
    narrow, wide = (work(run, model, kv_dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert wide.kv_bytes == 2 * narrow.kv_bytes
    assert wide.weight_bytes == narrow.weight_bytes
    steps = [
        DecodeStep.of(run, model, dtype="bfloat16", kv_dtype=dtype)
        for dtype in ("bfloat16", "float32")
    ]
    assert steps[1].kv_bytes == 2 * steps[0].kv_bytes


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (40, 0), (40, 5), (40, 30)])
def test_layers_with_a_window_read_and_multiply_what_it_shows(
    tmp_path: Path, prompt: int, cached: int
) -> None:
    """By hand, token by token."""
    whole, num_outputs = facts(tmp_path, "Qwen3-14B"), 9
    layers = [replace(spec, window=16) for spec in whole.attention[::2]]
    model = replace(whole, layers=(*layers, *whole.attention[1::2]))
    one = replace(request(prompt, num_outputs), num_cached_tokens=cached)
    rest = run_of([one], num_outputs)
    kv = whole.kv_bytes_per_token("bfloat16") // 2  # of the layers of either kind
    pair = sum(4 * spec.num_heads * spec.head_dim for spec in layers)

    def seen(first: int, last: int) -> int:
        return sum(min(length, 16) + length for length in range(first, last + 1))

    decoded = range(prompt + 1, prompt + num_outputs)
    step = DecodeStep.of(rest, model, dtype="bfloat16", kv_dtype="bfloat16")
    read = seen(decoded[0], decoded[-1])
    assert step.kv_bytes * len(decoded) == pytest.approx((read + 2 * len(decoded)) * kv)
    assert step.attention.operations * len(decoded) == pytest.approx(read * pair)
    products = 2 * model.num_layer_weights * (prompt - cached) + 2 * model.num_head_weights
    assert work(rest, model).prefill_operations == products + seen(cached + 1, prompt) * pair


def test_prompts_share_the_steps_that_do_not_decode(tmp_path: Path) -> None:
    """So that weights are read while their prompts are multiplied, and not before that, too."""
    model = facts(tmp_path, "Qwen3-14B")
    long = work(run_of([request(16_384, 1)] * 2, num_steps=2), model)
    assert long.seconds == pytest.approx(long.prefill_operations / 800e12, rel=0.001)
    short = work(run_of([request(16, 1)] * 2, num_steps=2), model)
    assert short.seconds == pytest.approx(short.weight_bytes / 4.28e12, rel=0.001)


def test_steps_beyond_one_for_each_prompt_decode_a_row(tmp_path: Path) -> None:
    """As where requests arrive by and by: the experts of a row are read, and not all."""
    model = facts(tmp_path, "Qwen3-30B-A3B")
    assert model.experts is not None
    together, apart = (work(run_of([request(9, 5)] * 4, num_steps=n), model) for n in (8, 9))
    one_row = model.weight_bytes("bfloat16") + 8 * 48 * 2 * model.experts.num_weights
    assert apart.weight_bytes - together.weight_bytes == pytest.approx(one_row)


@pytest.mark.parametrize("in_fp8", [True, False])
def test_the_peak_of_fp8_is_measured_where_it_is_asked_for(
    in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not every torch multiplies FP8 with a scale for each row on a CPU.
    monkeypatch.setattr(peak_module, "measure_fp8_operations_per_s", lambda device, size: 1.0)
    cpu = torch.device("cpu")
    peak = measure_peak(cpu, torch.float32, copied_bytes=1 << 16, matrix_size=64, in_fp8=in_fp8)
    assert (peak.fp8_operations_per_s is not None) == in_fp8
    expected = peak.fp8_operations_per_s if in_fp8 else peak.operations_per_s
    assert peak.layer_operations_per_s == expected


@pytest.mark.parametrize(
    ("quantization", "capability", "asked"),
    [
        ("fp8-block", (9, 0), True),
        ("fp8-channel", (9, 0), True),
        ("fp8-block", (8, 6), False),
        ("int4", (9, 0), False),
        (None, (9, 0), False),
    ],
)
def test_fp8_is_measured_where_the_layers_multiply_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
    capability: tuple[int, int],
    asked: bool,
) -> None:
    def measure(device: torch.device, dtype: torch.dtype, *, in_fp8: bool) -> Peak:
        assert (device.type, dtype) == ("cuda", torch.bfloat16)
        return Peak(1.0, 2.0, 4.0 if in_fp8 else None)

    monkeypatch.setattr(peak_module, "measure_peak", measure)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = facts(tmp_path, "Qwen3-14B", quantization)

    class Config:
        device, dtype, num_ranks = "cuda", "bfloat16", 2

    peak: Any = engine_peak(Config, model)  # type: ignore[arg-type]
    assert peak == Peak(2.0, 4.0, 8.0 if asked else None)


def test_a_peak_is_told_with_that_of_fp8() -> None:
    assert str(H200) == "4.28 TB/s and 800 TFLOP/s"
    assert str(replace(H200, fp8_operations_per_s=1.5e15)).endswith("TFLOP/s (1,500 in FP8)")
