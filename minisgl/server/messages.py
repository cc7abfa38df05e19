"""The messages of a conversation, and the input of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError

# Limits of what a chat template gets, because rendering it takes time.
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of all messages together
MAX_TEMPLATE_OPTIONS = 256
# Template variables that may not be overridden through chat_template_kwargs.
RESERVED_VARIABLES = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)

Unsupported: TypeAlias = None
# Not decoded here: the process that renders does so, and may take its time.
TemplateOptions = Annotated[dict[str, Raw], Meta(max_length=MAX_TEMPLATE_OPTIONS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

REFUSAL_IS_ANSWER = "a refusal is only allowed in a message of the assistant."


class ContentPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", rename={"text": "refusal"}):
    """The refusal of an assistant, in a list of parts."""

    text: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart | RefusalPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: str | None = None  # the text of an assistant that refused, in place of content

    def for_template(self, path: str) -> dict[str, Any]:
        named = {} if self.name is None else {"name": self.name}
        if self.role != "assistant":
            self._check_said(path)
        return {"role": self.role, "content": self._text(), **named}

    @property
    def num_parts(self) -> int:
        return len(self.content) if isinstance(self.content, list) else 0

    def _text(self) -> str:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return text + (self.refusal or "")

    def _check_said(self, path: str) -> None:
        """Raise InvalidRequestError for a refusal or an empty message of another role."""
        if self.refusal is not None:
            raise InvalidRequestError(f"{path}.refusal", REFUSAL_IS_ANSWER)
        if self.content is None:
            raise InvalidRequestError(
                f"{path}.content", "must be a text or at least one text part."
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if isinstance(part, RefusalPart):
                    raise InvalidRequestError(f"{path}.content.{index}.type", REFUSAL_IS_ANSWER)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TemplateFields(Protocol):
    """The fields of a request that a chat template is rendered with."""

    @property
    def messages(self) -> Sequence[Message] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Raw] | None: ...


class Templated:
    """A request whose prompt comes from the chat template: a mixin for structs with its fields.

    The structs declare the fields themselves, because a struct has only one base with fields.
    """

    __slots__ = ()

    def template_messages(self: TemplateFields) -> list[dict[str, Any]]:
        """The messages as the template takes them; raises InvalidRequestError."""
        messages = self.messages or ()
        if sum(message.num_parts for message in messages) > MAX_PARTS:
            raise InvalidRequestError(
                "messages", f"must have at most {MAX_PARTS} content parts in all."
            )
        return [message.for_template(f"messages.{index}") for index, message in enumerate(messages)]

    def template_options(self: TemplateFields) -> dict[str, Any]:
        """The variables of the template besides the messages; raises InvalidRequestError."""
        chosen: dict[str, Any] = {**(self.chat_template_kwargs or {})}
        for name in chosen.keys() & RESERVED_VARIABLES:
            raise InvalidRequestError("chat_template_kwargs", f"{name} cannot be set.")
        fields = {
            "reasoning_effort": self.reasoning_effort,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message or None,
        }
        return {name: value for name, value in fields.items() if value is not None} | chosen
