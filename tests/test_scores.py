"""Logprobs of `LLM` as trainers ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.request import TokenLogprobs

PROMPT = [1, 2, 3, 50, 60]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", num_pages=20, max_running_requests=4, max_logprobs=128) as llm:
        yield llm


def test_up_to_128_alternatives_and_the_ranks_of_all_tokens_are_told(llm: LLM) -> None:
    params = SamplingParams(
        temperature=2, seed=1, max_tokens=12, ignore_eos=True, logprobs=128, prompt_logprobs=128
    )
    [output] = llm.generate(PROMPT, params)
    [short] = llm.generate(
        PROMPT, params, logprobs=0, prompt_logprobs=0
    )  # ranks do not need alternatives
    assert output.logprobs and output.prompt_logprobs and short.logprobs and short.prompt_logprobs
    scored = [*output.logprobs, *filter(None, output.prompt_logprobs)]
    again = [*short.logprobs, *filter(None, short.prompt_logprobs)]
    assert max(entry.rank for entry in scored) > 20
    for entry, other in zip(scored, again, strict=True):
        check_rank(entry)
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)


def test_processed_logprobs_are_those_of_the_tokens_that_top_k_leaves() -> None:
    options = {"device": "cpu", "num_pages": 10, "max_running_requests": 2}
    params = SamplingParams(temperature=0.7, top_k=2, seed=1, max_tokens=4, ignore_eos=True)
    with LLM(**options, logprobs_mode="processed_logprobs") as llm:  # type: ignore[arg-type]
        [processed] = llm.generate(PROMPT, params, logprobs=3)
    with LLM(**options) as llm:  # type: ignore[arg-type]
        [raw] = llm.generate(PROMPT, params, logprobs=3)
    assert processed.token_ids == raw.token_ids and processed.logprobs and raw.logprobs
    for entry, other in zip(processed.logprobs, raw.logprobs, strict=True):
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]
        first, second = (logprob / 0.7 for _, logprob in other.top[:2])
        lead = -math.log1p(math.exp(second - first))
        assert [each for _, each in entry.top] == pytest.approx(
            [lead, lead + second - first, -math.inf], abs=1e-4
        )
        assert entry.logprob == dict(entry.top)[entry.token_id] and entry.rank == other.rank


def test_a_float32_head_scores_finer_than_the_steps_of_bfloat16() -> None:
    """The differences of logprobs are those of logits, up to the rounding of float32."""

    def gaps(**options: Any) -> list[float]:
        with LLM(device="cpu", dtype="bfloat16", num_pages=10, **options) as llm:
            [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), logprobs=9)
        assert output.logprobs is not None
        [entry] = output.logprobs
        return [entry.logprob - logprob for _, logprob in entry.top]

    def off_grid(gap: float) -> float:
        return abs(gap * 2**9 - round(gap * 2**9))

    coarse, fine = gaps(), gaps(head_dtype="float32")
    assert max(map(off_grid, coarse)) < 0.01 < max(map(off_grid, fine))
    assert fine == pytest.approx(coarse, abs=0.1)


def check_rank(entry: TokenLogprobs) -> None:
    assert len(entry.top) == 128
    if entry.rank <= 128:
        assert entry.top[entry.rank - 1] == (entry.token_id, entry.logprob)
    else:
        assert entry.token_id not in dict(entry.top) and entry.logprob <= entry.top[-1][1]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_the_option_allows_are_refused(name: str) -> None:
    with LLM(device="cpu", num_pages=10, max_running_requests=2) as llm:
        with pytest.raises(InvalidRequestError, match=f"{name}: at most 20 alternatives"):
            llm.generate(PROMPT, SamplingParams(max_tokens=1), **{name: 21})  # type: ignore[arg-type]
        [output] = llm.generate(PROMPT, SamplingParams(max_tokens=1), logprobs=20)
        assert output.logprobs and len(output.logprobs[0].top) == 20


@pytest.mark.parametrize("wrong", [19, 129])
def test_an_engine_offers_20_to_128_alternatives(wrong: int) -> None:
    with pytest.raises(ConfigError, match="allowed: 20 to 128"):
        LLM(max_logprobs=wrong)
