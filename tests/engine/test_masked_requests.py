"""Requests with a matcher: the engine's loop around masks, and what a bad matcher may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from support.engine_loop import EOS, VOCAB, ScriptedRunner, deltas_of, engine_on, params
from support.fake_matcher import FakeMatcher, Rule, ending_at, held_to, tokens_after, without
from support.fake_runner import expected_output
from support.waiting import until

from minisgl.engine import masked_steps
from minisgl.engine.stream import OutputStream
from minisgl.errors import GrammarError, StepError
from minisgl.matcher import MASK_LIMIT_S, MaskRows, mask_words
from minisgl.parts.masks.filling import MaskFiller
from minisgl.request import FinishReason, Request, RequestStatus, SamplingParams

RULE = without(EOS, tokens_after(VOCAB))


@pytest.fixture(autouse=True)
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still for the masks of engines: the collector of garbage may run within any, and
    takes longer here than one may."""
    monkeypatch.setattr(masked_steps, "MaskFiller", partial(MaskFiller, clock=lambda: 0.0))


def expect(prompt: list[int], max_tokens: int, rule: Rule | None = None) -> list[int]:
    return expected_output(
        prompt,
        seed=0,
        max_tokens=max_tokens,
        stop=frozenset({EOS}),
        vocab_size=VOCAB,
        allowed=rule,
    )


async def tokens_of(stream: OutputStream) -> list[int]:
    return [token for delta in await deltas_of(stream) for token in delta.token_ids]


@pytest.mark.parametrize("overlap", [True, False])
async def test_masked_and_other_requests_each_get_their_own_tokens(overlap: bool) -> None:
    async with engine_on(
        ScriptedRunner(4), overlap=overlap, max_prefill_length=9, num_pages=60
    ) as engine:
        rules = [None, RULE, ending_at(5, RULE), tokens_after(VOCAB)]
        jobs = [([i % 50, *range(i % 13)], rules[i % 4]) for i in range(64)]
        streams = [
            engine.submit(prompt, params(12), extras=held_to(rule and FakeMatcher(rule)))
            for prompt, rule in jobs
        ]
        got = await asyncio.gather(*map(tokens_of, streams))
        assert got == [expect(prompt, 12, rule) for prompt, rule in jobs]
        assert engine.stats().num_used_pages == 0


async def test_the_forward_pass_of_a_blind_step_is_launched_while_the_last_one_runs() -> None:
    runner = ScriptedRunner(4)
    async with engine_on(runner) as engine:
        runner.may_collect.clear()
        stream = engine.submit(
            [1, 2, 3], params(ignore_eos=True), extras=held_to(FakeMatcher(RULE))
        )
        await until(runner.is_collecting.is_set)
        assert [plan.deferred for plan in runner.launched] == [False, True]
        runner.may_collect.set()
        assert await tokens_of(stream) == expect([1, 2, 3], 20, RULE)


async def test_a_step_without_masked_rows_is_planned_as_if_there_were_no_masks() -> None:
    runner = ScriptedRunner(4)
    async with engine_on(runner) as engine:
        await tokens_of(engine.submit([1, 2, 3], params(4), extras=held_to(FakeMatcher(RULE))))
        count = len(runner.launched)
        await tokens_of(engine.submit([1, 2, 3], params(9, ignore_eos=True)))
    assert not any(plan.parts or plan.deferred for plan in runner.launched[count:])


async def test_a_finished_matcher_ends_its_request_without_a_stop_token() -> None:
    async with engine_on(ScriptedRunner(4), tokenizer=True) as engine:
        rule = ending_at(3, RULE)
        for ignore_eos in (False, True):
            sampling = params(20, ignore_eos=ignore_eos)
            deltas = await deltas_of(
                engine.submit([5], sampling, extras=held_to(FakeMatcher(rule)))
            )
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == expect([5], 20, rule) and len(tokens) == 3
            assert deltas[-1].finish_reason is FinishReason.STOP
            assert deltas[-1].stop_reason is None
            assert engine.tokenizer is not None
            assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(tokens)


