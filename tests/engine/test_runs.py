"""Several tokens per row and step: outputs equal those of one token at a time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_policies import drafting, speculation_of
from support.fake_runner import FakeRunner, expected_output

from minisgl.config import Capacity, EngineConfig, resolve
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.kvcache.manager import KVCacheManager
from minisgl.models.generation import GenerationDefaults
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.request import FinishReason, Request, SamplingParams, TokenLogprobs
from minisgl.runner.facts import device_facts
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text.tokenizer import Tokenizer

# In the demo tokenizer these ids are single characters, but for the first three, which are special.
VOCAB = 80
EOS = 40
PAGE_SIZE = 2
TOKENIZER = Tokenizer.load(DEMO_FOLDER)
FACTS = read_model_config(DEMO_FOLDER).facts()


class RunsRunner(FakeRunner):
    def __init__(self, seed: int) -> None:
        super().__init__(page_size=PAGE_SIZE, vocab_size=VOCAB, runs=random.Random(seed))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[int]


async def answers(
    asked: list[Asked],
    *,
    max_run: int,
    overlap: bool,
    num_pages: int = 400,
    aborted: tuple[int, ...] = (),
    seed: int = 0,
) -> list[Answer]:
    """The engine's answers; the requests at `aborted` are aborted after their first tokens."""
    config = EngineConfig(device="cpu", num_pages=num_pages, page_size=PAGE_SIZE)
    resolved = resolve(
        replace(config, schedule_conservativeness=0.01), FACTS, device_facts(FACTS), overlap=overlap
    )
    resolved = replace(resolved, num_drafts=max_run - 1)
    loaded: Loaded[Any] = Loaded(
        RunsRunner(seed),
        resolved,
        Capacity.of(resolved, num_pages),
        FACTS,
        TOKENIZER,
        GenerationDefaults(frozenset({EOS})),
        "runs",
    )
    rows, drafted = dict[int, int](), dict[int, int]()
    async with AsyncEngine(drafting(loaded)) as engine:

        async def answer(index: int, request: Asked) -> Answer:
            stream = engine.submit(request.prompt, request.params)
            found = Answer([], "", None, None, [])
            async for delta in stream:
                found = Answer(
                    found.token_ids + delta.token_ids,
                    found.text + delta.text,
                    delta.finish_reason,
                    delta.stop_reason,
                    found.logprobs + [entry.token_id for entry in delta.logprobs],
                )
                assert delta.num_output_tokens == len(found.token_ids)
                assert delta.num_accepted_tokens <= delta.num_drafted_tokens
                if index in aborted:
                    stream.abort()
            # Every token but the accepted drafts had a row of its own.
            rows[index] = len(found.token_ids) - stream.request.num_accepted_tokens
            drafted[index] = stream.request.num_drafted_tokens
            return found

        found = await asyncio.gather(*(answer(*item) for item in enumerate(asked)))
        engine.audit()
        stats = engine.stats()
        assert stats.num_used_pages == stats.num_running == stats.num_queued == 0
        if not aborted:
            num_tokens = [len(answer.token_ids) for answer in found]
            assert stats.totals.num_output_tokens == sum(num_tokens)
            assert stats.totals.ttft_s.count == len(asked)
            assert stats.totals.itl_s.count == sum(num_tokens) - len(asked)
            if (drafts := stats.drafts) is not None:
                # What look-ahead has launched behind an end counts for the engine only.
                assert sum(drafted.values()) <= drafts.num_drafted
                assert sum(num_tokens) - sum(rows.values()) <= drafts.num_accepted
            assert (stats.drafts is None) == (max_run == 1)
        return found


def strings_in(prompt: list[int], seed: int) -> st.SearchStrategy[str]:
    """Pieces of the text that follows the prompt if nothing ends it."""
    output = expected_output(prompt, seed=seed, max_tokens=40, stop=frozenset(), vocab_size=VOCAB)
    text = TOKENIZER.decode(output)
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 5))
    return places.map(lambda place: text[place[0] : place[0] + place[1]])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    prompt = draw(st.lists(st.integers(3, 6), min_size=1, max_size=9))
    seed = draw(st.integers(0, 3))
    max_tokens = draw(st.integers(1, 40))
    return Asked(
        prompt,
        SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
            stop=draw(st.lists(strings_in(prompt, seed), max_size=2)),
            include_stop=draw(st.booleans()),
            frequency_penalty=draw(st.sampled_from([0, 0, 1])),  # with which it has no runs
            logprobs=draw(st.sampled_from([None, 0])),
        ),
    )


