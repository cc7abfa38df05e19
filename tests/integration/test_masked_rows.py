"""The whole engine with fake matchers: masks decide, and nobody else notices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.checkpoints import load_reference, reference_logits
from support.fake_matcher import FakeMatcher, held_to
from support.masked_rows import CASE, outputs, rows
from support.parity import FEW_PAGES, NOISE, case_of, load_engine

from minisgl.engine import AsyncEngine
from minisgl.request import Request, SamplingParams


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each row alone, one step at a time."""
    return outputs(rows(64), alone=True, overlap=False)


def test_a_masked_greedy_row_takes_the_best_allowed_token(expected: list[list[int]]) -> None:
    reference = load_reference(case_of(CASE).folder)
    for (prompt, params, rule), output in zip(rows(64), expected, strict=True):
        if not params.greedy or rule is None:
            continue
        logits = reference_logits(reference, [*prompt, *output])[len(prompt) - 1 :]
        for place, token_id in enumerate(output):
            allowed = logits[place][sorted(rule(output[:place]))]
            assert logits[place][token_id] >= allowed.max() - NOISE * logits[place].abs().max()
            assert token_id in rule(output[:place])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"padded": 32, "max_prefill_length": 16},
        {"page_size": 1, "max_prefill_length": 7},
        FEW_PAGES,
    ],
    ids=lambda options: ",".join(options),
)
def test_mixed_rows_get_the_tokens_that_they_get_alone(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    assert outputs(rows(64), **options) == expected


def test_padded_masked_steps_give_the_same_tokens_when_pages_are_short(
    expected: list[list[int]],
) -> None:
    assert outputs(rows(20), padded=4, **FEW_PAGES) == expected[:20]


@pytest.mark.parametrize("padded", [0, 4])
def test_mixed_rows_of_two_ranks_get_the_tokens_of_one(
    padded: int, expected: list[list[int]]
) -> None:
    assert outputs(rows(24), tp=2, padded=padded) == expected[:24]


def test_a_mask_comes_after_bias_and_penalties_and_logprobs_stay_raw() -> None:
    case = case_of(CASE)
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={3: 100.0, 4: 50.0}, logprobs=2)

    async def run(matcher: FakeMatcher | None) -> Request:
        async with AsyncEngine(load_engine(case.folder)) as engine:
            stream = engine.submit(case.prompts[0], params, extras=held_to(matcher))
            await stream.wait_finished()
            return stream.request

    free, masked = (asyncio.run(run(m)) for m in (None, FakeMatcher(lambda _: {4, 5, 6})))
    assert (free.output_token_ids, masked.output_token_ids) == ([3], [4])
    logits = reference_logits(load_reference(case.folder), case.prompts[0])[-1]
    raw = logits.log_softmax(-1)
    assert masked.logprobs[0].logprob == pytest.approx(float(raw[4]), abs=1e-3)
    assert [token for token, _ in masked.logprobs[0].top] == torch.topk(raw, 2).indices.tolist()
