"""Has the answers of an engine in this process follow rules: its parser, matcher and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minisgl.engine import AsyncEngine
from minisgl.engine.conversation import AnswerPlan, Conversation, plan_answers
from minisgl.errors import UnsupportedModelError
from minisgl.events import CallArguments, CallStart, Event, ReasoningText
from minisgl.grammar.tool_use import offered
from minisgl.request import StructuredOutput
from minisgl.text.parsing.selection import choose_format
from minisgl.text.tokenizer import Tokenizer

from .model import AnswerRules, CallPiece


async def check_rules(engine: AsyncEngine, rules: AnswerRules) -> None:
    """Raises MinisglError if the model cannot follow the rules."""
    if rules.schema is not None:
        await engine.compile(structured(rules.schema))
    if rules.tools:
        facts = await engine.template_facts()
        if choose_format(_tokenizer(engine)).calls is None or not facts.offers_tools:
            raise UnsupportedModelError(
                f"{engine.model_name} cannot be offered tools: its chat template has no place for "
                "them, or none of the known formats of calls."
            )


async def plan_reply(engine: AsyncEngine, prompt: Sequence[int], rules: AnswerRules) -> AnswerPlan:
    """The plan of an answer under rules. Raises MinisglError."""
    conversation = Conversation(prompt_token_ids=[*prompt], tools=offered(rules.tools))
    wanted = None if rules.schema is None else structured(rules.schema)
    form = choose_format(_tokenizer(engine))
    return await plan_answers(engine, conversation, form, engine.compile, wanted)


def structured(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=schema, field="schema")


def thinking(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


def call_pieces(events: Iterable[Event]) -> list[CallPiece]:
    pieces = []
    for event in events:
        match event:
            case CallStart(index, name):
                pieces.append(CallPiece(index, name=name))
            case CallArguments(index, text):
                pieces.append(CallPiece(index, arguments=text))
    return pieces


def _tokenizer(engine: AsyncEngine) -> Tokenizer:
    assert engine.tokenizer is not None  # or there would be no chat
    return engine.tokenizer
