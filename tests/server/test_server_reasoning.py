"""Reasoning in chats, through the real `openai` client, on an engine with given answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.scripted_engine import OPEN_TEMPLATE, PLAIN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, served
from support.tool_cases import (
    CLOCK,
    QUESTION,
    WEATHER,
    Answer,
    hermes,
    streamed_answers,
    whole_answer,
)

from minisgl.text.tokenizer import Tokenizer

THOUGHT = "<think>\nHm, 2 < 3.\n</think>\n\n"
CALL = hermes("clock", {})
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@contextlib.contextmanager
def scripted(tokenizer: Tokenizer, **options: Any) -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(tokenizer)

    with served(start, **options) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    with scripted(qwen()) as found:
        yield found


@pytest.fixture(scope="module")
def opened() -> Iterator[Served[ScriptedEngine]]:
    with scripted(qwen(OPEN_TEMPLATE)) as found:
        yield found


def create(server: Served[ScriptedEngine], answer: str, *, run: int = 1, **fields: Any) -> Any:
    server.engine.answers, server.engine.run = [answer], run
    request: dict[str, Any] = {"model": "fake", "messages": QUESTION, **fields}
    with server.openai() as client:
        found: Any = client.chat.completions.create(**request)
        return [*found] if fields.get("stream") else found


def ask(server: Served[ScriptedEngine], answer: str, **fields: Any) -> Answer:
    """The answer, whole and streamed in several runs of tokens, which must be the same."""
    whole = whole_answer(create(server, answer, **fields).choices[0])
    for run in (1, 3, 1000):
        [streamed] = streamed_answers(create(server, answer, run=run, stream=True, **fields))
        assert (streamed.content or "") == (whole.content or "")
        assert (streamed.reasoning, streamed.made) == (whole.reasoning, whole.made)
        assert (streamed.finish_reason, streamed.logprobs) == (whole.finish_reason, whole.logprobs)
    return whole


@pytest.mark.parametrize(
    ("answer", "fields", "reasoning", "content"),
    [
        (THOUGHT + "Yes.", {}, "Hm, 2 < 3.", "Yes."),
        ("Yes.", {}, None, "Yes."),
        ("Yes.", {"extra_body": {"chat_template_kwargs": OFF}}, None, "Yes."),
        (THOUGHT, {}, "Hm, 2 < 3.", ""),
        (THOUGHT + "Yes.", {"max_tokens": 6}, "Hm, ", ""),
        (THOUGHT + "Yes. No.", {"stop": ["."]}, "Hm, 2 < 3.", "Yes"),
        (THOUGHT + "Yes.", {"extra_body": {"include_reasoning": False}}, None, "Yes."),
        (THOUGHT + "Yes.", {"extra_body": {"reasoning": {"exclude": True}}}, None, "Yes."),
        (THOUGHT + "Yes.", {"extra_body": {"separate_reasoning": False}}, None, THOUGHT + "Yes."),
    ],
)
def test_reasoning_is_apart_from_the_content(
    server: Served[ScriptedEngine],
    answer: str,
    fields: dict[str, Any],
    reasoning: str | None,
    content: str,
) -> None:
    found = ask(server, answer, **fields)
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm", "Hm", ""),
    ],
)
def test_a_block_that_the_template_opens_is_reasoning_from_the_first_token(
    opened: Served[ScriptedEngine], answer: str, reasoning: str, content: str
) -> None:
    found = ask(opened, answer)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_markers_in_the_words_of_the_user_open_nothing(server: Served[ScriptedEngine]) -> None:
    messages = [{"role": "user", "content": "What does <think> do?"}]
    assert ask(server, "It thinks.", messages=messages).content == "It thinks."


def test_several_answers_report_their_reasoning_tokens(server: Served[ScriptedEngine]) -> None:
    num = len(server.engine.tokenizer.encode(THOUGHT.rstrip(), add_special_tokens=False))
    usage = create(server, THOUGHT + "Yes.", n=2).usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num
    assert usage.completion_tokens > 2 * num
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = create(server, THOUGHT + "Yes.", stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == num


@pytest.mark.parametrize("switch", [{}, {"chat_template_kwargs": OFF}])
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}]
)
def test_calls_follow_reasoning_under_every_tool_choice(
    server: Served[ScriptedEngine], switch: dict[str, Any], choice: Any
) -> None:
    answer = CALL if switch else THOUGHT + CALL
    found = ask(server, answer, tools=[WEATHER, CLOCK], tool_choice=choice, extra_body=switch)
    assert found.made == [("clock", "{}")]
    assert (found.content, found.finish_reason) == (None, "tool_calls")
    assert found.reasoning == (None if switch else "Hm, 2 < 3.")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        (
            {"extra_body": {"reasoning": {"effort": "high"}}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        ({"extra_body": {"reasoning": {"enabled": False}}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": OFF}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, {"thinking": True}),
    ],
)
def test_how_much_to_think_reaches_the_template(
    server: Served[ScriptedEngine], fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    create(server, "Yes.", **fields)
    found = dict(server.engine.template_options)
    if "chat_template_kwargs" in fields.get("extra_body", {}):  # as the client wrote them
        found = {
            name: value if isinstance(value, str) else bytes(value) == b"true"
            for name, value in found.items()
        }
    elif "enable_thinking" in variables:
        variables = {**variables, "thinking": variables["enable_thinking"]}
    assert found == variables


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_in_the_history_reaches_the_template_under_both_names(
    server: Served[ScriptedEngine], name: str
) -> None:
    said = {"role": "assistant", "content": "Yes.", name: "Hm, 2 < 3."}
    create(server, "No.", messages=[*QUESTION, said, *QUESTION])
    assert f"assistant\n{THOUGHT}Yes.<|im_end|>" in server.engine.texts[-1]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
def test_the_option_names_the_members_that_have_the_reasoning(option: str, names: set[str]) -> None:
    with scripted(qwen(), reasoning_field=option) as server:
        message = create(server, THOUGHT + "Yes.").choices[0].message
        assert {name: message.model_extra[name] for name in message.model_extra} == dict.fromkeys(
            names, "Hm, 2 < 3."
        )
        chunks = create(server, THOUGHT + "Yes.", stream=True)
        extras = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
        for name in names:
            assert "".join(extra.get(name, "") for extra in extras) == "Hm, 2 < 3."
        assert {name for extra in extras for name in extra} == names


@pytest.mark.parametrize("option", ["reasoning_content", "reasoning", "both"])
def test_an_answer_without_reasoning_has_null_where_the_model_reasons(option: str) -> None:
    names = ["reasoning_content", "reasoning"] if option == "both" else [option]
    with scripted(qwen(), reasoning_field=option) as server:
        for answer in ("Yes.", hermes("clock", {})):
            message = create(server, answer, tools=[CLOCK]).choices[0].message
            assert message.model_extra == dict.fromkeys(names)
        # It is sent back as it came.
        create(server, "No.", messages=[*QUESTION, message, *QUESTION], tools=[CLOCK])
        for body in ({"include_reasoning": False}, {"separate_reasoning": False}):
            message = create(server, "Yes.", extra_body=body).choices[0].message
            assert not message.model_extra


def test_without_a_parser_reasoning_is_content() -> None:
    with scripted(qwen(), reasoning_parser="none") as server:
        assert not create(server, "Yes.").choices[0].message.model_extra
        found = ask(server, THOUGHT + "Yes.")
        assert (found.reasoning, found.content) == (None, THOUGHT + "Yes.")


def test_the_answer_goes_on_with_a_message_that_is_continued_and_echoed(
    server: Served[ScriptedEngine],
) -> None:
    begun = {"role": "assistant", "content": "<think>\nHm, "}
    fields = {
        "messages": [*QUESTION, begun],
        "extra_body": {"continue_final_message": True, "echo": True},
    }
    found = ask(server, "2 < 3.\n</think>\n\nYes.", **fields)
    assert (found.reasoning, found.content) == ("Hm, 2 < 3.", "Yes.")
    fields["messages"] = [*QUESTION, {"role": "assistant", "content": "Yes, "}]
    found = ask(server, "indeed.", **fields)
    assert (found.reasoning, found.content) == (None, "Yes, indeed.")


@pytest.mark.parametrize(
    ("answer", "obeyed"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False),
        ("<think>\nH</think>\n\nYes.", True),
        ("Yes.", True),
    ],
)
def test_the_thinking_budget_closes_the_block(
    server: Served[ScriptedEngine], answer: str, obeyed: bool
) -> None:
    fields: dict[str, Any] = {"extra_body": {"thinking_token_budget": 2}}
    if obeyed:
        assert ask(server, answer, **fields).content == "Yes."
    else:
        with pytest.raises(openai.BadRequestError):
            ask(server, answer, **fields)


def test_a_budget_is_refused_where_reasoning_is_not_parsed() -> None:
    with scripted(qwen(PLAIN_TEMPLATE)) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            create(server, "Yes.", extra_body={"thinking_token_budget": 2})
        assert caught.value.param == "thinking_token_budget"


def test_logprobs_are_those_of_the_content(server: Served[ScriptedEngine]) -> None:
    found = ask(server, THOUGHT + "Yes.\n" + CALL, tools=[CLOCK], logprobs=True)
    assert "".join(found.logprobs) == "Yes." == found.content
    found = ask(server, THOUGHT + "t</thin 👍🏽.\n\nYes", logprobs=True)
    assert "".join(found.logprobs) == "t</thin 👍🏽.\n\nYes" == found.content
    assert ask(server, THOUGHT, logprobs=True).logprobs == []


def test_token_ids_are_reported_once(server: Served[ScriptedEngine]) -> None:
    fields: Any = {"extra_body": {"return_token_ids": True}, "tools": [CLOCK]}
    answer = THOUGHT + "Yes.\n" + CALL
    whole = create(server, answer, **fields).choices[0].token_ids
    for run in (1, 5):
        chunks = create(server, answer, run=run, stream=True, **fields)
        ids = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks]
        assert [token_id for part in ids for token_id in part] == whole
    assert len(whole) == len(server.engine.tokenizer.encode(answer, add_special_tokens=False)) + 1
