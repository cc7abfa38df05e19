"""Facts of chat templates, each found by rendering."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.harmony_chat import TEMPLATE as HARMONY_TEMPLATE
from support.toy_tokenizers import spelled_backend, with_tokens, wrap

from minisgl.errors import InvalidRequestError
from minisgl.text.call_ids import short_id
from minisgl.text.history import fitted_history
from minisgl.text.rendering import EndlessTemplateError, render
from minisgl.text.template_facts import LONG_ID, UNKNOWN, Render, TemplateFacts, probe
from minisgl.text.tokenizer import Tokenizer

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ ARGUMENTS }}){% endfor %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
OBJECT_CALLS = CALLS.replace("ARGUMENTS", "call.function.arguments.items() | list")
TEXT_CALLS = CALLS.replace("ARGUMENTS", "call.function.arguments + ''")
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
SHORT_IDS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}{% endfor %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% endfor %}"
)
TEXT_OF_FIRST_CALLS = (  # as of DeepSeek-R1
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{{ m.content if not (m.tool_calls and ns.called) }}{% for call in m.tool_calls or [] %}"
    "{% set ns.called = true %}{{ call.function.name }}"
    "({{ call.function.arguments.items() | list }}){% endfor %}{% endfor %}"
)
IN_PARTS = (  # as of Llava
    "{% for m in messages %}{{ m.role }}: {% for part in m.content if part.type == 'text' %}"
    "{{ part.text }}{% endfor %}\n{% endfor %}"
)


ALL_SYSTEMS = {"takes_systems": True, "system_anywhere": True}
FIRST_SYSTEM = (  # as of gpt-oss, MiniMax-M2 and Nemotron
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
LAST_SYSTEM = (  # as of DeepSeek-R1-Distill
    "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endif %}{% endfor %}{{ ns.text }}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
SYSTEM_IN_QUESTION = (  # as of Gemma 3
    "{% set text = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{{ text if loop.first }}{{ m.content }}"
    "{% endfor %}"
)
LAST_TURN = (  # as of Nemotron-Nano-v2
    "{{ messages[0].content }}{% set turns = messages[1:] if messages[0].role == 'system' else "
    "messages %}{% if turns[-1].content + '' %}{% for m in turns if m.role != 'system' %}"
    "{{ m.content }}{% endfor %}{% endif %}"
)
CALLS_ALONE = (  # as of Llama 3.1 and Solar
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "({{ call.function.arguments + '' }}){% else %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% endfor %}"
)
LEADING_SYSTEMS = (  # as of Qwen3.8
    "{% set ns = namespace(begun=false) %}{% for m in messages %}{% if m.role == 'system' and "
    "ns.begun %}{{ raise_exception('late') }}{% endif %}{% set ns.begun = m.role != 'system' %}"
    "{{ m.content }}{% endfor %}"
)
NO_DEVELOPER = (
    "{# developer #}{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
)
OTHER_DEVELOPER = (  # as of Apertus
    "{{ '<|developer_start|>' }}{% for m in messages %}{% if m.role in ('system', 'user') %}"
    "{{ m.content }}{% else %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
)


def facts_of(template: str | None) -> TemplateFacts:
    return probe(rendered_by(with_tokens(chat_template=template)))


def rendered_by(tokenizer: Tokenizer) -> Render:
    def rendered(messages: object, options: dict[str, object]) -> str:
        try:
            return render(tokenizer.template_call(messages, **options))  # type: ignore[arg-type]
        except Exception as error:
            raise InvalidRequestError("messages", str(error)) from error

    return rendered  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        (MESSAGES, {"takes_results": False, **ALL_SYSTEMS}),
        (IN_PARTS, {"wants_parts": True, **ALL_SYSTEMS}),
        (TOOLS + MESSAGES, {"offers_tools": True, **ALL_SYSTEMS}),
        (
            TOOLS + OBJECT_CALLS,
            {
                "offers_tools": True,
                "takes_calls": True,
                "takes_results": True,
                **ALL_SYSTEMS,
            },
        ),
        (
            TEXT_CALLS,
            {
                "takes_calls": True,
                "takes_results": True,
                "wants_text_arguments": True,
                **ALL_SYSTEMS,
            },
        ),
        (
            SYSTEM_FIRST + SHORT_IDS + OBJECT_CALLS,
            {"takes_calls": True, "takes_results": True, "wants_short_ids": True},
        ),
        (
            SHORT_IDS + TEXT_CALLS,
            {
                "takes_calls": True,
                "takes_results": True,
                "wants_short_ids": True,
                "wants_text_arguments": True,
                **ALL_SYSTEMS,
            },
        ),
        (
            "{{ messages | length }} tools {{ 'tools' }}<think>\n",
            {"opens_reasoning": True, "leaves_out_system": True},
        ),
        ("{{ messages | length }}[THINK]", {"opens_reasoning": True, "leaves_out_system": True}),
        (
            HARMONY_TEMPLATE,
            {
                "offers_tools": True,
                "takes_calls": True,
                "takes_results": True,
                "takes_one_text": True,
                "takes_one_call": True,
            },
        ),
        (
            ONE_CALL + OBJECT_CALLS,
            {
                "takes_calls": True,
                "takes_results": True,
                **ALL_SYSTEMS,
                "takes_one_call": True,
            },
        ),
        (FIRST_SYSTEM, {}),
        (SYSTEM_IN_QUESTION, {"needs_question": True}),
        (LAST_TURN, {"needs_question": True}),
        (
            CALLS_ALONE,
            {
                "takes_calls": True,
                "takes_results": True,
                "wants_text_arguments": True,
                "leaves_out_text": True,
                **ALL_SYSTEMS,
            },
        ),
        (
            TEXT_OF_FIRST_CALLS,
            {"takes_calls": True, "takes_results": True, "leaves_out_text": True, **ALL_SYSTEMS},
        ),
        (LAST_SYSTEM, {}),
        (NO_DEVELOPER, {"leaves_out_developer": True}),
        (OTHER_DEVELOPER, {"leaves_out_developer": True}),
        (LEADING_SYSTEMS, {"takes_systems": True, "takes_results": False}),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            {"leaves_out_system": True},
        ),
    ],
)
def test_each_fact_is_found_by_rendering(template: str, facts: dict[str, Any]) -> None:
    assert facts_of(template) == TemplateFacts(**facts)


@pytest.mark.parametrize(
    "template",
    [None, "{{ raise_exception('never') }}", "{% for m in messages %}", "{{ messages.a.b }}"],
)
def test_nothing_is_said_of_a_template_that_renders_nothing(template: str | None) -> None:
    facts = facts_of(template)
    assert facts == UNKNOWN
    history: Any = [{"role": "system", "content": "Be kind."}, CALLED, result("f")]
    assert [message["role"] for message in fitted_history(history, facts)] == [
        *("system", "assistant", "tool")
    ]


def test_a_template_that_does_not_end_is_not_rendered_again() -> None:
    asked = []

    def render(messages: object, options: object) -> str:
        asked.append(messages)
        raise EndlessTemplateError(10)

    assert probe(render) == UNKNOWN and len(asked) == 1


@pytest.mark.parametrize("others", [{"default": MESSAGES}, {}], ids=["two", "one"])
def test_a_conversation_with_tools_has_the_template_for_tools(others: dict[str, str]) -> None:
    backend = wrap(spelled_backend())
    backend.chat_template = {**others, "tool_use": TOOLS + OBJECT_CALLS}
    facts = probe(rendered_by(Tokenizer(backend, "toy")))
    assert (facts.offers_tools, facts.takes_calls, facts.takes_results) == (True, True, True)


def call(name: str) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": {}}}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id-{name}", "content": name}


TAKES = TemplateFacts(takes_calls=True, takes_results=True)
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("f")]}


def test_a_history_has_each_call_with_its_result_where_a_message_takes_one() -> None:
    said = {"role": "assistant", "content": "I look."}
    both = {**said, "tool_calls": [call("f"), call("g")]}
    one = {**said, "tool_calls": [call("f")]}
    unnamed = {"role": "tool", "content": "x"}
    messages = [{"role": "user", "content": "A?"}, both, result("g"), unnamed, result("f"), one]
    assert fitted_history(messages, TAKES) == messages
    assert fitted_history(messages, replace(TAKES, takes_one_call=True)) == [
        messages[0],
        {**said, "tool_calls": [call("f")]},
        result("f"),
        {"role": "assistant", "content": "", "tool_calls": [call("g")]},
        result("g"),
        unnamed,
        one,
    ]


def test_a_text_that_would_be_left_out_beside_calls_is_a_message_before_them() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g")]}
    said = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "thinking": "Hm.",
    }
    both = {**said, "tool_calls": called["tool_calls"]}
    results = [result("f"), result("g")]
    facts = replace(TAKES, leaves_out_text=True)
    assert fitted_history([both, *results], TAKES) == [both, *results]
    assert fitted_history([both, *results], facts) == [said, called, *results]
    assert fitted_history([called, *results], facts) == [called, *results]
    assert fitted_history([both, *results], replace(facts, takes_one_call=True)) == [
        said,
        {**called, "tool_calls": [call("f")]},
        results[0],
        {**called, "tool_calls": [call("g")]},
        results[1],
    ]


@pytest.mark.parametrize("template", [SYSTEM_IN_QUESTION, LAST_TURN, MESSAGES])
def test_instructions_without_a_question_are_in_the_prompt(template: str) -> None:
    render = rendered_by(with_tokens(chat_template=template))
    facts = probe(render)
    told = [{"role": "system", "content": "Be"}, {"role": "developer", "content": "kind."}]
    for messages in ([*told[:1]], told):
        text = render(fitted_history(messages, facts), {})
        assert all(message["content"] in text for message in messages)


@pytest.mark.parametrize(
    ("facts", "messages", "param"),
    [
        ({"leaves_out_system": True}, [{"role": "system", "content": "A"}], "messages.0.role"),
        ({"takes_calls": False}, [CALLED], "messages.0.tool_calls"),
        ({"takes_results": False}, [CALLED, result("f")], "messages.1.role"),
        ({}, [CALLED, result("x")], "messages.1.tool_call_id"),
        ({}, [CALLED, {"role": "user", "content": ""}, result("f")], "messages.2.tool_call_id"),
        ({"takes_systems": False}, [{"role": "system", "content": [{"type": "image"}]}] * 2,
         "messages"),
    ],
)  # fmt: skip
def test_what_would_be_left_out_is_refused_by_name(
    facts: dict[str, Any], messages: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fitted_history(messages, replace(TAKES, **facts))
    assert caught.value.param == param


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_have_ids_and_arguments_as_the_template_takes_them(
    arguments: object, as_text: bool
) -> None:
    made = {"id": LONG_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": LONG_ID, "content": ""}
    facts = replace(TAKES, wants_text_arguments=as_text, wants_short_ids=True)
    called, answered = fitted_history(
        [{"role": "assistant", "content": "", "tool_calls": [made]}, told], facts
    )
    [fitted] = called["tool_calls"]
    assert fitted["function"]["arguments"] == ('{"a": 1}' if as_text else {"a": 1})
    assert fitted["id"] == answered["tool_call_id"] == short_id(LONG_ID)


def test_system_messages_are_joined_where_the_template_would_leave_some_out() -> None:
    first, second, late = (
        {"role": role, "content": text}
        for role, text in (("system", "1"), ("developer", "2"), ("system", "3"))
    )
    question, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
    leading, everywhere = [first, second, question], [first, question, answer, late, question]
    only_late = [question, late, question]
    for facts, joined in (
        (TemplateFacts(), [True, True, True]),
        (TemplateFacts(takes_systems=True), [False, True, True]),
        (TemplateFacts(takes_systems=True, system_anywhere=True), [False, False, False]),
    ):
        texts = ("1\n\n2", "1\n\n3", "3")
        for messages, is_joined, text in zip(
            (leading, everywhere, only_late), joined, texts, strict=True
        ):
            rest = [message for message in messages if message["role"] in ("user", "assistant")]
            whole = [{"role": "system", "content": text}, *rest]
            assert fitted_history(messages, facts) == (whole if is_joined else messages)
    for messages in ([first], [first, question], [question], [second, question]):
        assert fitted_history(messages, TemplateFacts()) == messages
    left_out = TemplateFacts(leaves_out_developer=True)
    assert fitted_history([first, question], left_out) == [first, question]
    assert fitted_history([second, question], left_out) == [{**second, "role": "system"}, question]


def test_a_history_has_reasoning_where_templates_read_it() -> None:
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    plain = {"role": "assistant", "content": "I look.", "tool_calls": [call("f")]}
    messages = [said, {**said, "tool_calls": [call("f")]}, plain]
    named = {**said, "thinking": "Hm."}
    assert fitted_history(messages, TAKES) == [
        named,
        {**named, "tool_calls": [call("f")]},
        plain,
    ]
    text = "Hm.\n\nI look."
    joined = {"content": "", "reasoning_content": text, "thinking": text}
    assert fitted_history(messages, replace(TAKES, takes_one_text=True)) == [
        named,
        {"role": "assistant", **joined, "tool_calls": [call("f")]},
        plain,
    ]
