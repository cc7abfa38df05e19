"""Ranks that divide requests in attention, real processes over gloo, give the tokens of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.forked_ranks import forked_ranks
from support.parity import FEW_PAGES, Case, batch, case_of, cut, greedy, load_engine
from support.pipelines import Outcome, mixed_outcomes
from support.tensor_parallel import check_with_aborts, short_case_of
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.distributed.communicator import Communicator
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import load
from minisgl.layers import by_request
from minisgl.runner.row_order import RowOrder

NUM_TOKENS = 10
DP: dict[str, Any] = {"tp": 2, "dp_attention": True}
ON_FOUR: dict[str, Any] = {"tp": 4, "dp_attention": True}


def test_greedy_tokens_of_a_dense_model_equal_those_of_transformers() -> None:
    """In chunks, with prefixes that are found again, retraction and aborts. For mixtures see
    test_layouts.py."""
    check_with_aborts(short_case_of("qwen3"), **DP)


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama-biased")


@pytest.fixture(scope="module")
def expected(case: Case) -> list[Outcome]:
    return mixed_outcomes(case)


@pytest.mark.parametrize(
    "options",
    [
        {**DP, "max_prefill_length": 16},
        {**DP, "overlap": False, **FEW_PAGES},
        # In the shapes that would be captured on a GPU.
        {**ON_FOUR, "padded": 8},
        {**DP, "pp": 2, "padded": 8},
    ],
    ids=str,
)
def test_mixed_rows_get_the_outputs_of_one_rank(
    options: dict[str, Any], case: Case, expected: list[Outcome]
) -> None:
    """Every kind of sampling, masked rows, and logprobs of prompts."""
    assert mixed_outcomes(case, **options) == expected


def tokens_of(case: Case, num_alone: int, **options: Any) -> list[list[int]]:
    """Greedy tokens of all prompts together, and then of the last ones, each alone."""
    prompts = case.prompts

    async def run() -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, prompts, [greedy(NUM_TOKENS)] * len(prompts))
            for prompt in prompts[-num_alone:]:  # the other ranks have nothing to do
                outputs += await batch(engine, [prompt], [greedy(NUM_TOKENS)])
                assert len(prompt) <= 16 or outputs[-1].num_cached_tokens
            return [output.token_ids for output in outputs]

    return asyncio.run(run())


@pytest.mark.parametrize(("name", "padded"), [("moe", 8), ("qwen2", 0)])
def test_ranks_without_a_request_take_part(name: str, padded: int) -> None:
    """The 14 heads of this Qwen2 do not divide by 4, for which they need not."""
    case = cut(short_case_of(name), NUM_TOKENS)
    wanted = [run.token_ids for run in case.runs]
    found = tokens_of(case, 2, **ON_FOUR, padded=padded)
    assert found == [*wanted, *wanted[-2:]]


def test_ranks_hold_together_what_does_not_fit_one() -> None:
    case = case_of("qwen3")
    pages = {"page_size": 4, "num_pages": 26, "max_seq_len_override": 100}

    async def run() -> None:
        prompt = case.prompts[4]
        prompts = [[*prompt, 1, index] for index in range(2)]
        async with AsyncEngine(load_engine(case.folder, **DP, **pages)) as engine:
            assert engine.stats().num_pages == 50
            outputs = await batch(engine, prompts, [greedy(30)] * 2)
            assert not engine.stats().counters.num_retractions
            assert engine.stats().num_cached_pages > 25
        async with AsyncEngine(load_engine(case.folder, **pages)) as engine:
            alone = await batch(engine, prompts, [greedy(30)] * 2)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]

    asyncio.run(run())


# -- what is said ----------------------------------------------------------------------------------


def test_the_start_says_how_many_tokens_there_are_on_each_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with forked_ranks():
        loaded = load(EngineConfig(device="cpu", num_pages=11, page_size=4, **DP))
    loaded.runner.close()
    assert "KV cache of 80 tokens (40 on each of 2 ranks) in float32" in caplog.text
    assert loaded.capacity.num_tokens == 80


# -- mistakes --------------------------------------------------------------------------------------


def _swap_ranks(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The rows of one rank are taken for those of the other."""
    return torch.cat(whole(own, shares, ranks).split([*shares])[::-1])


def _keep_filler(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """What fills up a part counts, and the last rows do not."""
    longest = max(shares)
    part = own.new_zeros((longest, own.shape[1]))
    part[: len(own)] = own
    return whole(part, [longest] * ranks.size, ranks)[: sum(shares)]


def _add_filler(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The parts are added to one another."""
    rows = whole(own, shares, ranks)
    first, second = rows.split([*shares])
    num = min(shares)
    first[:num] += second[:num]
    return rows


def _keep_own(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """A rank goes on with zeros for the rows of the others."""
    rows, first = whole(own, shares, ranks), sum(shares[: ranks.rank])
    rows[:first] = 0
    rows[first + len(own) :] = 0
    return rows


def _misplace(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The rows of this rank are where the next row should be."""
    return zeros_and_own(own, shares, ranks).roll(1, 0)


def _fill_with_own(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """Where there should be zeros there are rows."""
    rows = zeros_and_own(own, shares, ranks)
    return rows + rows.flip(0)


whole, zeros_and_own = by_request.gathered, by_request.placed
MISTAKES = (
    *(("gathered", mistake) for mistake in (_swap_ranks, _keep_filler, _add_filler, _keep_own)),
    ("placed", _misplace),
    ("placed", _fill_with_own),
)


def changes_tokens(num_alone: int, **options: Any) -> bool:
    case = cut(short_case_of("qwen3"), NUM_TOKENS)
    found = tokens_of(case, num_alone, **DP, **options)
    runs = [*case.runs, *case.runs[-num_alone:]]
    return sum(ids != run.token_ids for ids, run in zip(found, runs, strict=True)) > 1


@pytest.mark.parametrize(("function", "mistake"), MISTAKES)
def test_mistakes_change_tokens(
    function: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 makes them, whose tokens count: with the rows of all prompts, or with few."""
    monkeypatch.setattr(by_request, function, mistake)
    assert changes_tokens(2)


def test_tokens_of_padding_rows_are_not_those_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of the shape of a captured one, where rank 0 takes the rows of both ranks for one
    after another, as if there was no padding between them."""
    rows = RowOrder.sampled_rows

    def undivided(order: RowOrder, *step: Any) -> tuple[range, ...]:
        return rows(RowOrder(order.num_slots), *step)

    monkeypatch.setattr(RowOrder, "sampled_rows", undivided)
    assert changes_tokens(4, padded=8)