async def test_max_tokens_inside_a_grammar_ends_with_length() -> None:
    async with engine_on(ScriptedRunner(4)) as engine:
        deltas = await deltas_of(engine.submit([5], params(4), extras=held_to(FakeMatcher(RULE))))
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_filled_masks_are_counted_and_timed() -> None:
    async with engine_on(ScriptedRunner(4), overlap=False) as engine:
        await deltas_of(engine.submit([5], params(4)))
        assert engine.stats().totals.num_masked_rows == 0
        await deltas_of(
            engine.submit([5], params(4, ignore_eos=True), extras=held_to(FakeMatcher(RULE)))
        )
        totals = engine.stats().totals
        assert totals.num_masked_rows == totals.mask_s.count == 4
        assert totals.mask_s.sum > 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", ["fails_at", "raises_at", "allows nothing"])
@pytest.mark.parametrize("when", [1, 3])
async def test_a_matcher_that_fails_ends_its_own_request_only(
    overlap: bool, fault: str, when: int
) -> None:
    broken = (
        _NeverFinished(ending_at(when, RULE))
        if fault == "allows nothing"
        else FakeMatcher(RULE, **{fault: when})  # type: ignore[arg-type]
    )
    async with engine_on(ScriptedRunner(4), overlap=overlap) as engine:
        bad = engine.submit([1], params(20), extras=held_to(broken))
        good = engine.submit([2], params(20), extras=held_to(FakeMatcher(RULE)))
        plain = engine.submit([3], params(20))
        with pytest.raises(GrammarError) as caught:
            await deltas_of(bad)
        assert "as told" not in str(caught.value)
        assert "make the schema or grammar smaller" in str(caught.value)
        assert await tokens_of(good) == expect([2], 20, RULE)
        assert await tokens_of(plain) == expect([3], 20)
        assert bad.request.output_token_ids == expect([1], 20, RULE)[:when]
        assert engine.stats().num_used_pages == 0


class _NeverFinished(FakeMatcher):
    @property
    def finished(self) -> bool:
        return False


async def test_aborts_while_sampling_is_deferred_do_not_affect_others() -> None:
    runner = ScriptedRunner(4)
    async with engine_on(runner, max_running_requests=4, num_pages=60) as engine:
        streams = [
            engine.submit([i, 1], params(30), extras=held_to(FakeMatcher(RULE) if i % 2 else None))
            for i in range(30)
        ]

        async def leave(index: int) -> None:
            for _ in range(index % 7):
                await asyncio.sleep(0.001)
            streams[index].abort()

        kept = [index for index in range(30) if index % 3]
        answers = await asyncio.gather(
            *(tokens_of(streams[index]) for index in kept),
            *(leave(index) for index in range(0, 30, 3)),
        )
        wanted = [expect([i, 1], 30, RULE if i % 2 else None) for i in kept]
        assert answers[: len(kept)] == wanted


@pytest.mark.parametrize("where", ["launch", "sample", "collect"])
async def test_a_failed_step_takes_its_deferred_successor_with_it(where: str) -> None:
    runner = ScriptedRunner(4)
    failed: list[int] = []

    def fail(*_: object) -> None:
        failed.append(1)
        runner.sample = sample  # type: ignore[method-assign]
        raise RuntimeError("sampling failed")

    sample = runner.sample
    if where == "launch":
        runner.fail_at = frozenset({3})
    elif where == "collect":
        runner.collect_errors[3] = RuntimeError("collecting failed")
    async with engine_on(runner) as engine:
        stream = engine.submit([1, 2], params(20), extras=held_to(FakeMatcher(RULE)))
        if where == "sample":
            runner.sample = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(StepError):
            await deltas_of(stream)
        again = engine.submit([1, 2], params(20), extras=held_to(FakeMatcher(RULE)))
        assert await tokens_of(again) == expect([1, 2], 20, RULE)
        assert len(failed) == (where == "sample")
        assert not engine._steps.failures.watch.in_flight


@pytest.mark.parametrize("step", range(3, 15))
async def test_a_step_of_a_pipeline_that_fails_spoils_no_mask_of_others(step: int) -> None:
    """The plan after it may be blind for another step than the next one to be settled."""
    runner = ScriptedRunner(4)
    runner.fail_at = frozenset({step})
    async with engine_on(runner, pp=2) as engine:
        prompts = [[5, 6, index] for index in range(4)]
        streams = [engine.submit(p, params(), extras=held_to(FakeMatcher(RULE))) for p in prompts]
        got = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
    failed = [tokens for tokens in got if isinstance(tokens, BaseException)]
    assert 0 < len(failed) < 4 and all(isinstance(each, StepError) for each in failed)
    for prompt, tokens in zip(prompts, got, strict=True):
        assert tokens in failed or tokens == expect(prompt, 20, RULE)


