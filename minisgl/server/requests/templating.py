"""The input of the chat template: the messages of a conversation, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.errors import InvalidRequestError
from minisgl.server.requests.chat_messages import (
    MAX_PARTS,
    NO_FACTS,
    REFUSED,
    TEXT_ONLY,
    Fitting,
    Images,
)
from minisgl.server.requests.request_types import ChatRequest, TokenizeRequest
from minisgl.text.history import fitted_history
from minisgl.text.parsing.formats import MessageFormat
from minisgl.text.template_facts import TemplateFacts

# Variables of templates that may not be overridden through chat_template_kwargs.
RESERVED_VARIABLES = frozenset(
    (
        *("self", "messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "control_tokens_in_text"),
    )
)
BUILT_IN_TOOLS = "builtin_tools"
THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Reading:
    """How messages are read, where a request does not say it itself."""

    control_tokens_in_text: bool = False  # a text that spells a control token becomes that token
    images: Images = "see"
    refusal: str = TEXT_ONLY  # why the model takes no images; empty: it does
    form: MessageFormat | None = None  # of the model's answers


DEFAULT_READING = Reading()


def template_messages(
    body: ChatRequest | TokenizeRequest,
    facts: TemplateFacts = NO_FACTS,
    reading: Reading = DEFAULT_READING,
) -> list[dict[str, Any]]:
    """The messages as the template takes them; raises InvalidRequestError.

    facts: what the template does, which matters where a message needs them.
    """
    messages = body.messages or ()
    if sum(message.num_parts for message in messages) > MAX_PARTS:
        raise InvalidRequestError(
            "messages", f"must have at most {MAX_PARTS} content parts in all."
        )
    # A server that refuses images has no tower, and no request can change that.
    refusal = REFUSED if reading.images == "refuse" else reading.refusal
    fitting = Fitting(facts, body.images or reading.images, refusal)
    fitted = [
        message.for_template(f"messages.{index}", fitting) for index, message in enumerate(messages)
    ]
    return fitted_history(fitted, facts)


def template_options(
    body: ChatRequest | TokenizeRequest, reading: Reading = DEFAULT_READING
) -> dict[str, Any]:
    """The options of the template besides the messages; raises InvalidRequestError.

    How much to think also decides whether, under both names that templates have for it, unless
    the request chooses that itself.
    """
    chosen: dict[str, Any] = {**(body.chat_template_kwargs or {})}
    for name in chosen.keys() & RESERVED_VARIABLES:
        raise InvalidRequestError("chat_template_kwargs", f"{name} cannot be set.")
    effort: str | None = body.reasoning_effort
    thinks = None
    if body.reasoning is not None:
        effort = effort or body.reasoning.effort
        thinks = body.reasoning.enabled
    if effort is not None and thinks is None:
        thinks = effort != "none"
    if reading.form is not None:
        _check_built_in_tools(chosen, reading.form)
        least = "none" if thinks is False else None
        effort = reading.form.nearest_effort(least or effort)
    is_read = body.control_tokens_in_text
    if is_read is None:
        is_read = reading.control_tokens_in_text
    fields = {
        "reasoning_effort": effort,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message or None,
        "control_tokens_in_text": is_read or None,
    }
    if not any(name in chosen for name in THINKING_SWITCHES):
        fields |= dict.fromkeys(THINKING_SWITCHES, thinks)
    return {name: value for name, value in fields.items() if value is not None} | chosen


def _check_built_in_tools(chosen: Mapping[str, Any], form: MessageFormat) -> None:
    given = chosen.get(BUILT_IN_TOOLS)
    if given is not None and bytes(given) not in (b"null", b"[]"):
        raise InvalidRequestError(
            "chat_template_kwargs",
            f"{BUILT_IN_TOOLS} cannot be set: the model's own tools, {' and '.join(form.tools)}, "
            "are not run here. Offer functions in tools, and run them.",
        )
