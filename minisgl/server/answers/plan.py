"""What the answers to one conversation are held to, and how they are parsed and reported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from minisgl.errors import InvalidRequestError
from minisgl.events import ContentText, Event, ReasoningText, joined
from minisgl.grammar.reasoning import ReasoningGate, reasoning_gate
from minisgl.grammar.tool_grammars import calls_or, headed
from minisgl.matcher import Matcher
from minisgl.request import StructuredOutput
from minisgl.server.config import ServerConfig
from minisgl.server.requests.chat_messages import NO_FACTS
from minisgl.server.requests.constraints import constraint_of
from minisgl.server.requests.request_types import ChatRequest, CompletionRequest, TokenizeRequest
from minisgl.server.requests.templating import Reading, template_messages, template_options
from minisgl.server.requests.tools import ToolUse, tool_use
from minisgl.server.served_engine import CompiledGrammar, ServedEngine
from minisgl.text.call_ids import new_call_id, short_id
from minisgl.text.history import needs_facts
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.names import NONE
from minisgl.text.parsing.selection import AnswerFormat
from minisgl.text.template_facts import TemplateFacts

NO_TOKEN = -1
Compile: TypeAlias = Callable[[StructuredOutput | None], Awaitable[CompiledGrammar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How a parsed answer is reported."""

    reasoning_fields: tuple[str, ...]  # the members that have the reasoning; none: it is left out
    custom_names: frozenset[str]  # of the tools whose input is a text
    short_ids: bool  # calls have ids of 9 letters and digits
    count_call: Callable[[], None]
    echo: tuple[Event, ...] = ()  # what the answer begins with
    reasoning_end: str = ""  # the closing markers
    call_end: str = ""
    body: str = ""  # of messages: the marker before the text of each
    begun: type[Event] | None = None  # what the prompt has begun of them

    def call_id(self) -> str:
        """An id for a call, unlike all others."""
        return short_id(new_call_id()) if self.short_ids else new_call_id()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What the answers of one request have in common. Each gets a parser and a matcher."""

    grammar: CompiledGrammar | None = None
    gate: ReasoningGate | None = None
    # A new one for each answer; None: its text is the content.
    parser: Callable[[], AnswerParser | None] = lambda: None
    style: AnswerStyle | None = None

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        return () if self.grammar is None else self.grammar.ignored_keywords

    def matcher(self) -> Matcher | None:
        """A matcher for one answer."""
        return None if self.grammar is None else self.grammar.matcher(self.gate)


FREE = AnswerPlan()


async def plan_completion(body: CompletionRequest, compile: Compile) -> AnswerPlan:
    """The plan of completions, which are not parsed; raises as `compile`."""
    constraint = constraint_of(body)
    if constraint is None:
        return FREE
    return AnswerPlan(grammar=await compile(constraint))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation under the chat template."""

    prompt_token_ids: list[int]
    facts: TemplateFacts | None  # None: neither tools nor instructions are spoken of
    tools: ToolUse | None


async def read_conversation(
    engine: ServedEngine,
    body: ChatRequest | TokenizeRequest,
    reading: Reading,
    *,
    parallel: bool | None = None,
    any_length: bool = False,
) -> Conversation:
    """Tokenize the conversation of a request, with the tools that it offers.

    Raises InvalidRequestError, and whatever `encode_chat` does.
    """
    tools = tool_use(body.tools, body.tool_choice, parallel)
    facts = None
    options = template_options(body, reading)
    messages = body.messages or ()
    if tools is not None or any(needs_facts(each.role, each.tool_calls) for each in messages):
        facts = await engine.template_facts()
    if tools is not None:
        assert facts is not None
        if not facts.offers_tools:
            raise InvalidRequestError(
                "tools",
                "are not supported by this model: its chat template leaves them out. Leave them "
                'out as well, or set tool_choice to "none".',
            )
        options["tools"] = tools.for_template()
    fitted = template_messages(body, facts or NO_FACTS, reading)
    prompt = await engine.encode_chat(fitted, any_length, **options)
    return Conversation(prompt_token_ids=prompt, facts=facts, tools=tools)


