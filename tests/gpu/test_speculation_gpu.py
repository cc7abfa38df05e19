"""Drafts on a GPU: kernels at real sizes, and whole runs against those without drafts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.attention_cases import Shape, check_decode_runs
from support.drafters import KnowingDrafter, num_accepted, num_drafted, watch
from support.ngrams import settled_step
from support.parity import (
    FEW_PAGES,
    NUM_TOKENS,
    SAMPLED,
    batch,
    case_of,
    check,
    greedy,
    load_engine,
)

from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.engine import AsyncEngine
from minisgl.kernels.slots import ngrams

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5}
RUNS = [(1, 1), (1, 4), (0, 0), (30, 3), (63, 2), (64, 4), (9000, 4), (129, 1), (2000, 2)]


@pytest.mark.parametrize("run", [1, 2, 4, 8])
@pytest.mark.parametrize("longest", [40, 5000, 100_000])
def test_n_grams_are_those_of_the_reference(run: int, longest: int) -> None:
    ours, theirs = (settled_step(run, 3, longest, device) for device in (GPU, CPU))
    ngrams.draft_ngrams(*ours)
    ngrams.draft_ngrams(*theirs)
    scratch = theirs[1].scratch_slot
    assert torch.equal(ours[1].drafts[:scratch].cpu(), theirs[1].drafts[:scratch])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (5, 128), (8, 128), (2, 64), (4, 256)])
def test_the_rows_of_a_run_see_the_keys_up_to_their_own(
    group: int, head_dim: int, dtype: torch.dtype
) -> None:
    shape = Shape(group, head_dim, 16, num_kv_heads=8, dtype=dtype, device="cuda")
    check_decode_runs(TritonAttention(), shape, 4, RUNS)


def test_the_rows_of_a_run_read_an_fp8_cache() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8")
    scales = KVScales(0.5, 0.25)
    shape = Shape(4, 128, 16, dtype=torch.bfloat16, device="cuda", kv_scales=scales)
    check_decode_runs(TritonAttention(), shape, 4, RUNS)


@pytest.mark.parametrize("spec", ["llama3", "qwen3", "moe-60"])
@pytest.mark.parametrize("options", [{}, {"max_prefill_length": 7, "page_size": 1}], ids=str)
def test_greedy_tokens_with_n_grams_equal_those_of_transformers(
    spec: str, options: dict[str, Any]
) -> None:
    check(case_of(spec), speculative="ngram", **ON_GPU, **options)


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("way", [{}, {"attn": "torch"}, {"cuda_graph_max_bs": 0}], ids=str)
def test_drafts_that_are_right_are_accepted_and_change_no_token(
    num_drafts: int, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("llama3")
    streams = [prompt + run.token_ids for prompt, run in zip(case.prompts, case.runs, strict=True)]
    drafter = KnowingDrafter("right", streams, case.spec.vocab_size)
    monkeypatch.setattr("minisgl.runner.load.NgramDrafter", drafter)
    options = ON_GPU | {"speculative": "ngram", "draft_tokens": num_drafts, "cuda_graph_max_bs": 0}
    loaded = load_engine(case.folder, **options | way)
    _, results = watch(loaded)

    async def run() -> list[list[int]]:
        async with AsyncEngine(loaded) as engine:
            params = [greedy()] * len(case.prompts)
            return [output.token_ids for output in await batch(engine, case.prompts, params)]

    assert asyncio.run(run()) == [each.token_ids for each in case.runs]
    assert num_accepted(results) == num_drafted(results) > NUM_TOKENS


def test_retraction_with_n_grams_changes_no_token() -> None:
    stats, _ = check(case_of("llama3"), speculative="ngram", **FEW_PAGES, **ON_GPU)
    assert stats.counters.num_retractions > 0


@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
def test_sampled_tokens_with_n_grams_equal_those_of_the_cpu(cuda_graph_max_bs: int) -> None:
    case = case_of("llama3")
    on_gpu = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "speculative": "ngram"}

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
            return [output.token_ids for output in outputs]

    assert asyncio.run(run(on_gpu)) == asyncio.run(run({}))
