"""Facts of chat templates, each found by rendering."""

from __future__ import annotations

import pytest
from support.toy_tokenizers import spelled_backend, with_tokens, wrap

from minisgl.errors import InvalidRequestError
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
        ("{{ raise_exception('never') }}", {}),
        (None, {}),
    ],
)
def test_each_fact_is_found_by_rendering(template: str | None, facts: dict[str, bool]) -> None:
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