async def test_an_engine_closes_while_sampling_is_deferred() -> None:
    runner = ScriptedRunner(4)
    async with engine_on(runner) as engine:
        runner.may_collect.clear()
        stream = engine.submit([1, 2], params(20), extras=held_to(FakeMatcher(RULE)))
        await until(runner.is_collecting.is_set)
        assert runner.launched[-1].deferred
        asyncio.get_running_loop().call_later(0.05, runner.may_collect.set)
    assert stream.request.finished


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> Callable[[], None]:
        def stall() -> None:
            self.now += seconds

        return stall


def request(matcher: FakeMatcher | None, num_outputs: int = 0, **fields: object) -> Request:
    sampling = SamplingParams(**fields)  # type: ignore[arg-type]
    made = Request(
        "id", [1], sampling, max_tokens=9, seed=0, eos_token_ids=[3], extras=held_to(matcher)
    )
    made.token_ids += [9] * num_outputs
    return made


def rows_of(requests: list[Request], vocab_size: int = 70) -> MaskRows:
    return np.full((len(requests), mask_words(vocab_size)), 7, dtype=np.uint32)


def ids_in(words: MaskRows, vocab_size: int = 70) -> list[int]:
    return [i for i in range(vocab_size) if words[i // 32] >> (i % 32) & 1]


def test_a_mask_that_takes_too_long_fails_its_request_and_allows_everything() -> None:
    clock = Clock()
    filler = MaskFiller(70, [3], clock=clock)
    slow, quick = (
        request(FakeMatcher(lambda _: {5}, stalls_at=0, stall=clock.pass_time(seconds)))
        for seconds in (MASK_LIMIT_S * 1.01, MASK_LIMIT_S * 0.99)
    )
    rows = rows_of([slow, quick])
    [(failed, error)] = filler.fill([slow, quick], rows)
    assert failed is slow and "10 ms" in str(error)
    assert ids_in(rows[0]) == list(range(70))
    assert ids_in(rows[1]) == [5]


def test_a_token_that_a_matcher_takes_too_long_for_fails_its_request_only() -> None:
    clock = Clock()
    filler = MaskFiller(70, [3], clock=clock)
    requests = [
        request(SlowToAccept(clock.pass_time(seconds)), num_outputs=1)
        for seconds in (MASK_LIMIT_S * 0.99, MASK_LIMIT_S * 1.01, MASK_LIMIT_S * 0.99)
    ]
    [(failed, error)] = filler.accept(requests)
    assert failed is requests[1] and "10 ms" in str(error)
    assert error.http_status == 400 and "less ambiguous" in str(error)


class SlowToAccept(FakeMatcher):
    def __init__(self, stall: Callable[[], None]) -> None:
        super().__init__(lambda _: {9})
        self.accept = lambda _: stall()  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("allowed", "fields", "num_outputs", "wanted"),
    [
        ({3, 5}, {"min_tokens": 2}, 1, [5]),
        ({3, 5}, {"min_tokens": 2}, 2, [3, 5]),
        ({3}, {"min_tokens": 2}, 1, [3]),  # or the row would have no token
        ({4, 5, 3}, {"min_tokens": 2, "stop_token_ids": [4]}, 0, [5]),
        ({3, 5}, {"ignore_eos": True}, 4, [5]),
        ({3}, {"ignore_eos": True}, 4, [3]),
        ({3, 5}, {}, 0, [3, 5]),
        ({3, 5}, {"min_tokens": 2, "stop_token_ids": [99]}, 0, [5]),  # not in the vocabulary
    ],
)
def test_ends_are_held_back_unless_nothing_else_is_allowed(
    allowed: set[int], fields: dict[str, object], num_outputs: int, wanted: list[int]
) -> None:
    one = request(FakeMatcher(lambda _: allowed), num_outputs, **fields)
    rows = rows_of([one])
    assert MaskFiller(70, [3]).fill([one], rows) == []
    assert ids_in(rows[0]) == wanted


def test_a_request_that_has_ended_gets_a_mask_of_ones() -> None:
    one = request(FakeMatcher(lambda _: {5}, raises_at=0))
    one.status = RequestStatus.FINISHED
    rows = rows_of([one])
    assert MaskFiller(70, [3]).fill([one], rows) == []
    assert ids_in(rows[0]) == list(range(70))
