"""The messages of a conversation, as a request has them and as a chat template takes them."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tool_grammars import CUSTOM_ARGUMENT
from minisgl.images.source import IMAGE_PART, ImageSource
from minisgl.server.requests.described import Unsupported
from minisgl.text.history import Role
from minisgl.text.rendering import TEXT_ARGUMENT
from minisgl.text.template_facts import TemplateFacts

# Limits of what a chat template gets, because rendering it takes time.
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of all messages together
MAX_TEMPLATE_OPTIONS = 256
MAX_DEPTH = 200  # of a call's arguments; templates write JSON with two calls for each level
STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
BRACKETS, NUMBERS = re.compile(r"[\[\]{}]"), re.compile(r"\d[\d.eE+-]*")
# Not decoded here: the process that renders does so, and may take its time.
TemplateOptions = Annotated[dict[str, Raw], Meta(max_length=MAX_TEMPLATE_OPTIONS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NO_FACTS = TemplateFacts()

Images: TypeAlias = Literal["see", "refuse", "placeholder"]
Detail: TypeAlias = Literal["auto", "low", "high"]
SEEING_ROLES = ("user", "tool")  # whose messages may have images
TEXT_ONLY = "this model takes text only"
REFUSED = "this server refuses them"
IMAGE_TEXT = "[Here is an image, which this model cannot see.]"

REFUSAL_IS_ANSWER = "a refusal is only allowed in a message of the assistant."


class ContentPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", rename={"text": "refusal"}):
    """The refusal of an assistant, in a list of parts."""

    text: str


class ImageAddress(Struct):
    url: str
    detail: Detail | None = None  # low: it is reduced; others: as the checkpoint has it


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image. What has no address can only become a text."""

    image_url: ImageAddress | None = None

    text: ClassVar[str] = ""  # beside the texts of other parts it adds none


class CalledFunction(Struct):
    name: str
    # JSON text, as OpenAI has it, or the object itself; null: none.
    arguments: str | dict[str, Raw] | None = None


class CustomInput(Struct):
    name: str
    input: str = ""


