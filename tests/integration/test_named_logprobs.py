"""Logprobs of named tokens, by every way of the engine, beside those of transformers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.checkpoints import load_reference, reference_logits
from support.drafters import KnowingDrafter
from support.fake_matcher import FakeMatcher, held_to
from support.parity import WAYS, case_of, load_engine
from torch import Tensor

from minisgl.engine import AsyncEngine
from minisgl.errors import InvalidRequestError
from minisgl.request import Request, SamplingParams

CASE, NUM_TOKENS = "llama3", 12
NAMED = [(3, 5, 70), (), (9,), (60, 3, 3, 8, 1, 0)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={7: 9.0}, max_tokens=NUM_TOKENS, logprobs=2),
]
DRAFTS = {"speculative": "ngram", "draft_tokens": 3}
ALL_WAYS: dict[str, dict[str, Any]] = {
    **WAYS,
    "ranks": {"tp": 2},
    "by request": {"tp": 2, "dp_attention": True},
    "stages": {"pp": 2, "max_prefill_length": 16},
    "drafts": DRAFTS,
    "drafts by request": {**DRAFTS, "tp": 2, "dp_attention": True},
}


def answers(*, named: bool = True, **options: Any) -> list[Request]:
    """Requests that name tokens or do not, together; one is masked."""
    case = case_of(CASE)

    async def answer(engine: AsyncEngine, index: int) -> Request:
        params = PARAMS[index % len(PARAMS)]
        if named:
            params = replace(params, logprob_token_ids=NAMED[index % len(NAMED)])
        matcher = FakeMatcher(lambda tokens: {5 + len(tokens), 6}) if index == 3 else None
        stream = engine.submit(case.prompts[index], params, extras=held_to(matcher))
        await stream.wait_finished()
        return stream.request

    async def run() -> list[Request]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            found = await asyncio.gather(*(answer(engine, n) for n in range(len(case.prompts))))
            engine.audit()
            return found

    return asyncio.run(run())


@cache
def unnamed() -> list[list[int]]:
    return [request.output_token_ids for request in answers(named=False)]


def wanted(request: Request) -> Tensor:
    """The logprobs of all tokens in the places of the output."""
    logits = reference_logits(load_reference(case_of(CASE).folder), request.token_ids)
    return logits[request.num_prompt_tokens - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_named_tokens_have_the_logprobs_of_transformers(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(CASE)
    if way == "plain":  # ranks, which are processes, must have as many
        monkeypatch.setattr("minisgl.parts.device.BLOCK_ROWS", 2)
    if way == "drafts":
        streams = [[*prompt, *out] for prompt, out in zip(case.prompts, unnamed(), strict=True)]
        drafter = KnowingDrafter("fading", streams, case.spec.vocab_size)
        monkeypatch.setattr("minisgl.runner.load.NgramDrafter", drafter)
    found = answers(**ALL_WAYS[way])
    assert [request.output_token_ids for request in found] == unnamed()
    for request in found:
        ids = [*request.params.logprob_token_ids]
        scored = len(request.logprobs)
        assert scored == (NUM_TOKENS if ids or request.params.logprobs else 0)
        for entry, row in zip(request.logprobs, wanted(request), strict=scored > 0):
            assert [token_id for token_id, _ in entry.named] == ids
            scores = torch.tensor([logprob for _, logprob in entry.named])
            torch.testing.assert_close(scores, row[ids], atol=1e-3, rtol=0)
    if "drafts" in way:
        assert sum(request.num_accepted_tokens for request in found) > 0


@pytest.mark.parametrize(
    ("token_ids", "options", "reason"),
    [
        ((10**6,), {}, "the token id 1000000 at position 0 is out of vocabulary"),
        ((5,) * 21, {}, "at most 20 alternatives are allowed"),
        ((5,), {"logprobs_mode": "processed_logprobs"}, "is not supported with --logprobs-mode"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    token_ids: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    async def run() -> None:
        async with AsyncEngine(load_engine(case_of(CASE).folder, **options)) as engine:
            engine.submit([1], SamplingParams(logprob_token_ids=token_ids))

    with pytest.raises(InvalidRequestError, match=reason) as caught:
        asyncio.run(run())
    assert caught.value.param == "logprob_token_ids"
