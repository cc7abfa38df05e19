"""Fits the messages of a conversation to what its chat template does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from minisgl.text.template_facts import REASONING, TemplateFacts, with_reasoning

Message: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]  # of a message
ROLES = get_args(Role)
SYSTEM_ROLES: tuple[Role, ...] = ("system", "developer")
GAP = "\n\n"  # between texts that are joined


def fitted_history(messages: Sequence[Message], facts: TemplateFacts) -> list[dict[str, Any]]:
    """The messages with instructions, reasoning and calls where and as the template takes them.

    Where it would leave out some of several system messages, or that of a developer, all are joined
    to the first message. Where it takes one text beside calls, the content follows the reasoning
    there. Where it takes one call in a message, the calls of a message become messages, each with
    its result after it.
    """
    fitted = [_with_reasoning(message, facts) for message in _with_system_joined(messages, facts)]
    return [*_with_single_calls(fitted)] if facts.takes_one_call else fitted


def _with_system_joined(messages: Sequence[Message], facts: TemplateFacts) -> Sequence[Message]:
    roles = [message["role"] for message in messages]
    is_system = [role in SYSTEM_ROLES for role in roles]
    num_first = is_system.index(False) if False in is_system else len(messages)
    is_late = True in is_system[num_first:]
    is_unknown = facts.leaves_out_developer and "developer" in roles
    takes_first = (facts.takes_systems or num_first < 2) and not is_unknown
    if takes_first and (facts.system_anywhere or not is_late):
        return messages
    given = list(zip(messages, is_system, strict=True))
    text = GAP.join(message["content"] for message, joins in given if joins)
    return [
        {"role": "system", "content": text},
        *(message for message, joins in given if not joins),
    ]


def _with_reasoning(message: Message, facts: TemplateFacts) -> dict[str, Any]:
    reasoning = message.get(REASONING)
    if not reasoning:
        return {**message}
    content = message.get("content")
    if facts.takes_one_text and content and message.get("tool_calls"):
        return with_reasoning({**message, "content": ""}, reasoning + GAP + content)
    return with_reasoning(message, reasoning)


def _with_single_calls(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        first, *others = message.get("tool_calls") or (None,)
        if not others:
            yield message
            continue
        results: list[dict[str, Any]] = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        parts = [{**message, "tool_calls": [first]}]
        role = message["role"]
        parts += ({"role": role, "content": "", "tool_calls": [call]} for call in others)
        for part in parts:
            [call] = part["tool_calls"]
            yield part
            yield from (result for result in results if result["tool_call_id"] == call["id"])
        called = {call["id"] for call in (first, *others)}
        yield from (result for result in results if result["tool_call_id"] not in called)