@settings(max_examples=100, deadline=None)
@given(
    asked=st.lists(requests(), min_size=1, max_size=8),
    max_run=st.integers(2, 6),
    overlap=st.booleans(),
    num_pages=st.sampled_from([40, 400]),
    seed=st.integers(0, 1000),
    aborted=st.sets(st.integers(0, 7), max_size=2),
)
def test_several_tokens_a_step_change_no_answer(
    asked: list[Asked],
    max_run: int,
    overlap: bool,
    num_pages: int,
    seed: int,
    aborted: set[int],
) -> None:
    left = tuple(sorted(index for index in aborted if index < len(asked)))
    expected = asyncio.run(answers(asked, max_run=1, overlap=False))
    found = asyncio.run(
        answers(
            asked, max_run=max_run, overlap=overlap, num_pages=num_pages, aborted=left, seed=seed
        )
    )
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if index not in left or one.finish_reason is not FinishReason.ABORT:
            assert one == other
        else:
            assert one.token_ids == other.token_ids[: len(one.token_ids)]
            assert other.text.startswith(one.text)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_with_several_tokens_a_step_are_retracted_and_resumed(overlap: bool) -> None:
    asked = [
        Asked([3 + n, 4], SamplingParams(seed=n, max_tokens=60, ignore_eos=True, logprobs=0))
        for n in range(8)
    ]
    expected = asyncio.run(answers(asked, max_run=1, overlap=False))
    assert asyncio.run(answers(asked, max_run=4, overlap=overlap, num_pages=60)) == expected


# -- by hand: one request, whose run is given ------------------------------------------------------


def settled(
    run: list[int], *, max_tokens: int = 20, logprobs: int | None = None, **fields: Any
) -> tuple[Request, list[int]]:
    """A request that has sampled 50 and then `run`, and how many tokens that brought."""
    scheduler = Scheduler(
        kv=KVCacheManager(num_pages=20, page_size=4, cache_type="radix"),
        num_slots=2,
        max_seq_len=70,
        max_prefill_length=64,
        max_queued_requests=4,
        speculation=speculation_of(5),
    )
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)
    request = Request("a", [1, 2, 3], params, max_tokens=max_tokens, seed=0, eos_token_ids=(EOS,))
    scheduler.submit(request)
    for tokens in ([50], run):
        plan = scheduler.plan()
        assert isinstance(plan, StepPlan)
        scores = {index: TokenLogprobs(token, -1.0, 1) for index, token in enumerate(tokens)}
        result = StepResult(
            *(plan.step, tokens, scores if logprobs is not None else {}),
            run_lengths=[len(tokens)],
            num_drafted=[4 if plan.decode_slots else 0],
        )
        outcome = scheduler.settle(result)
        scheduler.audit()
    assert outcome.progressed == [request]
    assert outcome.finished == [request] * request.finished
    return request, outcome.num_tokens


def test_a_run_of_tokens_is_accepted_whole() -> None:
    request, num_tokens = settled([51, 52, 53])
    assert request.output_token_ids == [50, 51, 52, 53] and num_tokens == [3]
    assert not request.finished
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (4, 2)


def test_tokens_behind_a_stop_string_were_not_accepted() -> None:
    request, _ = settled([51, 52, 53])
    request.drop(0)
    assert (request.num_output_tokens, request.num_accepted_tokens) == (4, 2)
    request.drop(2)
    assert request.output_token_ids == [50, 51]
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (4, 0)


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True, "stop_token_ids": [EOS]}])
def test_tokens_after_a_stop_token_in_the_same_run_are_dropped(fields: dict[str, Any]) -> None:
    request, num_tokens = settled([51, EOS, 52, 53], logprobs=0, **fields)
    assert request.output_token_ids == [50, 51, EOS] and num_tokens == [2]
    assert [entry.token_id for entry in request.logprobs] == [50, 51, EOS]
    assert request.finish_reason is FinishReason.STOP
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (4, 1)


def test_a_run_is_cut_at_the_length_limit_of_the_output() -> None:
    request, num_tokens = settled([51, 52, 53, EOS], max_tokens=3, logprobs=0)
    assert request.output_token_ids == [50, 51, 52] and num_tokens == [2]
    assert [entry.token_id for entry in request.logprobs] == [50, 51, 52]
    assert request.finish_reason is FinishReason.LENGTH


def test_a_run_longer_than_planned_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="longer than planned"):
        settled([51, 52, 53, 54, 55, 56])