async def plan_chat(
    engine: ServedEngine,
    body: ChatRequest,
    conversation: Conversation,
    compile: Compile,
    config: ServerConfig,
    model_form: AnswerFormat,
    count_call: Callable[[], None],
) -> AnswerPlan:
    """The plan of the answers to a conversation; raises InvalidRequestError, and as `compile`."""
    tools = conversation.tools
    if tools is not None and model_form.calls is None and config.tool_parser != NONE:
        raise InvalidRequestError(
            "tools",
            "are not supported: the chat template does not show in which format this model "
            "writes calls. Start the server with --tool-parser.",
        )
    prompt, tokenizer = conversation.prompt_token_ids, engine.tokenizer
    is_open = tokenizer is not None and model_form.opens_reasoning(tokenizer, prompt)
    is_closed = tokenizer is not None and model_form.closes_reasoning(tokenizer, prompt)
    in_text = tokenizer is not None and model_form.opens_text(tokenizer, prompt)
    wanted = constraint_of(body)
    constraint = _constraint(wanted, tools, model_form, in_text=in_text)
    budget = body.thinking_token_budget
    if budget is not None and model_form.reasoning is None:
        raise InvalidRequestError(
            "thinking_token_budget", "is not supported: this model's reasoning is not parsed."
        )
    grammar = None
    if constraint is not None or budget is not None:
        grammar = await compile(constraint)
    if wanted is not None and tools is not None and tools.required:
        await compile(wanted)  # of no effect, but what is wrong in it is refused
    form = model_form
    if body.separate_reasoning is False:
        form = replace(form, reasoning=None)
    parses_calls = tools is not None and form.calls is not None
    parsed = form.reasoning is not None or parses_calls or bool(form.text_opening)
    if not parsed and grammar is None:
        return FREE
    gate = None
    if grammar is not None and not in_text:
        gate = await reasoning_gate(
            model_form, engine.encode, is_open=is_open, is_closed=is_closed, budget=budget
        )
    if not parsed:
        return AnswerPlan(grammar=grammar, gate=gate)
    begun: type[Event] | None = ContentText if is_open or in_text else None
    if is_open and form.reasoning is not None:
        begun = ReasoningText
    facts = conversation.facts
    shows_reasoning = form.reasoning is not None and body.wants_reasoning
    return AnswerPlan(
        grammar=grammar,
        gate=gate,
        parser=partial(
            form.parser,
            in_reasoning=is_open and (form.reasoning is not None or form.messages is not None),
            in_text=in_text,
            tools=tools.schemas if tools is not None and parses_calls else None,
            parse_calls=parses_calls,
            only_calls=tools is not None and tools.required,
            held_to=tools.callable_names if tools is not None and constraint is not None else (),
            skip_special_tokens=body.skip_special_tokens is not False,
        ),
        style=AnswerStyle(
            reasoning_fields=config.reasoning_fields if shows_reasoning else (),
            custom_names=tools.custom_names if tools is not None else frozenset(),
            short_ids=facts is not None and facts.wants_short_ids,
            count_call=count_call,
            echo=_events_of(body.echoed, form),
            reasoning_end=form.reasoning.close if form.reasoning else "",
            call_end=form.calls.closing if form.calls else "",
            body=form.messages.body if form.messages else "",
            begun=begun,
        ),
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
    if calls is not None:
        return calls_or(calls, wanted, header, form.marker_ids)
    return headed(wanted, header, form.marker_ids) if header else wanted


def _events_of(text: str | None, form: AnswerFormat) -> tuple[Event, ...]:
    """What a text is that the answer goes on with: reasoning too, if it has a block."""
    if not text:
        return ()
    reasoning = form.reasoning if form.messages is None else None
    parser = AnswerParser(None, reasoning, marker_ids={})
    return (*joined([*parser.feed([(NO_TOKEN, text)]), *parser.finish(natural=False)]),)
