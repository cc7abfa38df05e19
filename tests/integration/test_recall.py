"""The demo model as an instrument: facts from the beginning of a long chat are recalled word for
word, whatever the engine does with the pages in between.

An answer is so sure that it does not depend on most of the pages. How likely the other tokens are
depends on all of them, and is compared with transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.checkpoints import TOLERANCE, load_reference, reference_logits
from torch import Tensor

from demo_model.conversation import remembering
from demo_model.evaluation import HeldOutCase, cases
from demo_model.world import World
from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.attention.base import ForwardBatch
from minisgl.models.hub import DEMO_FOLDER
from minisgl.runner import step_inputs
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan
from minisgl.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0)
WITH_OTHERS = replace(GREEDY, logprobs=8)
LONGEST = sorted(
    (case for case in cases() if (case.skill, case.split) == ("recall", "instances")),
    key=lambda case: -sum(len(message["content"]) for message in case.messages),
)[:3]
TWO = LONGEST[:2]


@contextmanager
def loaded(**options: Any) -> Iterator[LLM]:
    with LLM(device="cpu", **options) as llm:
        yield llm
        llm.engine.audit()


def answers(llm: LLM, asked: list[HeldOutCase]) -> list[RequestOutput]:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    return llm.generate([tokenizer.chat(case.messages) for case in asked], WITH_OTHERS)


def error(output: RequestOutput) -> float:
    """The largest difference of a logprob from that of transformers."""
    assert output.logprobs is not None
    expected = expected_logprobs((*output.prompt_token_ids, *output.token_ids))
    return max(
        abs(logprob - float(row[token_id]))
        for entry, row in zip(
            output.logprobs, expected[-1 - len(output.token_ids) : -1], strict=True
        )
        for token_id, logprob in entry.top
    )


@cache
def expected_logprobs(token_ids: tuple[int, ...]) -> Tensor:
    return reference_logits(load_reference(DEMO_FOLDER), token_ids).log_softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"page_size": 16, "max_prefill_length": 100}, id="chunks of 100"),
        pytest.param({"page_size": 64, "max_running_requests": 1}, id="one at a time"),
    ],
)
def test_facts_of_a_long_chat_are_recalled(options: dict[str, Any]) -> None:
    with loaded(**options) as llm:
        for _ in range(2):  # with a cold cache and a warm one
            outputs = answers(llm, TWO)
            assert [output.text for output in outputs] == [case.answer for case in TWO]
            assert max(map(error, outputs)) < TOLERANCE
        assert min(len(output.prompt_token_ids) for output in outputs) > 1200
        assert all(output.num_cached_tokens > 1000 for output in outputs)


def test_facts_are_recalled_after_retraction() -> None:
    """The answers are made to run on, so that the pages give out in the middle of them."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    prompts = [tokenizer.chat(case.messages) for case in LONGEST]
    running_on = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # Room for the first two chats, and for little of what they go on to say.
    num_pages = (sum(map(len, prompts[:2])) + 60) // 4
    with loaded(page_size=4, num_pages=num_pages, schedule_conservativeness=0.02) as llm:
        outputs = llm.generate(prompts, running_on)
        assert llm.engine.stats().counters.num_retractions > 0
    for case, output in zip(LONGEST, outputs, strict=True):
        assert output.text.startswith(case.answer)


def test_facts_are_recalled_over_many_turns() -> None:
    """Live, with the model's own words in front of each question, and then cold."""
    chat = remembering(World(random.Random(11)), 900).exchanges
    messages: list[dict[str, str]] = []
    prompts: list[list[int]] = []
    said: list[str] = []
    with loaded() as llm:
        for exchange in chat:
            messages.append({"role": "user", "content": exchange.question})
            output = llm.chat(messages, GREEDY)
            messages.append({"role": "assistant", "content": output.text})
            prompts.append(output.prompt_token_ids)
            said.append(output.text)
            # All of the last turn but its last, unfinished page.
            known = len(prompts[-2]) if len(prompts) > 1 else 0
            assert output.num_cached_tokens >= known - 16
    recalled = [
        (exchange.answer, text)
        for exchange, text in zip(chat, said, strict=True)
        if exchange.answer.startswith(("Your ", "You live"))
    ]
    assert len(prompts[-1]) > 600 and len(recalled) > 4
    assert all(right == text for right, text in recalled)
    some = slice(len(prompts) % 4 - 1, None, 4)  # the last one is among them
    with loaded(cache_type="naive", page_size=1) as llm:
        assert [output.text for output in llm.generate(prompts[some], GREEDY)] == said[some]


def test_a_wrong_page_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Walter", "Lydia"]
    questions = [f"My name is {name}. What is my name?" for name in names]
    chats = [[{"role": "user", "content": question}] for question in questions]
    original = SlotTables.inputs

    def swap_first_pages(
        self: SlotTables, plan: StepPlan | None, shape: StepShape, chunks: Tensor | None
    ) -> tuple[ForwardBatch, SampleRows]:
        if shape.num_decodes == 2 and not swapped:
            assert plan is not None
            first, second = plan.decode_slots
            table = self.state.page_table
            table[[first, second], 0] = table[[second, first], 0]
            swapped.append(plan.step)
        return original(self, plan, shape, chunks)

    def told() -> list[str]:
        with loaded(cache_type="naive", page_size=16) as llm:
            tokenizer = llm.engine.tokenizer
            assert tokenizer is not None
            prompts = [tokenizer.chat(chat) for chat in chats]
            return [output.text for output in llm.generate(prompts, GREEDY)]

    swapped: list[int] = []
    assert told() == [f"Your name is {name}." for name in names]
    monkeypatch.setattr(SlotTables, "inputs", swap_first_pages)
    assert told() == [f"Your name is {name}." for name in names[::-1]]
    assert swapped


def test_chunks_that_read_other_pages_give_other_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts are before these pages, and the question is behind them."""
    original = step_inputs.chunk_inputs

    def shift_pages(*given: Any) -> Any:
        prefill, segments = original(*given)
        table = prefill.page_table.clone()
        table[:, 2:60] = table[:, 2:60].roll(1, 1)
        return replace(prefill, page_table=table), segments

    monkeypatch.setattr(step_inputs, "chunk_inputs", shift_pages)
    with loaded(page_size=16, max_prefill_length=100) as llm:
        outputs = answers(llm, TWO)
    assert [output.text for output in outputs] == [case.answer for case in TWO]
    assert min(map(error, outputs)) > 1000 * TOLERANCE
