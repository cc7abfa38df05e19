"""What the answers to a conversation are held to, for programs as in the server and the chat."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.engine_loop import ScriptedRunner
from support.engine_loop import loaded as demo
from support.harmony_chat import gpt_oss
from support.toy_tokenizers import with_tokens

from minisgl.engine import AsyncEngine
from minisgl.engine.chats import Chats
from minisgl.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
    joined,
)
from minisgl.request import SamplingParams, StructuredOutput
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer
from minisgl.text.tokenizer import Tokenizer

HERMES = with_tokens(
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    chat_template="{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{# <think> #}"
    "{% for m in messages %}{{ m.content }}"
    "{% endfor %}<|im_start|>",
)
THOUGHT = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "hermes": "<think>\nHm.</think>",
}
TEXT = {"harmony": "<|channel|>final<|message|>", "hermes": ""}
CALL = {
    "harmony": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
    "hermes": '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>',
}
FORMATS = {"harmony": gpt_oss(), "hermes": HERMES}
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {
    "type": "function",
    "function": {"name": "look", "strict": True, "parameters": SCHEMA},
}
LIST = StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}})


async def answered(
    chats: Chats, tokenizer: Tokenizer, answer: str, wanted: StructuredOutput | None, *tools: Any
) -> list[Event] | None:
    """The events of this answer; None where it may not be written."""
    conversation = await chats.read([{"role": "user", "content": "Hi."}], tools, {})
    plan = await chats.plan(conversation, SamplingParams(structured=wanted))
    parser, token_ids = plan.parser(), tokenizer.encode(answer)
    [constraint] = plan.extras()
    matcher = constraint.matcher
    assert parser is not None
    matcher.accept(token_ids)
    if matcher.error or not matcher.may_end:
        return None
    detokenizer = ParsingDetokenizer(tokenizer, parser)
    for token_id in token_ids:
        detokenizer.push(token_id)
    detokenizer.flush()
    return joined(detokenizer.take_events())


@pytest.mark.parametrize("name", FORMATS)
async def test_programs_hold_answers_to_what_the_server_holds_them_to(name: str) -> None:
    """Reasoning and markup before a constraint, calls beside it, and the schemas of calls."""
    tokenizer, thought, text = FORMATS[name], THOUGHT[name], TEXT[name]
    call, wrong_call = (CALL[name].format(values) for values in ('{"at": 3}', '{"at": true}'))
    called = [CallStart(0, "look"), CallArguments(0, '{"at": 3}'), CallEnd(0, is_object=True)]
    loaded = demo(ScriptedRunner(1), overlap=True, tokenizer=tokenizer)
    async with AsyncEngine(loaded) as engine:
        found = partial(answered, Chats(engine), tokenizer)
        assert await found(f"{text}[1]", LIST) == [ContentText("[1]")]
        assert await found(f"{text}[true]", LIST) is None
        thinking, *_, content = await found(f"{thought}{text}[1]", LIST) or ()
        assert isinstance(thinking, ReasoningText) and content == ContentText("[1]")
        assert await found(f"{text}[1]", LIST, LOOK) == [ContentText("[1]")]
        for wanted in (LIST, None):
            assert await found(call, wanted, LOOK) == called
            assert await found(wrong_call, wanted, LOOK) is None
