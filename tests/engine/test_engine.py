"""The engine's loop on a runner without a model: every request ends exactly once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.engine_loop import EOS, VOCAB, ScriptedRunner, deltas_of, engine_on, loaded, params
from support.fake_runner import expected_output
from support.waiting import LIMIT_S, until

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.errors import (
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    StepError,
)
from minisgl.request import FinishReason, SamplingParams


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(page_size=4)


def expect(prompt: Sequence[int], max_tokens: int = 20, stop: Sequence[int] = (EOS,)) -> list[int]:
    return expected_output(
        prompt, seed=0, max_tokens=max_tokens, stop=frozenset(stop), vocab_size=VOCAB
    )


@pytest.mark.parametrize("overlap", [True, False])
async def test_many_requests_each_get_their_own_tokens_and_one_ending(
    runner: ScriptedRunner, overlap: bool
) -> None:
    async with engine_on(runner, overlap=overlap, max_prefill_length=9) as engine:
        prompts = [[i % 50, *range(i % 13)] for i in range(100)]
        streams = [engine.submit(prompt, params()) for prompt in prompts]
        answers = await asyncio.gather(*map(deltas_of, streams))
        for prompt, deltas in zip(prompts, answers, strict=True):
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == expect(prompt)
            endings = [delta.finish_reason for delta in deltas]
            assert endings.count(None) == len(endings) - 1 and endings[-1] is not None
            assert deltas[-1].num_output_tokens == len(tokens)
        stats = engine.stats()
        assert stats.num_running == stats.num_queued == 0
        assert stats.num_used_pages == 0


async def test_a_step_is_always_launched_before_the_last_one_is_collected(
    runner: ScriptedRunner,
) -> None:
    async with engine_on(runner) as engine:
        runner.may_collect.clear()
        stream = engine.submit([1, 2, 3], params(ignore_eos=True))
        await until(runner.is_collecting.is_set)
        assert len(runner.launched) == 2
        runner.may_collect.set()
        await deltas_of(stream)
    async with engine_on(ScriptedRunner(4), overlap=False) as engine:
        alone: ScriptedRunner = engine._runner
        alone.may_collect.clear()
        stream = engine.submit([1, 2, 3], params(ignore_eos=True))
        await until(alone.is_collecting.is_set)
        assert len(alone.launched) == 1
        alone.may_collect.set()
        await deltas_of(stream)


async def test_a_slow_consumer_gets_all_tokens_in_few_deltas(runner: ScriptedRunner) -> None:
    async with engine_on(runner) as engine:
        stream = engine.submit([1, 2, 3], params(50, ignore_eos=True, logprobs=0))
        quick = engine.submit([4], params(60, ignore_eos=True))
        await deltas_of(quick)
        deltas = await deltas_of(stream)
        assert len(deltas) == 1
        assert deltas[0].token_ids == expect([1, 2, 3], 50, ())
        assert len(deltas[0].logprobs) == 50


async def test_closing_the_iterator_aborts_the_request(runner: ScriptedRunner) -> None:
    async with engine_on(runner) as engine:
        generation = engine.generate([1, 2, 3], params(300, ignore_eos=True))
        async for _ in generation:
            break
        assert engine.stats().num_running == 1
        await generation.aclose()  # type: ignore[attr-defined]
        assert engine.stats().num_running == 0
        assert engine.stats().num_used_pages == 0
        count = len(runner.launched)
        await deltas_of(engine.submit([4], params(3, ignore_eos=True)))
        assert len(runner.launched) == count + 3  # those of the other request alone


async def test_aborts_at_any_moment_do_not_affect_other_requests(runner: ScriptedRunner) -> None:
    async with engine_on(runner, max_running_requests=4, num_pages=60) as engine:
        streams = [engine.submit([i, 1, 2], params(40, ignore_eos=True)) for i in range(30)]

        async def leave(index: int) -> None:
            for _ in range(index % 7):
                await asyncio.sleep(0.001)
            streams[index].abort()
            streams[index].abort()

        kept = [index for index in range(30) if index % 3]
        answers = await asyncio.gather(
            *(deltas_of(streams[index]) for index in kept),
            *(leave(index) for index in range(0, 30, 3)),
        )
        for index, deltas in zip(kept, answers, strict=False):
            assert deltas is not None
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == expect([index, 1, 2], 40, ())
        assert engine.stats().num_used_pages == 0


@pytest.mark.parametrize("where", ["launch", "collect"])
async def test_a_failed_step_fails_its_requests_and_the_engine_continues(
    runner: ScriptedRunner, where: str
) -> None:
    if where == "launch":
        runner.fail_at = frozenset({3})
    else:
        runner.collect_errors[3] = StepError("the device said no")
    async with engine_on(runner) as engine:
        streams = [engine.submit([i, 1], params(ignore_eos=True)) for i in range(3)]
        for stream in streams:
            with pytest.raises(StepError, match=r"said no|told to fail"):
                await deltas_of(stream)
            assert stream.request.finish_reason is FinishReason.ERROR
        assert engine.failure is None
        deltas = await deltas_of(engine.submit([5], params()))
        assert [token for delta in deltas for token in delta.token_ids] == expect([5])


async def test_a_fatal_error_fails_every_open_request(runner: ScriptedRunner) -> None:
    runner.collect_errors[2] = EngineStoppedError("The GPU failed")
    async with engine_on(runner, max_running_requests=2) as engine:
        streams = [engine.submit([i, 1], params(ignore_eos=True)) for i in range(5)]
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="The GPU failed"):
                await deltas_of(stream)
        assert engine.failure is not None
        with pytest.raises(EngineStoppedError, match="failed: The GPU failed"):
            engine.submit([1], params())


async def test_draining_waits_then_ends_the_rest_with_an_error(runner: ScriptedRunner) -> None:
    async with engine_on(runner) as engine:
        short = engine.submit([1], params(3, ignore_eos=True))
        await engine.drain(5)
        assert (await deltas_of(short))[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineStoppedError, match="shutting down"):
            engine.submit([1], params())
    stuck = ScriptedRunner(4)
    async with engine_on(stuck) as engine:
        stuck.may_collect.clear()
        stream = engine.submit([1], params())
        await engine.drain(0.05)
        stuck.may_collect.set()
        with pytest.raises(EngineStoppedError):
            await deltas_of(stream)


async def test_invalid_requests_are_refused_at_submission(runner: ScriptedRunner) -> None:
    async with engine_on(runner, num_pages=6, max_queued_requests=1) as engine:
        with pytest.raises(ContextLengthError, match=r"length is 20 .* resulted in 21 tokens"):
            engine.submit([1] * 21, SamplingParams())
        with pytest.raises(ContextLengthError, match="10 in the prompt, 11 in the completion"):
            engine.submit([1] * 10, params(11))
        for bad in ([], [-1], [99_999]):
            with pytest.raises(InvalidRequestError, match="prompt"):
                engine.submit(bad, params())
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            engine.submit([1], params(logit_bias={99_999: 1.0}))
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            engine.submit([1], params(stop_token_ids=[99_999]))
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            engine.submit([1], params(stop=["x"]))
        first = engine.submit([1], params(5), request_id="a")
        with pytest.raises(InvalidRequestError, match="running already"):
            engine.submit([1], params(5), request_id="a")
        with pytest.raises(QueueFullError):
            engine.submit([1], params(5))
        await deltas_of(first)
        room = engine.submit([1] * 4, SamplingParams(ignore_eos=True, seed=0))
        assert sum(len(delta.token_ids) for delta in await deltas_of(room)) == 16


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(
    runner: ScriptedRunner, overlap: bool
) -> None:
    async with engine_on(runner, overlap=overlap, tokenizer=True) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        full = expect([1, 2], 30, ())
        text = tokenizer.decode(full)
        stop = text[9:14]
        end = next(n for n in range(31) if stop in tokenizer.decode(full[:n]))
        for max_tokens in (30, end):  # where the limit falls on the same token, too
            stream = engine.submit(
                [1, 2], params(max_tokens, stop=["never", stop], ignore_eos=True, logprobs=0)
            )
            deltas = await deltas_of(stream)
            assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
            assert [token for delta in deltas for token in delta.token_ids] == full[:end]
            assert sum(len(delta.logprobs) for delta in deltas) == end
            assert deltas[-1].finish_reason is FinishReason.STOP
            assert deltas[-1].stop_reason == stop


async def test_eos_counts_as_a_token_but_has_no_text(runner: ScriptedRunner) -> None:
    async with engine_on(runner, tokenizer=True) as engine:
        assert engine.tokenizer is not None
        prompt = next([n] for n in range(50) if EOS in expect([n], 100))
        tokens = expect(prompt, 100)
        deltas = await deltas_of(engine.submit(prompt, params(100)))
        assert [token for delta in deltas for token in delta.token_ids] == tokens
        text = "".join(delta.text for delta in deltas)
        assert text == engine.tokenizer.decode(tokens[:-1])
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, EOS)


async def test_what_was_loaded_for_a_caller_that_has_gone_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ScriptedRunner(page_size=4)
    is_loading, may_end = threading.Event(), threading.Event()

    def load(*_: object) -> Loaded[Any]:
        is_loading.set()
        assert may_end.wait(LIMIT_S)
        return loaded(runner, overlap=True, tokenizer=False)

    monkeypatch.setattr("minisgl.engine.engine.load", load)
    starting = asyncio.ensure_future(AsyncEngine.start(EngineConfig()))
    await until(is_loading.is_set)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_end.set()
    await until(lambda: runner.closed)


@pytest.mark.parametrize("method", ["settle", "plan", "fail", "cancel"])
async def test_a_defect_in_the_engine_stops_it_instead_of_hanging(
    runner: ScriptedRunner, method: str
) -> None:
    runner.collect_errors[4] = StepError("the device said no")
    async with engine_on(runner) as engine:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a defect")

        streams = [engine.submit([n], params(ignore_eos=True)) for n in range(4)]
        setattr(engine._scheduler, method, broken)
        if method == "cancel":
            engine._scheduler.settle = broken  # type: ignore[assignment, method-assign]
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="ZeroDivisionError"):
                await deltas_of(stream)
        assert engine.failure is not None


async def test_every_concurrent_close_waits_for_the_shutdown(runner: ScriptedRunner) -> None:
    async with engine_on(runner) as engine:
        stream = engine.submit([1], params(200, ignore_eos=True))
        await asyncio.gather(engine.close(), engine.close())
        assert runner.closed
        with pytest.raises(EngineStoppedError):
            await deltas_of(stream)
