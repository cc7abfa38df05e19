"""Reads the messages of a request to the Messages API as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from minisgl.errors import InvalidRequestError
from minisgl.server.apis.messages import request_types as asked
from minisgl.server.requests.chat_messages import MAX_PARTS, CalledFunction, ToolCall
from minisgl.server.requests.translation import GAP, Piece, PlacedImage, Turn, joined

# Claude Code begins its instructions with such a line. Parts of it may differ from request to
# request, and what follows would not be found in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"
FAILED = "Error: "  # before the result of a tool that failed


def turns_of(body: asked.Prompt, *, system_anywhere: bool) -> list[Turn]:
    """The conversation of `body`; raises InvalidRequestError.

    system_anywhere: whether the template takes late instructions; otherwise the user gives them.
    """
    reader = _Reader(body.system or "", system_anywhere)
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages.{index}")
    reader.end_turn()
    turns = reader.turns
    if turns and turns[-1].is_open and turns[-1].is_empty:
        turns.pop()  # the answer would continue nothing
    if all(turn.role == "system" for turn in turns):
        raise InvalidRequestError("messages", "must have a message of the user.")
    return turns


class _Reader:
    """Makes one message of what one side says, however many it sent, as Anthropic does."""

    def __init__(self, system: str | Sequence[asked.TextBlock], system_anywhere: bool) -> None:
        self.turns: list[Turn] = []
        self._system_anywhere = system_anywhere
        self._num_blocks = 0
        self._turn = Turn("system", "system")
        for block in [asked.TextBlock(system)] if isinstance(system, str) else system:
            self._instruct(block.text)

    def read(self, message: asked.InputMessage, path: str) -> None:
        role = message.role
        begun = self.turns or self._turn.role != "system"
        if role == "system" and begun and not self._system_anywhere:
            role = "user"
        if role != self._turn.role:
            self.end_turn()
            self._turn = Turn(role, path, gap="" if role == "assistant" else GAP)
        content, path = message.content, f"{path}.content"
        if isinstance(content, str):
            content = [asked.TextBlock(content)]
        elif not content and role != "assistant":
            raise InvalidRequestError(path, "must not be empty.")
        self._count(len(content))
        for index, block in enumerate(content):
            self._read_block(block, message.role, f"{path}.{index}")

    def _read_block(self, block: asked.ContentBlock, role: str, path: str) -> None:
        turn = self._turn
        match block:
            case asked.ToolUseBlock():
                _check_said_by("assistant", role, path)
                turn.calls.append((path, ToolCall(block.id, function=_called(block))))
            case asked.ThinkingBlock(thinking):
                _check_said_by("assistant", role, path)
                turn.thoughts.append(thinking)
            case asked.ToolResultBlock():
                _check_said_by("user", role, path)
                # A template expects results behind their calls, before what the user has to say.
                result = self._result(block, path)
                self.turns.append(
                    Turn(
                        "tool",
                        path,
                        result,
                        tool_call_id=block.tool_use_id,
                        id_field="tool_use_id",
                    )
                )
            case _:
                for piece in self._pieces(block, path):
                    if role == "system" and isinstance(piece, str):
                        self._instruct(piece)
                    else:
                        turn.pieces.append(piece)

    def _instruct(self, text: str) -> None:
        if text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2].lstrip("\n")
        if text:
            self._turn.pieces.append(text)

    def _count(self, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        if self._num_blocks > MAX_PARTS:
            raise InvalidRequestError("messages", f"must have at most {MAX_PARTS} blocks in all.")

    def end_turn(self) -> None:
        """Add what one side has said to the conversation."""
        if self._turn.pieces or self._turn.role == "assistant":
            self.turns.append(self._turn)

    def _result(self, result: asked.ToolResultBlock, path: str) -> list[Piece]:
        content = self._joined(result.content or "", f"{path}.content")
        return joined([FAILED, *content], "") if result.is_error else content

    def _joined(self, content: str | Sequence[asked.ResultPart], path: str) -> list[Piece]:
        if isinstance(content, str):
            return [content]
        self._count(len(content))
        pieces = [
            piece
            for index, block in enumerate(content)
            for piece in self._pieces(block, f"{path}.{index}")
        ]
        return joined(filter(None, pieces), GAP)

    def _pieces(self, block: asked.ContentBlock | asked.ResultPart, path: str) -> list[Piece]:
        """What a block says; nothing for one that concerns Anthropic's servers alone."""
        match block:
            case asked.TextBlock(text):
                return [text]
            case asked.CompactionBlock(content):
                return [content] if content else []
            case asked.SearchResultBlock(content, title, source):
                texts = [title, source, *(part.text for part in content)]
                return ["\n".join(filter(None, texts))]
            case asked.ToolReferenceBlock(tool_name):
                return [tool_name]
            case asked.ImageBlock():
                return [PlacedImage.at(path, "source", block.url)]
            case asked.DocumentBlock(asked.TextSource(text), title, context):
                return joined(filter(None, [title, context, text]), "\n")
            case asked.DocumentBlock(asked.PartsSource(content), title, context):
                pieces = self._joined(content, f"{path}.source.content")
                return joined(filter(None, [title, context, *pieces]), "\n")
        return []


def _called(call: asked.ToolUseBlock) -> CalledFunction:
    """The call as a chat has it, with a text for an input that is no object."""
    data = bytes(call.input)
    if data.startswith(b"{"):
        return CalledFunction(call.name, msgspec.json.decode(data, type=dict[str, Raw]))
    is_text = data.startswith(b'"')
    return CalledFunction(call.name, msgspec.json.decode(data) if is_text else data.decode())


def _check_said_by(side: str, role: str, path: str) -> None:
    if role != side:
        raise InvalidRequestError(path, f"is only allowed in a message of the {side}.")
