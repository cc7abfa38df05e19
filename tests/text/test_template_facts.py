"""Facts of chat templates, each found by rendering."""

from __future__ import annotations

from typing import Any

import pytest
from support.harmony_chat import TEMPLATE as HARMONY_TEMPLATE
from support.toy_tokenizers import spelled_backend, with_tokens, wrap

from minisgl.errors import InvalidRequestError
from minisgl.text.history import fitted_history
from minisgl.text.rendering import EndlessTemplateError, render
from minisgl.text.template_facts import Render, TemplateFacts, probe
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
THINKING = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"


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
        (MESSAGES, {"takes_results": False, "system_anywhere": True}),
        (TOOLS + MESSAGES, {"offers_tools": True, "system_anywhere": True}),
        (
            TOOLS + OBJECT_CALLS,
            {
                "offers_tools": True,
                "takes_calls": True,
                "takes_results": True,
                "system_anywhere": True,
            },
        ),
        (
            TEXT_CALLS,
            {
                "takes_calls": True,
                "takes_results": True,
                "wants_text_arguments": True,
                "system_anywhere": True,
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
                "system_anywhere": True,
            },
        ),
        ("{{ messages | length }} tools {{ 'tools' }}<think>\n", {"opens_reasoning": True}),
        ("{{ messages | length }}[THINK]", {"opens_reasoning": True}),
        ("{{ messages | length }}" + THINKING, {"switches_reasoning": True}),
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
                "system_anywhere": True,
                "takes_one_call": True,
            },
        ),
        ("{{ raise_exception('never') }}", {}),
        (None, {}),
    ],
)
def test_each_fact_is_found_by_rendering(template: str | None, facts: dict[str, Any]) -> None:
    assert facts_of(template) == TemplateFacts(**facts)


def test_a_template_that_does_not_end_is_not_rendered_again() -> None:
    asked = []

    def render(messages: object, options: object) -> str:
        asked.append(messages)
        raise EndlessTemplateError(10)

    assert probe(render) == TemplateFacts() and len(asked) == 1


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


def test_a_history_has_each_call_with_its_result_where_a_message_takes_one() -> None:
    said = {"role": "assistant", "content": "I look."}
    both = {**said, "tool_calls": [call("f"), call("g")]}
    one = {**said, "tool_calls": [call("f")]}
    messages = [{"role": "user", "content": "A?"}, both, result("g"), result("x"), result("f"), one]
    assert fitted_history(messages, TemplateFacts()) == messages
    assert fitted_history(messages, TemplateFacts(takes_one_call=True)) == [
        messages[0],
        {**said, "tool_calls": [call("f")]},
        result("f"),
        {"role": "assistant", "content": "", "tool_calls": [call("g")]},
        result("g"),
        result("x"),
        one,
    ]


def test_a_history_has_reasoning_where_templates_read_it() -> None:
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    plain = {"role": "assistant", "content": "I look.", "tool_calls": [call("f")]}
    messages = [said, {**said, "tool_calls": [call("f")]}, plain]
    named = {**said, "thinking": "Hm."}
    assert fitted_history(messages, TemplateFacts()) == [
        named,
        {**named, "tool_calls": [call("f")]},
        plain,
    ]
    text = "Hm.\n\nI look."
    joined = {"content": "", "reasoning_content": text, "thinking": text}
    assert fitted_history(messages, TemplateFacts(takes_one_text=True)) == [
        named,
        {"role": "assistant", **joined, "tool_calls": [call("f")]},
        plain,
    ]
