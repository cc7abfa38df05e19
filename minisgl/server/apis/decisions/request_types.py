"""The body of POST /v1/decisions as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from minisgl.errors import InvalidRequestError
from minisgl.server.apis.responses.request_types import InputItem, InputTextPart
from minisgl.server.requests.chat_messages import MAX_MESSAGES
from minisgl.server.requests.described import Ignored, takes
from minisgl.server.requests.request_types import ClientFields

# As OpenAI limits them.
MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10

Instructions: TypeAlias = str | Annotated[list[InputTextPart], Meta(min_length=1)]


class Option(Struct):
    """One of the answers to a question, as the model reads it."""

    text: str
    description: str | None


class Choice(Struct):
    value: str | bool
    description: str | None = None


class Level(Struct):
    label: str
    description: str | None = None


class PredicateQuestion(Struct, tag_field="type", tag="predicate"):
    """Whether a statement about the input is true."""

    instructions: Instructions
    name: str | None = None

    @property
    def options(self) -> Sequence[Option]:
        return [Option("true", None), Option("false", None)]


class ChoiceQuestion(Struct, tag_field="type", tag="choice"):
    """Which of some values fits the input."""

    instructions: Instructions
    choices: Annotated[list[Choice], Meta(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None

    @property
    def options(self) -> Sequence[Option]:
        return [Option(_shown(each.value), each.description) for each in self.choices]


class ScoreQuestion(Struct, tag_field="type", tag="score"):
    """Which of some levels, the lowest first, the input reaches."""

    instructions: Instructions
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_LEVELS)]
    name: str | None = None

    @property
    def options(self) -> Sequence[Option]:
        return [Option(each.label, each.description) for each in self.levels]


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


@takes(Ignored, "prompt_cache_key", "prompt_cache_options", "safety_identifier")
class DecisionRequest(ClientFields, kw_only=True):
    """POST /v1/decisions"""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """What is asked about: a text, or the items of a conversation. Example: `"It rains."`"""
    questions: Annotated[list[Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    """What is asked. Example: `[{"type": "predicate", "instructions": "The weather is bad."}]`"""

    def __post_init__(self) -> None:
        for index, question in enumerate(self.questions):
            if isinstance(question, ChoiceQuestion):
                values = {(type(each.value), each.value) for each in question.choices}
                if len(values) < len(question.choices):
                    raise InvalidRequestError(
                        f"questions.{index}.choices", "must differ from each other."
                    )


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
