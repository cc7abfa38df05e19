"""Reads the messages of a request to the Messages API as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Raw

from minisgl.errors import InvalidRequestError
from minisgl.server.messages import (
    MAX_PARTS,
    CalledFunction,
    Images,
    Message,
    ToolCall,
    image_text,
)
from minisgl.server.messages_api.protocol import (
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    PartsSource,
    Prompt,
    ResultPart,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

# Claude Code begins its instructions with such a line. Parts of it may differ from request to
# request, and what follows would not be found in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"
GAP = "\n\n"  # between texts that come as blocks of their own
FAILED = "Error: "  # before the result of a tool that failed


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, and the fields of the request that they come from."""

    messages: list[Message]
    fields: dict[str, str]  # by the path of the chat's field
    is_open: bool  # the answer continues the last message, which is the assistant's


def conversation_of(body: Prompt, *, system_anywhere: bool, images: Images) -> Conversation:
    """The conversation of `body`; raises InvalidRequestError.

    system_anywhere: whether the template takes late instructions; otherwise the user gives them.
    images: what becomes of them.
    """
    reader = _Reader(body.system or "", system_anywhere, images)
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages.{index}")
    reader.end_turn()
    messages = reader.messages
    is_open = False
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        is_open = bool(messages[-1].text.strip())
        if not is_open:  # it goes on with nothing
            messages.pop()
    if all(message.role == "system" for message in messages):
        raise InvalidRequestError("messages", "must have a message of the user.")
    return Conversation(messages, reader.fields, is_open)


@dataclass(slots=True)
class _Turn:
    """What one side says before another one does."""

    role: Literal["system", "user", "assistant"]
    path: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: dict[str, ToolUseBlock] = field(default_factory=dict)  # by their paths, as the results
    results: dict[str, ToolResultBlock] = field(default_factory=dict)


class _Reader:
    """Makes one message of what one side says, however many it sent, as Anthropic does."""

    def __init__(
        self, system: str | Sequence[TextBlock], system_anywhere: bool, images: Images
    ) -> None:
        self.messages: list[Message] = []
        self.fields: dict[str, str] = {}
        self._system_anywhere = system_anywhere
        self._images = images
        self._num_blocks = 0
        self._turn = _Turn("system", "system")
        for block in [TextBlock(system)] if isinstance(system, str) else system:
            self._instruct(block.text)

    def read(self, message: InputMessage, path: str) -> None:
        role = message.role
        begun = self.messages or self._turn.role != "system"
        if role == "system" and begun and not self._system_anywhere:
            role = "user"
        if role != self._turn.role:
            self.end_turn()
            self._turn = _Turn(role, path)
        content, path = message.content, f"{path}.content"
        if isinstance(content, str):
            content = [TextBlock(content)]
        elif not content and role != "assistant":
            raise InvalidRequestError(path, "must not be empty.")
        self._count(len(content))
        for index, block in enumerate(content):
            self._read_block(block, message.role, f"{path}.{index}")

    def _read_block(self, block: ContentBlock, role: str, path: str) -> None:
        turn = self._turn
        match block:
            case ToolUseBlock():
                _check_said_by("assistant", role, path)
                turn.calls[path] = block
            case ThinkingBlock(thinking):
                _check_said_by("assistant", role, path)
                turn.thoughts.append(thinking)
            case ToolResultBlock():
                _check_said_by("user", role, path)
                turn.results[path] = block
            case _:
                text = self._text(block, path)
                if role == "system":
                    self._instruct(text or "")
                elif text is not None:
                    turn.texts.append(text)

    def _instruct(self, text: str) -> None:
        if text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2].lstrip("\n")
        if text:
            self._turn.texts.append(text)

    def _count(self, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        if self._num_blocks > MAX_PARTS:
            raise InvalidRequestError("messages", f"must have at most {MAX_PARTS} blocks in all.")

    def end_turn(self) -> None:
        """Add what has been said to the messages."""
        turn = self._turn
        if turn.role == "assistant":
            self._add_assistant(turn)
            return
        # A template expects results behind their calls, before what the user has to say.
        for path, result in turn.results.items():
            number = len(self.messages)
            self.fields |= {f"messages.{number}": path, f"messages.{number}.role": path}
            text = self._result(result, path)
            self.messages.append(Message("tool", text, tool_call_id=result.tool_use_id))
        if turn.texts:
            self.fields[f"messages.{len(self.messages)}"] = turn.path
            self.messages.append(Message(turn.role, GAP.join(turn.texts)))

    def _add_assistant(self, turn: _Turn) -> None:
        path = f"messages.{len(self.messages)}"
        self.fields[path] = turn.path
        calls = []
        for index, (place, call) in enumerate(turn.calls.items()):
            self.fields.setdefault(f"{path}.tool_calls", place)
            self.fields[f"{path}.tool_calls.{index}"] = place
            calls.append(ToolCall(call.id, function=_called(call)))
        self.messages.append(
            Message(
                "assistant",
                "".join(turn.texts),
                tool_calls=calls,
                reasoning_content=GAP.join(turn.thoughts),
            )
        )

    def _result(self, result: ToolResultBlock, path: str) -> str:
        content = self._joined(result.content or "", f"{path}.content")
        return FAILED + content if result.is_error else content

    def _joined(self, content: str | Sequence[ResultPart], path: str) -> str:
        if isinstance(content, str):
            return content
        self._count(len(content))
        texts = (self._text(block, f"{path}.{index}") for index, block in enumerate(content))
        return GAP.join(filter(None, texts))

    def _text(self, block: ContentBlock | ResultPart, path: str) -> str | None:
        """The text of a block; None for one that concerns Anthropic's servers alone."""
        match block:
            case TextBlock(text):
                return text
            case SearchResultBlock(content, title, source):
                return "\n".join(filter(None, [title, source, *(part.text for part in content)]))
            case ToolReferenceBlock(tool_name):
                return tool_name
            case ImageBlock():
                return image_text(self._images, path, "image")
            case DocumentBlock(TextSource(text), title, context):
                return "\n".join(filter(None, [title, context, text]))
            case DocumentBlock(PartsSource(content), title, context):
                text = self._joined(content, f"{path}.source.content")
                return "\n".join(filter(None, [title, context, text]))
        return None


def _called(call: ToolUseBlock) -> CalledFunction:
    """The call as a chat has it, with a text for an input that is no object."""
    data = bytes(call.input)
    if data.startswith(b"{"):
        return CalledFunction(call.name, msgspec.json.decode(data, type=dict[str, Raw]))
    is_text = data.startswith(b'"')
    return CalledFunction(call.name, msgspec.json.decode(data) if is_text else data.decode())


def _check_said_by(side: str, role: str, path: str) -> None:
    if role != side:
        raise InvalidRequestError(path, f"is only allowed in a message of the {side}.")
