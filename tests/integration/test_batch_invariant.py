"""--batch-invariant on a CPU: the bits of tokens and logprobs depend on the request alone."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any
from unittest import mock

import pytest
from support.invariance import SPECS, Bits, bits, bits_in, engine_of, folder_of, jobs_of, num_equal
from support.parity import FEW_PAGES
from support.resolving import GPU, resolved

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.models.around import AroundDecoder
from minisgl.models.invariant import RowByRow
from minisgl.parts.scores import device as scores
from minisgl.runner.setup import read_setup

NAMES = pytest.mark.parametrize("name", ["qwen3", "moe"])
LENGTHS = (9, 33, 40, 3, 17, 21, 5, 12)
NUM_TOKENS = 8


def jobs(name: str) -> list[Any]:
    return jobs_of(SPECS[name], LENGTHS, NUM_TOKENS)


@cache
def alone(name: str) -> list[Bits]:
    """Each request by itself, in an engine that keeps nothing of the others."""
    return bits_in(name, jobs(name), together=False, cache_type="naive", page_size=4)


@NAMES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_length": 7, "page_size": 4},
        {"overlap": False, "max_running_requests": 3},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company(name: str, options: dict[str, Any]) -> None:
    assert bits_in(name, jobs(name), **options) == alone(name)


@NAMES
def test_bits_do_not_depend_on_the_number_of_others(name: str) -> None:
    expected = alone(name)

    async def run() -> None:
        async with engine_of(name, page_size=4) as engine:
            for first in range(1, len(LENGTHS)):
                some = jobs(name)[first : 2 * first]
                assert await bits(engine, some) == expected[first : 2 * first]

    asyncio.run(run())


@NAMES
def test_bits_do_not_depend_on_what_is_cached(name: str) -> None:
    expected = alone(name)

    async def run() -> None:
        async with engine_of(name, page_size=4) as engine:
            for _ in range(2):
                assert await bits(engine, jobs(name)) == expected
            assert engine.stats().counters.num_cached_tokens > sum(LENGTHS) // 2

    asyncio.run(run())


@NAMES
def test_bits_depend_neither_on_retraction_nor_on_what_host_memory_brings(name: str) -> None:
    options = FEW_PAGES | {"num_pages": 24, "max_seq_len_override": 80, "host_cache": 0.01}
    expected = alone(name)

    async def run() -> None:
        async with engine_of(name, **options) as engine:
            for _ in range(2):
                assert await bits(engine, jobs(name)) == expected
            counters = engine.stats().counters
            assert counters.num_retractions > 0 and counters.num_host_tokens > 0

    asyncio.run(run())


def test_prompts_are_scored_row_by_row() -> None:
    """On a GPU a row of logits that begins at another alignment is added up in another order."""
    with mock.patch.object(scores, "top_logprobs", wraps=scores.top_logprobs) as scored:
        bits_in("qwen3", jobs("qwen3")[7:])
    assert {len(call.args[0]) for call in scored.call_args_list} == {1}
    assert len(scored.call_args_list) >= LENGTHS[7] - 1


def test_a_wide_head_is_pinned_too() -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "head_dtype": "float32"}
    one_by_one = bits_in("qwen3", jobs("qwen3"), together=False, **options)
    assert bits_in("qwen3", jobs("qwen3"), max_prefill_length=9, **options) == one_by_one


def test_each_of_several_choices_is_that_of_its_seed() -> None:
    prompts = ["The cat", "Once upon a time there was a"]
    params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, logprobs=1)
    with LLM(device="cpu", dtype="float32", num_pages=64, batch_invariant=True) as llm:
        together = llm.generate(prompts, params, n=3)
        first, second = (llm.generate([prompt], params, n=3) for prompt in prompts)
    answers = [
        [(each.token_ids, each.logprobs) for each in some] for some in (together, first + second)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 6


@NAMES
@pytest.mark.parametrize("unpinned", ["__call__", "logits"])
def test_rows_that_are_computed_together_differ(name: str, unpinned: str) -> None:
    """Of a model, and of its head alone."""
    with mock.patch.object(RowByRow, unpinned, getattr(AroundDecoder, unpinned)):
        assert num_equal(bits_in(name, jobs(name)), alone(name)) < len(LENGTHS)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("qwen3", {"tp": 2}, "with several ranks (--tp 2, --pp 1) bits"),
        ("qwen3", {"pp": 2}, "with several ranks (--tp 1, --pp 2) bits"),
        ("moe", {"pp": 2}, "with several ranks (--tp 1, --pp 2) bits"),
        ("moe", {"tp": 2, "ep": True}, "with several ranks (--tp 2, --pp 1) bits"),
        ("moe", {"tp": 2, "dp_attention": True}, "with several ranks (--tp 2, --pp 1) bits"),
        ("moe", {"speculative": "ngram"}, "with --speculative bits"),
        ("qwen3", {"task": "embed"}, "with --task embed bits"),
        ("qwen3", {"speculative": "ngram"}, "with --speculative bits"),
        ("qwen3", {"max_loras": 1}, "with adapters (--lora, --max-loras) bits"),
        ("qwen3", {"kv_cache_dtype": "fp8"}, "with a KV cache in FP8 bits"),
        ("qwen3", {"host_cache": 0.1, "disk_cache": "/nowhere"}, "with --disk-cache bits"),
        ("moe", {"return_routed_experts": True}, "with --return-routed-experts bits"),
        ("qwen3", {"quantization": "fp8"}, "this model has kernels whose bits"),
        ("qwen3", {"model_impl": "adopted"}, "this model has kernels whose bits"),
        ("mistral", {}, "this model has kernels whose bits"),
    ],
    ids=str,
)
def test_what_is_not_pinned_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    folder = str(folder_of(name))
    config = EngineConfig(model=folder, device="cpu", batch_invariant=True, **options)
    with pytest.raises(ConfigError) as caught:
        read_setup(config)
    assert f"{reason} may depend on other rows; allowed: generating with" in str(caught.value)


def test_a_gpu_has_one_attention_and_steps_of_few_rows() -> None:
    config = resolved(machine=GPU, batch_invariant=True)
    assert (config.attn_prefill, config.attn_decode) == ("triton", "triton")
    assert config.max_prefill_length == 512
    assert any("at the price of speed: no cuBLAS" in note for note in config.notes)
    assert (
        resolved(machine=GPU, batch_invariant=True, max_prefill_length=64).max_prefill_length == 64
    )
    for wrong in ({"dtype": "float32"}, {"attn": "triton,fi"}, {"max_running_requests": 512}):
        with pytest.raises(ConfigError, match="may depend on other rows"):
            resolved(machine=GPU, batch_invariant=True, **wrong)