class ToolCall(Struct):
    """A call that the assistant has made."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CustomInput | None = None

    def for_template(self, path: str, fitting: Fitting) -> dict[str, Any]:
        """The call as a function's, which is all that templates know."""
        called = self.function if self.type == "function" else self.custom
        if called is None:
            raise InvalidRequestError(f"{path}.{self.type}", "is missing.")
        arguments: object
        if isinstance(called, CustomInput):
            arguments = {CUSTOM_ARGUMENT: called.input}
        else:
            arguments = _arguments(called.arguments or "{}")
        if fitting.facts.wants_text_arguments:
            arguments = msgspec.json.encode(arguments).decode()
        fitting.names[self.id] = called.name
        function = {"name": called.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _arguments(given: str | dict[str, Raw]) -> dict[str, Raw]:
    """Arguments as an object, whose values stay as they were written.

    What a model wrote instead of an object, or was cut, or cannot be read here, is shown to it as a
    text.
    """
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    with contextlib.suppress(ValueError, RecursionError):
        arguments = msgspec.json.decode(text, type=dict[str, Raw] | None)
        if _is_readable(text):
            return arguments or {}
    return {TEXT_ARGUMENT: Raw(msgspec.json.encode(text))}


def _is_readable(text: str) -> bool:
    """Whether a template can be given a JSON text: it is not nested too deeply, and has no number
    beyond those of Python, as 1e999 is."""
    bare = STRINGS.sub("", text)
    depths = accumulate(1 if each in "[{" else -1 for each in BRACKETS.findall(bare))
    return max(depths, default=0) <= MAX_DEPTH and math.inf not in map(float, NUMBERS.findall(bare))


@dataclass(slots=True)
class Fitting:
    """How messages are fitted to the chat template."""

    facts: TemplateFacts
    images: Images = "see"
    refusal: str = TEXT_ONLY  # why the model takes no images; empty: it does
    names: dict[str, str] = field(default_factory=dict)  # of the tools called so far, by call id

    def seen(self, part: ImagePart, role: Role, path: str) -> ImageSource | None:
        """The image of a part at `path`; None where a text takes its place.

        Raises InvalidRequestError.
        """
        if self.images == "placeholder":
            return None
        if refusal := self.refusal or (REFUSED if self.images == "refuse" else ""):
            raise InvalidRequestError(
                f"{path}.type",
                f'cannot be an image, because {refusal.rstrip(".")}; with images: "placeholder" '
                "a text takes its place.",
            )
        if role not in SEEING_ROLES:
            raise InvalidRequestError(
                f"{path}.type",
                "cannot be an image here: only messages of the user and results of tools have any.",
            )
        address = part.image_url or ImageAddress("")
        try:
            source = ImageSource.of_url(address.url, is_low=address.detail == "low")
        except InvalidRequestError as error:
            error.param = f"{path}.image_url"
            raise
        return replace(source, field=f"{path}.image_url")


class Message(Struct):
    role: Role
    content: (
        str | Annotated[list[ContentPart | RefusalPart | ImagePart], Meta(min_length=1)] | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's result
    reasoning_content: str | None = None  # of the assistant; two names for the same
    reasoning: str | None = None
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: str | None = None  # the text of an assistant that refused, in place of content

    def for_template(self, path: str, fitting: Fitting) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self._content(path, fitting)}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant":
            if reasoning := self.reasoning_content or self.reasoning:
                message["reasoning_content"] = reasoning
            if self.tool_calls:
                message["tool_calls"] = [
                    call.for_template(f"{path}.tool_calls.{index}", fitting)
                    for index, call in enumerate(self.tool_calls)
                ]
            return message
        self._check_said(path)
        if self.role != "tool" and self.tool_call_id is not None:
            raise InvalidRequestError(
                f"{path}.tool_call_id", "is only allowed in a message of the role tool."
            )
        if self.role == "tool":
            if self.tool_call_id is None:
                raise InvalidRequestError(f"{path}.tool_call_id", "is missing.")
            if self.name is None:
                message["name"] = fitting.names.get(self.tool_call_id)
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def num_parts(self) -> int:
        parts = len(self.content) if isinstance(self.content, list) else 0
        return parts + len(self.tool_calls or ())

    @property
    def text(self) -> str:
        """Its content, in one piece."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return text + (self.refusal or "")

    def _content(self, path: str, fitting: Fitting) -> str | list[dict[str, Any]]:
        """Its text; with images its texts and images, in their order."""
        if not isinstance(self.content, list):
            return self.text
        parts: list[dict[str, Any]] = []
        for index, part in enumerate(self.content):
            text = part.text
            if isinstance(part, ImagePart):
                source = fitting.seen(part, self.role, f"{path}.content.{index}")
                if source is not None:
                    parts.append({"type": IMAGE_PART, "source": source})
                    continue
                text = IMAGE_TEXT
            if not parts or parts[-1]["type"] == IMAGE_PART:
                parts.append({"type": "text", "text": ""})
            parts[-1]["text"] += text
        parts = [part for part in parts if part["type"] == IMAGE_PART or part["text"]]
        if any(part["type"] == IMAGE_PART for part in parts):
            return parts
        return "".join(part["text"] for part in parts) + (self.refusal or "")

    def _check_said(self, path: str) -> None:
        """Raise InvalidRequestError for what only the assistant has, or an empty message."""
        if self.refusal is not None:
            raise InvalidRequestError(f"{path}.refusal", REFUSAL_IS_ANSWER)
        if self.tool_calls:
            raise InvalidRequestError(
                f"{path}.tool_calls", "are only allowed in a message of the assistant."
            )
        if self.content is None:
            raise InvalidRequestError(
                f"{path}.content", "must be a text or at least one text part."
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if isinstance(part, RefusalPart):
                    raise InvalidRequestError(f"{path}.content.{index}.type", REFUSAL_IS_ANSWER)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Reasoning(Struct):
    """OpenRouter's form of reasoning_effort."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # from the answer
    max_tokens: Unsupported = None
