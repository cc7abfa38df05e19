"""Prompts of conversations for programs, and how the answers to them are parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minisgl.engine.engine import AsyncEngine
from minisgl.errors import InvalidRequestError, did_you_mean, one_of
from minisgl.grammar.reasoning import ReasoningGate, reasoning_gate
from minisgl.text.history import ROLES, fitted_history, needs_facts
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.selection import AnswerFormat, choose_format
from minisgl.text.template_facts import TemplateFacts

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


def _no_parser() -> None:
    """The text is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a request, and what its answers have in common."""

    token_ids: Sequence[int]
    parser: Callable[[], AnswerParser | None] = _no_parser  # a new one for each answer
    gate: ReasoningGate | None = None  # lets reasoning come before what a constraint applies to


def template_names(template: str) -> frozenset[str]:
    """The names in the Jinja code of a template: those of its variables are among them."""
    code = " ".join(_JINJA.findall(_COMMENT.sub("", template)))
    return frozenset(_NAME.findall(_STRING.sub("''", code))) - _KEYWORDS


class Chats:
    """Reads conversations under the chat template of one model."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        tokenizer = engine.tokenizer
        template = tokenizer.chat_template_text if tokenizer is not None else ""
        self._variables = template_names(template)
        self._form = choose_format(tokenizer) if tokenizer is not None else AnswerFormat(None, None)

    def check_options(self, names: Iterable[str], others: Iterable[str]) -> None:
        """Raise InvalidRequestError for the first name that would have no effect.

        others: the names that are allowed besides those of the template.
        """
        allowed = {*RENDERING_OPTIONS, *others, *self._variables}
        for name in names:
            if name not in RENDERING_OPTIONS and name not in self._variables:
                reason = "is no sampling parameter and no variable of the chat template"
                raise InvalidRequestError(name, reason + did_you_mean(name, allowed))

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        options: Mapping[str, Any],
        *,
        skip_special_tokens: bool,
    ) -> Prompt:
        """The prompt of one conversation; raises InvalidRequestError, and as `encode_chat`."""
        engine, form = self._engine, self._form
        _check_messages(messages)
        offered = {"tools": [*map(_described, tools)]} if tools else {}
        if tools and not (await engine.template_facts()).offers_tools:
            raise InvalidRequestError(
                "tools",
                "are not supported by this model: its chat template leaves them out. Leave them "
                "out as well.",
            )
        takes_facts = any(needs_facts(each["role"], each.get("tool_calls")) for each in messages)
        facts = await engine.template_facts() if takes_facts else TemplateFacts()
        fitted = fitted_history(messages, facts)
        token_ids = await engine.encode_chat(fitted, **offered, **options)
        tokenizer = engine.tokenizer
        is_open = tokenizer is not None and form.opens_reasoning(tokenizer, token_ids)
        is_closed = tokenizer is not None and form.closes_reasoning(tokenizer, token_ids)
        parses_calls = bool(tools) and form.calls is not None
        return Prompt(
            token_ids=token_ids,
            parser=partial(
                form.parser,
                in_reasoning=is_open,
                tools=_schemas(offered["tools"]) if parses_calls else None,
                parse_calls=parses_calls,
                skip_special_tokens=skip_special_tokens,
            ),
            gate=await reasoning_gate(form, engine.encode, is_open=is_open, is_closed=is_closed),
        )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
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
    return {"type": "function", **tool}


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools]
    return {
        function["name"]: function.get("parameters") or {"type": "object", "properties": {}}
        for function in functions
    }
