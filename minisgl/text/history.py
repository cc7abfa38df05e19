"""Fits the messages of a conversation to what its chat template does with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

from minisgl.errors import InvalidRequestError
from minisgl.text.template_facts import REASONING, TemplateFacts, with_reasoning

Message: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]  # of a message
ROLES = get_args(Role)
SYSTEM_ROLES: tuple[Role, ...] = ("system", "developer")
GAP = "\n\n"  # between texts that are joined
LEFT_OUT = "is not supported by this model: its chat template leaves {} out."
UNKNOWN = "is the id of no call in a message before it."
LATE = "is the id of a call that other messages follow: its result comes before them."


def needs_facts(role: str, tool_calls: object) -> bool:
    """Whether templates take such a message in different ways, if at all."""
    return role in ("tool", *SYSTEM_ROLES) or bool(tool_calls)


def fitted_history(messages: Sequence[Message], facts: TemplateFacts) -> list[dict[str, Any]]:
    """The messages with instructions, reasoning and calls where and as the template takes them.

    Where it would leave out some of several system messages, or that of a developer, all are joined
    to the first message; where it would leave out instructions without a question, an empty one
    follows. Where it takes one text beside calls, the content follows the reasoning there; where it
    takes none, the content is a message before the calls. Where it takes one call in a message, the
    calls of a message become messages, each with its result after it.

    Raises InvalidRequestError for a message that the template leaves out whatever is done, and for
    a result whose call is not right before it.
    """
    _check(messages, facts)
    fitted = [
        each
        for message in _with_system_joined(messages, facts)
        for each in _with_text_apart(_with_reasoning(_with_calls(message, facts), facts), facts)
    ]
    if facts.needs_question and all(message["role"] in SYSTEM_ROLES for message in fitted):
        fitted.append({"role": "user", "content": ""})
    return [*_with_single_calls(fitted)] if facts.takes_one_call else fitted


def _check(messages: Sequence[Message], facts: TemplateFacts) -> None:
    made: set[str] = set()  # the ids of the calls so far
    awaited: set[str] = set()  # of those whose results may come next
    for index, message in enumerate(messages):
        role, calls = message["role"], message.get("tool_calls") or ()
        refusal = None
        if role in SYSTEM_ROLES and facts.leaves_out_system:
            refusal = "role", LEFT_OUT.format("the system's messages")
        elif calls and not facts.takes_calls:
            refusal = "tool_calls", LEFT_OUT.format("calls")
        elif role == "tool" and not facts.takes_results:
            refusal = "role", LEFT_OUT.format("results of tools")
        elif role == "tool" and (call_id := message.get("tool_call_id")) not in (None, *awaited):
            refusal = "tool_call_id", LATE if call_id in made else UNKNOWN
        if refusal is not None:
            raise InvalidRequestError(f"messages.{index}.{refusal[0]}", refusal[1])
        if role not in ("tool", *SYSTEM_ROLES):
            awaited = {call["id"] for call in calls if call.get("id") is not None}
            made |= awaited


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
    text = GAP.join(_text(message.get("content")) for message, joins in given if joins)
    return [
        {"role": "system", "content": text},
        *(message for message, joins in given if not joins),
    ]


def _text(content: Any) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    try:
        return "".join(part["text"] for part in content or ())
    except (TypeError, KeyError):
        raise InvalidRequestError(
            "messages", "of the system must have a text, or parts with a text each."
        ) from None


def _with_calls(message: Message, facts: TemplateFacts) -> Message:
    """The message with ids and arguments as the template takes them."""
    fitted = dict(message)
    if message.get("tool_call_id") is not None:
        fitted["tool_call_id"] = facts.fitted_id(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        fitted["tool_calls"] = [_fitted_call(call, facts) for call in calls]
    return fitted


def _fitted_call(call: Mapping[str, Any], facts: TemplateFacts) -> dict[str, Any]:
    fitted = dict(call)
    if fitted.get("id") is not None:
        fitted["id"] = facts.fitted_id(fitted["id"])
    # Some templates read the name and the arguments beside the id as well.
    function = dict(call.get("function") or call)
    arguments = function.get("arguments")
    if facts.wants_text_arguments and isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not facts.wants_text_arguments and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what is no JSON stays the text that it is
            function["arguments"] = json.loads(arguments or "{}")
    return {**fitted, "function": function}


def _with_reasoning(message: Message, facts: TemplateFacts) -> dict[str, Any]:
    reasoning = message.get(REASONING)
    if not reasoning:
        return {**message}
    content = message.get("content")
    if facts.takes_one_text and content and message.get("tool_calls"):
        return with_reasoning({**message, "content": ""}, reasoning + GAP + content)
    return with_reasoning(message, reasoning)


def _with_text_apart(message: dict[str, Any], facts: TemplateFacts) -> Iterator[dict[str, Any]]:
    if facts.leaves_out_text and message.get("tool_calls") and message.get("content"):
        calls = message["tool_calls"]
        yield {name: message[name] for name in message if name != "tool_calls"}
        message = {"role": message["role"], "content": "", "tool_calls": calls}
    yield message


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
            yield from (result for result in results if _is_of(result, call))
        calls = (first, *others)
        yield from (each for each in results if not any(_is_of(each, call) for call in calls))


def _is_of(result: Message, call: Mapping[str, Any]) -> bool:
    return call.get("id") is not None and result.get("tool_call_id") == call["id"]
