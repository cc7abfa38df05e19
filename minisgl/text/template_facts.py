"""Finds out what a chat template does with tools, calls and reasoning, by rendering with it.

Templates say nothing about themselves, and what they read like misleads. So each fact is a short
conversation that is rendered, and what of it the text has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from minisgl.errors import InvalidRequestError
from minisgl.text.call_ids import short_id
from minisgl.text.rendering import EndlessTemplateError

Message: TypeAlias = Mapping[str, Any]
# The text of a conversation under the template, given its options. Raises InvalidRequestError.
Render: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], str]

REASONING = "reasoning_content"
OPENINGS = ("<think>", "[THINK]")
# Words that no template has by itself.
QUESTION, RESULT = "probed-question", "probed-result"
SYSTEM, OTHER_SYSTEM = "probed-system", "probed-instruction"
THOUGHT, TEXT = "probed-thought", "probed-text"
TOOL_NAME, CALLED_NAME, VALUE = "probed_tool", "probed_call", "probed-value"
OTHER_CALLED_NAME = "probed_other_call"
NOTHING: Message = {}
ARGUMENTS = {"key": VALUE}
ARGUMENTS_TEXT = json.dumps(ARGUMENTS)
LONG_ID, SHORT_ID = "call_abcdefghijklmnopqrs", "abcdefghi"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template does. What it cannot render counts as not done."""

    offers_tools: bool = False  # `tools` are in the prompt
    takes_calls: bool = False  # so are the calls of an assistant message
    takes_results: bool = False  # and `tool` messages
    wants_text_arguments: bool = False  # of calls; others take them as an object
    wants_short_ids: bool = False  # 9 letters or digits: it refuses others
    leaves_out_system: bool = False  # even one that is the first message
    leaves_out_developer: bool = False  # where it has the same from the system
    takes_systems: bool = False  # several system messages at the beginning
    system_anywhere: bool = False  # and others after an answer
    opens_reasoning: bool = False  # the prompt ends inside of a reasoning block
    needs_question: bool = False  # without one it leaves out the system's messages, or fails
    leaves_out_text: bool = False  # of a message with calls
    takes_one_text: bool = False  # beside calls: it refuses reasoning and content together
    takes_one_call: bool = False  # in a message; others are left out, or refused
    wants_parts: bool = False  # content as a list: it leaves out a text

    def fitted_id(self, call_id: str) -> str:
        """The id of a call as the template takes it: the same for the call and its result."""
        return short_id(call_id) if self.wants_short_ids else call_id


def with_reasoning(message: Message, reasoning: str) -> dict[str, Any]:
    """A message with reasoning under all names that templates have for it."""
    return {**message, REASONING: reasoning, "thinking": reasoning}


# Of a template that renders nothing: nobody knows what it leaves out, and its own error says why.
UNKNOWN = TemplateFacts(
    offers_tools=True,
    takes_calls=True,
    takes_results=True,
    takes_systems=True,
    system_anywhere=True,
)


def probe(render: Render) -> TemplateFacts:
    """The facts of the template that `render` renders with."""
    endless, renders, wants_parts = False, False, False

    def text_of(messages: Sequence[Message], **options: Any) -> str:
        """The text, "" where the template refuses, and once it has not ended."""
        nonlocal endless, renders
        if endless:
            return ""
        try:
            in_parts = {"content_in_parts": True} if wants_parts else {}
            text = render(messages, {**options, **in_parts})
            renders = True
            return text
        except EndlessTemplateError:
            endless = True
        except InvalidRequestError:
            pass
        return ""

    question = {"role": "user", "content": QUESTION}
    plain = text_of([question])
    if QUESTION not in plain:
        wants_parts = True
        in_parts = text_of([question])
        wants_parts = QUESTION in in_parts
        plain = in_parts if wants_parts else plain

    def with_calls(
        given: tuple[object, str], *names: str, one_each: bool = False, said: Message = NOTHING
    ) -> str:
        """An answer with calls and their results, or an answer for each of them.

        given: the arguments and the id of a call.
        """
        arguments, call_id = given
        calls = [
            {
                "id": call_id[:-1] + str(index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, name in enumerate(names)
        ]
        messages: list[Message] = [question]
        for group in [[call] for call in calls] if one_each else [calls]:
            messages.append({"role": "assistant", "content": "", **said, "tool_calls": group})
            for call in group:
                result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
                messages.append({**result, "name": call["function"]["name"]})  # type: ignore[index]
        # With tools, as such a conversation has them: a model may have another template for them.
        return text_of(messages, tools=[TOOL])

    given: tuple[object, str] = (ARGUMENTS, LONG_ID)
    ways = [(as_text, short) for short in (False, True) for as_text in (False, True)]
    called, wants_text_arguments, wants_short_ids = "", False, False
    for as_text, short in ways:
        given = ARGUMENTS_TEXT if as_text else ARGUMENTS, SHORT_ID if short else LONG_ID
        text = with_calls(given, CALLED_NAME)
        if VALUE in text:
            called, wants_text_arguments, wants_short_ids = text, as_text, short
            break
    names, text_beside = (CALLED_NAME, OTHER_CALLED_NAME), {"content": TEXT}
    # DeepSeek-R1's template leaves out the text of all but the first such message.
    said, num_said = with_calls(given, *names, one_each=True, said=text_beside), 2
    if not said:
        said, num_said = with_calls(given, CALLED_NAME, said=text_beside), 1
    thought = with_calls(given, CALLED_NAME, said=with_reasoning({}, THOUGHT))
    both = with_calls(given, CALLED_NAME, said=with_reasoning(text_beside, THOUGHT))
    takes_two = all(name in with_calls(given, *names) for name in names)
    takes_each = all(name in with_calls(given, *names, one_each=True) for name in names)
    answer = {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": SYSTEM}
    with_system = text_of([system, question])
    with_developer = text_of([{**system, "role": "developer"}, question])

    def takes(*between: Message) -> bool:
        """Whether it takes instructions that follow a system message and `between`."""
        texts = (
            text_of([system, *between, {"role": role, "content": OTHER_SYSTEM}, question])
            for role in ("system", "developer")
        )
        return all(SYSTEM in text and OTHER_SYSTEM in text for text in texts)

    facts = TemplateFacts(
        offers_tools=TOOL_NAME in text_of([question], tools=[TOOL]),
        takes_calls=CALLED_NAME in called and VALUE in called,
        takes_results=RESULT in called,
        wants_text_arguments=wants_text_arguments,
        wants_short_ids=wants_short_ids,
        leaves_out_system=bool(with_system) and SYSTEM not in with_system,
        leaves_out_developer=SYSTEM in with_system and SYSTEM not in with_developer,
        takes_systems=takes(),
        system_anywhere=takes(question, answer),
        opens_reasoning=plain.rstrip().endswith(OPENINGS),
        needs_question=SYSTEM in with_system and SYSTEM not in text_of([system]),
        leaves_out_text=VALUE in said and said.count(TEXT) < num_said,
        takes_one_text=THOUGHT in thought and not both,
        takes_one_call=takes_each and not takes_two,
        wants_parts=wants_parts,
    )
    return facts if renders else UNKNOWN
