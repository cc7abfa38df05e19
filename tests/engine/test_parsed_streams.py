"""Parsed answers in the engine."""

from __future__ import annotations

import asyncio

import pytest
import support.fake_runner
from support.engine_loop import EOS, ScriptedRunner, deltas_of, engine_on, params
from support.parsed_answers import QWEN, Parsed, form_of, parsed

from minisgl.engine import AsyncEngine
from minisgl.errors import EngineStoppedError
from minisgl.events import joined
from minisgl.request import FinishReason, OutputDelta
from minisgl.text.template_facts import Render, TemplateFacts, probe

ARGUMENTS = '{"city": "Köln"}'
ANSWER = f'<think>\nHm.\n</think>\n\nI look.\n<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}'


async def answer_of(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, answer: str, **options: object
) -> list[OutputDelta]:
    """The deltas of a request for which the runner samples the tokens of `answer`, then EOS."""
    script = iter(QWEN.encode(answer))
    monkeypatch.setattr(support.fake_runner, "sample", lambda *_: next(script, EOS))
    parser = form_of(QWEN, "hermes", "think").parser()
    return await deltas_of(engine.submit([1], params(100, **options), parser=parser))


async def test_deltas_of_a_parsed_answer_have_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_on(ScriptedRunner(1), tokenizer=QWEN) as engine:
        deltas = await answer_of(engine, monkeypatch, ANSWER)
    events = [event for delta in deltas for event in delta.events]
    assert parsed(joined(events)) == Parsed("Hm.", "I look.", [("f", ARGUMENTS)], 1)
    assert "".join(delta.text for delta in deltas) == "I look."
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].num_reasoning_tokens == len(QWEN.encode("<think>\nHm.\n</think>"))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [
        *QWEN.encode(ANSWER),
        EOS,
    ]


async def test_a_stop_string_in_the_content_ends_a_parsed_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_on(ScriptedRunner(1), tokenizer=QWEN) as engine:
        deltas = await answer_of(engine, monkeypatch, "<think>STOP</think>a STOP b", stop=("STOP",))
    assert "".join(delta.text for delta in deltas) == "a "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "STOP")


@pytest.mark.parametrize(
    ("ends", "arguments"), [(True, '{"a": 1}'), (False, '{"a": ')], ids=["eos", "length"]
)
async def test_only_an_answer_that_the_model_has_ended_completes_its_call(
    monkeypatch: pytest.MonkeyPatch, ends: bool, arguments: str
) -> None:
    answer = "<tool_call><function=f><parameter=a>1"
    parser = form_of(QWEN, "qwen3_coder").parser()
    script = iter(QWEN.encode(answer))
    monkeypatch.setattr(support.fake_runner, "sample", lambda *_: next(script, EOS))
    async with engine_on(ScriptedRunner(1), tokenizer=QWEN) as engine:
        num_tokens = len(QWEN.encode(answer)) + ends
        deltas = await deltas_of(engine.submit([1], params(num_tokens), parser=parser))
    assert deltas[-1].finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    events = [event for delta in deltas for event in delta.events]
    assert parsed(events).calls == [("f", arguments)]


async def test_an_answer_without_a_parser_has_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    script = iter(QWEN.encode(ANSWER))
    monkeypatch.setattr(support.fake_runner, "sample", lambda *_: next(script, EOS))
    async with engine_on(ScriptedRunner(1), tokenizer=QWEN) as engine:
        deltas = await deltas_of(engine.submit([1], params(100)))
    assert "".join(delta.text for delta in deltas) == ANSWER
    assert not any(delta.events or delta.num_reasoning_tokens for delta in deltas)


async def test_the_facts_of_the_template_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(render: Render) -> TemplateFacts:
        calls.append(render)
        return probe(render)

    monkeypatch.setattr("minisgl.engine.texts.probe", counted)
    async with engine_on(ScriptedRunner(1), tokenizer=True) as engine:
        first, second = await asyncio.gather(engine.template_facts(), engine.template_facts())
        assert first == second == await engine.template_facts()
    assert first.offers_tools and first.takes_systems and len(calls) == 1
    with pytest.raises(EngineStoppedError):
        await engine.template_facts()
