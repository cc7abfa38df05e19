"""Conversations with tools."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

QUESTION: Any = [{"role": "user", "content": "How is the weather in Köln?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
# Arguments that a model that is free may write; they are no object that a template could be given.
ODD_ARGUMENTS = (
    *('{"a": tru, "b": 1}', "[1]", '"Köln"', '{"a": NaN}', '{"a":1e999}', r'{"a": "\ud800"}'),
)


def hermes(name: str, arguments: Any) -> str:
    """A call as models of the format hermes write it; a text is taken as it is."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


@dataclass
class Answer:
    """A choice, as clients put it together from a whole answer or a stream."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[dict[str, str]] = field(default_factory=list)  # name, arguments, id
    finish_reason: str | None = None
    logprobs: list[str] = field(default_factory=list)  # the tokens

    @property
    def made(self) -> list[tuple[str, str]]:
        return [(call["name"], call["arguments"]) for call in self.calls]


def whole_answer(choice: Any) -> Answer:
    message = choice.message
    return Answer(
        content=message.content,
        reasoning=getattr(message, "reasoning_content", None),
        calls=[
            {"name": call.function.name, "arguments": call.function.arguments, "id": call.id}
            for call in message.tool_calls or []
        ],
        finish_reason=choice.finish_reason,
        logprobs=[token.token for token in choice.logprobs.content] if choice.logprobs else [],
    )


def streamed_answers(chunks: Any) -> list[Answer]:
    """The choices of a stream; checks that ids, types and names come once, and no empty text."""
    answers: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            if choice.index not in answers:
                assert delta.role == "assistant" and delta.content == ""
                answers[choice.index] = Answer()
                continue
            answer = answers[choice.index]
            assert answer.finish_reason is None and delta.role is None
            if delta.content is not None:
                assert delta.content
                answer.content = (answer.content or "") + delta.content
            if (reasoning := getattr(delta, "reasoning_content", None)) is not None:
                assert reasoning
                answer.reasoning = (answer.reasoning or "") + reasoning
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(answer.calls) and call.type == "function"
                    assert call.function.arguments == ""
                    answer.calls.append({"name": call.function.name, "id": call.id})
                    answer.calls[-1]["arguments"] = ""
                else:
                    assert call.index == len(answer.calls) - 1
                    assert call.type is None and call.function.name is None
                    answer.calls[-1]["arguments"] += call.function.arguments
            if choice.logprobs:
                answer.logprobs += [token.token for token in choice.logprobs.content]
            answer.finish_reason = choice.finish_reason
    return [answers[index] for index in sorted(answers)]
