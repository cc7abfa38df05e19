"""What bench_kernels.py times, with small sizes in Triton's interpreter: each case has its inputs,
our kernel takes them, and computes what torch does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU kernels are compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

import attention_kernels
import kernel_timer
import linear_kernels
import small_kernels
from attention_kernels import BACKENDS, FP8, Heads, attention_case
from kernel_timer import Call, Case, Problem, Report
from linear_kernels import (
    EXPERTS,
    LAYER_FORMATS,
    LINEAR_FORMATS,
    MAKE_FP8,
    Shape,
    experts_problem,
    layer_problem,
    linear_problem,
)
from lora_kernels import lora_problem, sort_problem
from small_kernels import (
    ELEMENTWISE,
    FULL_SAMPLING,
    MAPS,
    SAMPLING,
    ngrams_problem,
    sampling_problem,
)

from minisgl.request import SamplingParams
from minisgl.runner.sampling_features import SamplingVariant

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
HEADS = Heads(4, 2, 32)
LATENTS = Heads(4, 1, 576, rank=512)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timer, "COLD_BYTES", 1)
    monkeypatch.setattr(attention_kernels, "COLD_BYTES", 1)
    monkeypatch.setattr(linear_kernels, "WORKSPACE_FLOATS", 1 << 16)
    monkeypatch.setattr(kernel_timer, "median_s", one_call_s)
    monkeypatch.setattr(linear_kernels, "COLD_BYTES", 1)
    monkeypatch.setattr(small_kernels, "CALLS", 1)


def one_call_s(calls: Sequence[Call] | Call, rounds: int) -> float:
    """Takes the place of the clocks of a GPU."""
    (calls if callable(calls) else calls[-1])()
    return 1e-6


def rows_of(problem: Callable[[], Problem], **options: Any) -> list[str]:
    """What is printed of a case; fails where a result is not what torch computes."""
    lines: list[str] = []
    report = Report(None, clock=one_call_s, write=lines.append, passed_over=(), **options)
    assert report.run([Case("a case", problem)]), lines
    return lines[1:]


@pytest.mark.parametrize("heads", [HEADS, replace(HEADS, kv_dtype=FP8), LATENTS], ids=str)
@pytest.mark.parametrize(
    ("form", "kernels"),
    [((2, 1, 40), ["triton"]), ((2, 20, 0), ["triton"]), ((2, 5, 40), ["triton", "unsplit"])],
    ids=["decode", "prompts", "chunks"],
)
def test_attention(form: tuple[int, int, int], heads: Heads, kernels: list[str]) -> None:
    tiles = {"num_warps": [4], "min_split": [128, 256]}
    rows = rows_of(attention_case(form, heads).make, kernels=kernels, tiles=tiles)
    assert [row.split()[2] for row in rows[: len(kernels)]] == kernels
    assert rows[len(kernels)].startswith("  in use: ") and len(rows) == len(kernels) + 3


def test_backends_are_asked_by_name_and_one_that_is_missing_says_so() -> None:
    report = Report(None, clock=one_call_s, write=(lines := []).append)
    assert report.run([attention_case((2, 1, 40), HEADS)])
    assert [line[57:].split()[0] for line in lines[1:]] == list(BACKENDS)
    assert all("flash" in line for line in lines[2:]), lines


PRODUCTS = [(each, gated) for each in LINEAR_FORMATS for gated in (False, each not in MAKE_FP8)]


@pytest.mark.parametrize(("format", "gated"), dict.fromkeys(PRODUCTS))
def test_products(format: str, gated: bool) -> None:
    make = partial(linear_problem, Shape("o", 64, 256, gated), format, 3)
    rows = rows_of(make, kernels=["minisgl", "cuBLAS"], tiles={"block_n": [16, 32]})
    assert [row.split()[2] for row in rows[:-3]] == ["minisgl"] + ["cuBLAS"] * (format == "bf16")
    assert [row.split()[-1] for row in sorted(rows[-2:])] == ["block_n=16", "block_n=32"]


def test_many_rows_have_their_weights_written_in_bfloat16() -> None:
    make = partial(linear_problem, Shape("o", 64, 256), "int4", 129)
    assert len(rows_of(make)) == 2


@pytest.mark.parametrize("format", LAYER_FORMATS)
def test_a_layer(format: str) -> None:
    assert len(rows_of(partial(layer_problem, format, CONFIG, 3))) == 1


@pytest.mark.parametrize("format", EXPERTS["Qwen3-30B-A3B"])
def test_experts(format: str) -> None:
    tiles = {"inner.num_stages": [3]}
    make = partial(experts_problem, format, CONFIG, 1)
    assert len(rows_of(make, tiles=tiles)) == 3


@pytest.mark.parametrize("kernel", ELEMENTWISE | MAPS)
def test_small_kernels(kernel: str) -> None:
    assert len(rows_of(partial((ELEMENTWISE | MAPS)[kernel], CONFIG, 3))) == 2


@pytest.mark.parametrize("adapters", [0, 2])
def test_products_with_adapters(adapters: int) -> None:
    make = partial(lora_problem, Shape("qkv", 96, 128), (64, 16, 16), 3, adapters)
    rows = rows_of(make)
    apart = ["shrink", "gemm"] if adapters else []
    assert sorted(row.split()[2] for row in rows) == sorted(["minisgl", "cuBLAS", *apart])
    assert len(rows_of(partial(sort_problem, 5, 3))) == 1


@pytest.mark.parametrize("name", SAMPLING | FULL_SAMPLING)
def test_sampling(name: str) -> None:
    variant = SamplingVariant.FULL if name in FULL_SAMPLING else SamplingVariant.FILTERED
    params = SamplingParams(**(SAMPLING | FULL_SAMPLING)[name])
    assert len(rows_of(partial(sampling_problem, params, variant, 2, 128, 3.0))) == 2


def test_ngrams() -> None:
    [row] = rows_of(partial(ngrams_problem, 2, 200))
    assert row.split()[2] == "minisgl"
