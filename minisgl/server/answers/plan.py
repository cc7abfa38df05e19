"""What the answers to one conversation are held to, and how they are parsed and reported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from minisgl.engine.answer_plan import FREE, AnswerPlan
from minisgl.engine.conversation import Conversation, plan_answers, read_conversation
from minisgl.errors import InvalidRequestError
from minisgl.events import Event, joined
from minisgl.grammar.compiler import Compiled
from minisgl.request import StructuredOutput, Tenant
from minisgl.server.config import ServerConfig
from minisgl.server.requests.constraints import constraint_of
from minisgl.server.requests.request_types import ChatRequest, CompletionRequest, TokenizeRequest
from minisgl.server.requests.templating import Reading, template_messages, template_options
from minisgl.server.requests.tools import tool_use
from minisgl.text.call_ids import new_call_id, short_id
from minisgl.text.history import needs_facts
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.names import NONE
from minisgl.text.parsing.selection import AnswerFormat

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

NO_TOKEN = -1
Compile: TypeAlias = Callable[[StructuredOutput | None], Awaitable[Compiled]]


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


async def plan_completion(body: CompletionRequest, compile: Compile) -> AnswerPlan:
    """The plan of completions, which are not parsed; raises as `compile`."""
    constraint = constraint_of(body)
    return FREE if constraint is None else AnswerPlan(grammar=await compile(constraint))


async def conversation_of(
    engine: AsyncEngine,
    body: ChatRequest | TokenizeRequest,
    reading: Reading,
    client: str,
    *,
    parallel: bool | None = None,
    any_length: bool = False,
) -> Conversation:
    """Tokenize the conversation of a request of `client`; raises as `read_conversation`."""
    salt, tenant = None, Tenant(client)
    if isinstance(body, ChatRequest):
        salt, tenant = body.salt, body.tenant(client)
    return await read_conversation(
        engine,
        lambda facts: template_messages(body, facts, reading),
        takes_facts=any(needs_facts(each.role, each.tool_calls) for each in body.messages or ()),
        tools=tool_use(body.tools, body.tool_choice, parallel),
        options=template_options(body, reading),
        any_length=any_length,
        or_else=', or set tool_choice to "none"',
        cache_salt=salt,
        tenant=tenant,
    )


async def plan_chat(
    engine: AsyncEngine,
    body: ChatRequest,
    conversation: Conversation,
    compile: Compile,
    tool_parser: str,
    form: AnswerFormat,
) -> AnswerPlan:
    """The plan of the answers to a conversation; raises InvalidRequestError, and as `compile`.

    form: of the model's answers, which has calls as the option `tool_parser` says.
    """
    tools = conversation.tools
    if tools is not None and form.calls is None and tool_parser != NONE:
        raise InvalidRequestError(
            "tools",
            "are not supported: the chat template does not show in which format this model "
            "writes calls. Start the server with --tool-parser.",
        )
    wanted, budget = constraint_of(body), body.thinking_token_budget
    if budget is not None and form.reasoning is None:
        raise InvalidRequestError(
            "thinking_token_budget", "is not supported: this model's reasoning is not parsed."
        )
    plan = await plan_answers(
        engine,
        conversation,
        form,
        compile,
        wanted,
        budget=budget,
        parses_reasoning=body.separate_reasoning is not False,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    if wanted is not None and tools is not None and tools.required:
        await compile(wanted)  # of no effect, but what is wrong in it is refused
    return plan


def style_of(
    plan: AnswerPlan,
    body: ChatRequest,
    conversation: Conversation,
    config: ServerConfig,
    count_call: Callable[[], None],
) -> AnswerStyle | None:
    """How the answers to a conversation are reported; None where they are not parsed."""
    tools, form = conversation.tools, plan.form
    if form is None:
        return None
    shows_reasoning = form.reasoning is not None and body.wants_reasoning
    return AnswerStyle(
        reasoning_fields=config.reasoning_fields if shows_reasoning else (),
        custom_names=tools.custom_names if tools is not None else frozenset(),
        short_ids=conversation.facts.wants_short_ids,
        count_call=count_call,
        echo=_events_of(body.echoed, form),
        reasoning_end=form.reasoning.close if form.reasoning else "",
        call_end=form.calls.closing if form.calls else "",
        body=form.messages.body if form.messages else "",
        begun=plan.begun,
    )


def _events_of(text: str | None, form: AnswerFormat) -> tuple[Event, ...]:
    """What a text is that the answer goes on with: reasoning too, if it has a block."""
    if not text:
        return ()
    reasoning = form.reasoning if form.messages is None else None
    parser = AnswerParser(None, reasoning, marker_ids={})
    return (*joined([*parser.feed([(NO_TOKEN, text)]), *parser.finish(natural=False)]),)
