"""Reads the conversations of programs: messages, tools and options in Python."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from minisgl.engine.answer_plan import AnswerPlan
from minisgl.engine.conversation import Conversation, plan_answers, read_conversation
from minisgl.engine.engine import AsyncEngine
from minisgl.errors import InvalidRequestError, did_you_mean, one_of
from minisgl.grammar.tool_use import offered
from minisgl.images.local import with_sources
from minisgl.request import SamplingParams
from minisgl.text.history import ROLES, Message, fitted_history, needs_facts
from minisgl.text.parsing.selection import AnswerFormat, choose_format

# The options of `AsyncEngine.encode_chat` that no template has to use.
RENDERING_OPTIONS = ("add_generation_prompt", "continue_final_message", "control_tokens_in_text")
_JINJA = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_KEYWORDS = frozenset(
    "and break continue defined elif else endfor endif endmacro endset false False for if in is "
    "loop macro namespace none None not or set true True undefined".split()
)


def template_names(template: str) -> frozenset[str]:
    """The names in the Jinja code of a template: those of its variables are among them."""
    code = " ".join(_JINJA.findall(_COMMENT.sub("", template)))
    return frozenset(_NAME.findall(_STRING.sub("''", code))) - _KEYWORDS


class Chats:
    """Reads conversations under the chat template of one model."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @cached_property
    def _variables(self) -> frozenset[str]:
        tokenizer = self._engine.tokenizer
        return template_names(tokenizer.chat_template_text if tokenizer is not None else "")

    @cached_property
    def form(self) -> AnswerFormat:
        """How the model writes its answers."""
        tokenizer = self._engine.tokenizer
        return choose_format(tokenizer) if tokenizer is not None else AnswerFormat(None, None)

    def check_options(self, names: Iterable[str], others: Iterable[str]) -> None:
        """Raise InvalidRequestError for the first name that would have no effect.

        others: the names that are allowed besides those of the template.
        """
        allowed = {*RENDERING_OPTIONS, *others, *self._variables}
        for name in names:
            if name not in RENDERING_OPTIONS and name not in self._variables:
                reason = "is no sampling parameter and no variable of the chat template"
                raise InvalidRequestError(name, reason + did_you_mean(name, allowed))

    async def read(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        options: Mapping[str, Any],
        *,
        any_length: bool = False,
        cache_salt: str | None = None,
    ) -> Conversation:
        """The conversation as a prompt; raises InvalidRequestError, and as `encode_chat`."""
        _check_messages(messages)
        if any(isinstance(message.get("content"), list | tuple) for message in messages):
            messages = await asyncio.to_thread(with_sources, messages)
        return await read_conversation(
            self._engine,
            partial(fitted_history, messages),
            takes_facts=any(needs_facts(each["role"], each.get("tool_calls")) for each in messages),
            tools=offered([*map(_described, tools)]),
            options=options,
            any_length=any_length,
            cache_salt=cache_salt,
        )

    async def plan(self, conversation: Conversation, params: SamplingParams) -> AnswerPlan:
        """The plan of the answers with these parameters; raises as `AsyncEngine.compile`."""
        return await plan_answers(
            self._engine,
            conversation,
            self.form,
            self._engine.compile,
            params.structured,
            skip_special_tokens=params.skip_special_tokens,
        )


def _check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequestError for calls that are none, and for a role that HTTP refuses as well:
    most templates would take it for another one."""
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise InvalidRequestError(
                f"messages[{index}].role", f"cannot be {role!r}; {one_of(ROLES)}."
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise InvalidRequestError(
                f"messages[{index}].tool_calls",
                'must be a list of {"id": ..., "type": "function", "function": {"name": ..., '
                '"arguments": ...}}.',
            )


def _described(tool: Any) -> Mapping[str, Any]:
    """A tool as chat templates know it, from a Python function or OpenAI's form."""
    if callable(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            described: Mapping[str, Any] = get_json_schema(tool)
        except Exception as error:  # annotations or a docstring that it cannot read
            raise InvalidRequestError("tools", f"{tool} cannot be described: {error}") from error
        return described
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            "tools",
            'must be a list of functions, or of {"type": "function", "function": {"name": ..., '
            '"parameters": ...}}.',
        )
    if not isinstance(function.get("parameters"), Mapping | None):
        raise InvalidRequestError("tools", f"{function['name']}: parameters must be a JSON schema.")
    return {"type": "function", **tool}
