"""The engine's part in structured output: compiling, submitting, counting, closing."""

from __future__ import annotations

import asyncio

import pytest
from support.engine_loop import ScriptedRunner, engine_on, params
from support.fake_matcher import held_to

from minisgl.errors import EngineStoppedError, InvalidRequestError
from minisgl.grammar.reasoning import ReasoningGate
from minisgl.parts.masks.host import matcher_of
from minisgl.request import SamplingParams, StructuredOutput

CHOICE = StructuredOutput(choice=["a", "b"])


def runner() -> ScriptedRunner:
    return ScriptedRunner(page_size=4)


async def test_a_constraint_is_compiled_for_the_requests_that_use_it() -> None:
    async with engine_on(runner(), tokenizer=True) as engine:
        compiled = await engine.compile(CHOICE)
        assert await engine.compile(CHOICE) is compiled
        matcher = compiled.matcher()
        stream = engine.submit([1], params(4, structured=CHOICE), extras=held_to(matcher))
        assert matcher_of(stream.request) is matcher
        stream.abort()
        totals = engine.stats().totals
        assert (totals.compile_s.count, totals.num_cached_grammars) == (1, 1)


async def test_a_constraint_that_is_not_compiled_is_refused() -> None:
    async with engine_on(runner(), tokenizer=True) as engine:
        with pytest.raises(InvalidRequestError, match="structured: needs a matcher"):
            engine.submit([1], params(structured=CHOICE))


async def test_generate_compiles_and_reports_what_is_wrong() -> None:
    wrong = StructuredOutput(regex="(", field="regex")
    async with engine_on(runner(), tokenizer=True) as engine:
        with pytest.raises(InvalidRequestError, match="regex: regex parse error"):
            async for _ in engine.generate([1], params(structured=wrong)):
                pass
        assert engine.stats().num_running == engine.stats().num_queued == 0


async def test_reasoning_may_be_constrained_alone() -> None:
    async with engine_on(runner(), tokenizer=True) as engine:
        gate = ReasoningGate("</think>", (5,), is_open=True, budget=3)
        assert (await engine.compile(None)).matcher(gate).error is None


async def test_a_model_without_a_tokenizer_takes_no_constraints() -> None:
    async with engine_on(runner()) as engine:
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await engine.compile(CHOICE)


async def test_closing_the_engine_ends_a_compilation() -> None:
    pattern = [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(20)]
    async with engine_on(runner(), tokenizer=True) as engine:
        await engine.compile(CHOICE)  # the process has started
        endless = StructuredOutput(json_schema={"allOf": pattern})
        compiling = asyncio.ensure_future(engine.compile(endless))
        await asyncio.sleep(0)
    with pytest.raises(EngineStoppedError):
        await compiling
    with pytest.raises(EngineStoppedError):
        await engine.compile(CHOICE)


def test_sampling_parameters_take_a_constraint() -> None:
    assert SamplingParams(structured=CHOICE).structured is CHOICE
    with pytest.raises(InvalidRequestError, match="structured: must be a StructuredOutput"):
        SamplingParams(structured={"choice": ["a"]})  # type: ignore[arg-type]
