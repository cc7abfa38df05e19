"""From a conversation to a prompt, and to what parses and limits its answers.

The APIs of the server, `LLM` and `minisgl chat` have one rule for this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minisgl.engine.answer_plan import AnswerPlan
from minisgl.errors import InvalidRequestError
from minisgl.events import ContentText, Event, ReasoningText
from minisgl.grammar.compiler import Compiled
from minisgl.grammar.reasoning import reasoning_gate
from minisgl.grammar.tool_grammars import headed
from minisgl.grammar.tool_use import ToolUse
from minisgl.images.prompt import Prompt
from minisgl.request import EVERYONE, StructuredOutput, Tenant
from minisgl.text.history import Message
from minisgl.text.parsing.selection import AnswerFormat
from minisgl.text.template_facts import TemplateFacts

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation under the chat template."""

    prompt: Prompt  # as the engine takes it
    tools: ToolUse | None = None
    facts: TemplateFacts = field(default_factory=TemplateFacts)  # as far as they were asked for

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt in ids of the vocabulary."""
        return self.prompt.shown_token_ids


async def read_conversation(
    engine: AsyncEngine,
    fit: Callable[[TemplateFacts], Sequence[Message]],
    *,
    takes_facts: bool,
    tools: ToolUse | None,
    options: Mapping[str, Any],
    any_length: bool = False,
    or_else: str = "",
    cache_salt: str | None = None,
    tenant: Tenant = EVERYONE,
) -> Conversation:
    """Tokenize a conversation, with the tools that it offers.

    fit: its messages, for a template with these facts. takes_facts: whether they depend on them.
    or_else: what else a caller can do whose tools the template leaves out. cache_salt, tenant: of
    the request.
    Raises InvalidRequestError, and whatever `encode_conversation` does.
    """
    facts = await engine.template_facts() if takes_facts or tools is not None else TemplateFacts()
    if tools is not None:
        if not facts.offers_tools:
            raise InvalidRequestError(
                "tools",
                "are not supported by this model: its chat template leaves them out. Leave them "
                f"out as well{or_else}.",
            )
        options = {**options, "tools": tools.described}
    prompt = await engine.encode_conversation(fit(facts), any_length, cache_salt, tenant, **options)
    return Conversation(prompt=prompt, tools=tools, facts=facts)


async def plan_answers(
    engine: AsyncEngine,
    conversation: Conversation,
    form: AnswerFormat,
    compile: Callable[[StructuredOutput | None], Awaitable[Compiled]],
    wanted: StructuredOutput | None,
    *,
    budget: int | None = None,
    parses_reasoning: bool = True,
    skip_special_tokens: bool = True,
) -> AnswerPlan:
    """The plan of the answers to a conversation; raises InvalidRequestError, and as `compile`.

    form: of the model. wanted: what the answers are held to besides the tools. budget: the most
    tokens of reasoning. parses_reasoning: keep it apart from the content.
    """
    tools, prompt = conversation.tools, conversation.prompt_token_ids
    tokenizer = engine.tokenizer
    is_open = tokenizer is not None and form.opens_reasoning(tokenizer, prompt)
    is_closed = tokenizer is not None and form.closes_reasoning(tokenizer, prompt)
    in_text = tokenizer is not None and form.opens_text(tokenizer, prompt)
    constraint = _constraint(wanted, tools, form, in_text=in_text)
    grammar = gate = None
    if constraint is not None or budget is not None:
        grammar = await compile(constraint)
        if not in_text:
            gate = await reasoning_gate(
                form, engine.encode, is_open=is_open, is_closed=is_closed, budget=budget
            )
    if not parses_reasoning:
        form = replace(form, reasoning=None)
    parses_calls = tools is not None and form.calls is not None
    if form.reasoning is None and not parses_calls and not form.text_opening:
        return AnswerPlan(grammar=grammar, gate=gate)
    begun: type[Event] | None = ContentText if is_open or in_text else None
    if is_open and form.reasoning is not None:
        begun = ReasoningText
    return AnswerPlan(
        grammar=grammar,
        gate=gate,
        form=form,
        parser=partial(
            form.parser,
            in_reasoning=is_open and (form.reasoning is not None or form.messages is not None),
            in_text=in_text,
            tools=tools.schemas if tools is not None and parses_calls else None,
            parse_calls=parses_calls,
            only_calls=tools is not None and tools.required,
            held_to=tools.callable_names if tools is not None and constraint is not None else (),
            skip_special_tokens=skip_special_tokens,
        ),
        begun=begun,
    )


def _constraint(
    wanted: StructuredOutput | None, tools: ToolUse | None, form: AnswerFormat, *, in_text: bool
) -> StructuredOutput | None:
    """What the answer is held to: the tools, the constraint of the request, or either.

    Where a call must be made, it is the tools: the constraint is one of content, and there is
    none. in_text: the prompt has begun the message with the content.
    """
    if tools is not None and (wanted is None or tools.required):
        return tools.grammar(form)
    if wanted is None:
        return None
    header = form.messages.text if form.messages is not None and not in_text else ""
    calls = None if tools is None else tools.grammar(form, only_calls=True)
    if calls is None and not header:
        return wanted
    return headed(wanted, header, form.marker_ids, calls)
