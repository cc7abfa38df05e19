"""Answers to POST /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, Raw
from msgspec.structs import replace

from minisgl.errors import foreseen
from minisgl.server.answer_blocks import Block, BlockChoice, BlockEnd, BlockEvent, BlockStart
from minisgl.server.constraints import TextFormat
from minisgl.server.encoding import MAX_ERROR_CHARS, encode, typed_event
from minisgl.server.jobs import GenerationJob
from minisgl.server.replies import Reply
from minisgl.server.responses_api.protocol import ResponsesRequest, ResponseTool
from minisgl.server.responses_api.schemas import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCallItem,
    CustomToolEcho,
    FunctionCallItem,
    FunctionToolEcho,
    IncompleteDetails,
    InputDelta,
    InputDone,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningEcho,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    StreamEvent,
    TextDelta,
    TextDone,
    TextEcho,
)

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}  # of the ids of items


@dataclass(frozen=True, slots=True)
class _DeltaEvent:
    """The frequent event of an item, encoded once and cut where its text and its number are."""

    head: bytes
    middle: bytes
    tail: bytes

    @classmethod
    def of(cls, empty: StreamEvent) -> _DeltaEvent:
        """`empty` has no text, and the number 0."""
        head, _, rest = typed_event(empty).partition(b'""')
        middle, _, tail = rest.rpartition(b"0")
        return cls(head, middle, tail)

    def encoded(self, text: str, number: int) -> bytes:
        return b"%b%b%b%d%b" % (self.head, encode(text), self.middle, number, self.tail)


class ResponseChoice(BlockChoice):
    """The one answer of a response."""

    def __init__(self, job: GenerationJob) -> None:
        super().__init__(job)
        self._num_events = 0
        self._ids: list[str] = []  # of the items
        self._delta: _DeltaEvent | None = None  # of the open item

    def numbered(self, event: StreamEvent) -> bytes:
        """The next event of the stream."""
        event.sequence_number = self._num_events
        self._num_events += 1
        return typed_event(event)

    @property
    def items(self) -> list[OutputItem]:
        """The items of the answer, with the one that is being written."""
        return [
            _item(block, self._id(block), _status(block, is_open=block is self._open))
            for block in self.blocks
        ]

    @property
    def usage(self) -> ResponseUsage:
        num_input, num_output = len(self.job.prompt_token_ids), self.num_output_tokens
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(self.num_cached_tokens, 0),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(self.num_reasoning_tokens),
            total_tokens=num_input + num_output,
        )

    def _event(self, found: BlockEvent) -> bytes:
        match found:
            case BlockStart(block):
                return self._start(block)
            case BlockEnd(block):
                return self._end_of(block)
            case _:
                assert self._delta is not None
                number, self._num_events = self._num_events, self._num_events + 1
                return self._delta.encoded(found.text, number)

    def _start(self, block: Block) -> bytes:
        id, index = self._id(block), block.index
        self._delta = _DeltaEvent.of(_empty_delta(block, id))
        item = _item(block, id, "in_progress")
        if isinstance(item, MessageItem | ReasoningItem):
            [part] = item.content
            item.content = []
            added = self.numbered(ItemAdded(index, item))
            return added + self.numbered(PartAdded(id, index, part))
        return self.numbered(ItemAdded(index, item))

    def _end_of(self, block: Block) -> bytes:
        id, index = self._id(block), block.index
        item = _item(block, id, _status(block))
        events: list[StreamEvent] = []
        match item:
            case MessageItem(content=[part]):
                events += [
                    TextDone(
                        item_id=id, output_index=index, text=part.text, logprobs=part.logprobs
                    ),
                    PartDone(item_id=id, output_index=index, part=part),
                ]
            case ReasoningItem(content=[part]):
                events += [
                    ReasoningDone(item_id=id, output_index=index, text=part.text),
                    PartDone(item_id=id, output_index=index, part=part),
                ]
            case FunctionCallItem(name=name, arguments=arguments):
                events.append(
                    ArgumentsDone(item_id=id, output_index=index, name=name, arguments=arguments)
                )
            case CustomCallItem(input=input):
                events.append(InputDone(item_id=id, output_index=index, input=input))
        events.append(ItemDone(index, item))
        return b"".join(map(self.numbered, events))

    def _id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            next = self.blocks[len(self._ids)]
            prefix = "ctc" if next.call and next.call.custom else PREFIXES[next.kind]
            self._ids.append(f"{prefix}_{uuid.uuid4().hex}")
        return self._ids[block.index]


def _status(block: Block, *, is_open: bool = False) -> ItemStatus:
    return "in_progress" if is_open else "incomplete" if block.cut else "completed"


def _item(block: Block, id: str, status: ItemStatus) -> OutputItem:
    text, call = block.text, block.call
    if call is None:
        if block.kind == "reasoning":
            return ReasoningItem(id, [], [ReasoningText(text)], status)
        return MessageItem(id, "assistant", status, [OutputText(text, [], [])])
    kind = CustomCallItem if call.custom else FunctionCallItem
    return kind(id, call.id, call.name, text, status)


def _empty_delta(block: Block, id: str) -> StreamEvent:
    index = block.index
    if block.call is not None:
        kind = InputDelta if block.call.custom else ArgumentsDelta
        return kind(id, index, "")
    if block.kind == "reasoning":
        return ReasoningDelta(id, index, "")
    return TextDelta(id, index, "", [])


class ResponsesReply(Reply):
    """The answer to a request of the Responses API."""

    prompt_field = "input"

    def __init__(self, job: GenerationJob, body: ResponsesRequest, *, model: str, id: str) -> None:
        """`id` must differ from that of every other reply."""
        super().__init__(f"resp_{id}")
        self._choice = ResponseChoice(job)
        self.choices: Sequence[ResponseChoice] = [self._choice]
        self._begun = _begun(self.id, job, body, model)

    def first_events(self) -> bytes:
        created = self._choice.numbered(ResponseCreated(self._begun))
        return created + self._choice.numbered(ResponseInProgress(self._begun))

    def last_events(self) -> bytes:
        response = self._ended()
        kind = ResponseIncomplete if response.incomplete_details else ResponseCompleted
        return self._choice.numbered(kind(response))

    def failure_events(self, error: Exception) -> bytes:
        message = str(foreseen(error))[:MAX_ERROR_CHARS]
        response = replace(
            self._begun,
            status="failed",
            error=ResponseFailure("server_error", message),
            output=self._choice.items,
            usage=self._choice.usage,
        )
        return self._choice.numbered(ResponseFailed(response))

    def whole(self) -> bytes:
        return encode(self._ended())

    def _ended(self) -> Response:
        choice = self._choice
        cut = choice.check_finished() == "length"
        return replace(
            self._begun,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=choice.items,
            usage=choice.usage,
        )


def _begun(id: str, job: GenerationJob, body: ResponsesRequest, model: str) -> Response:
    """The response before its answer."""
    format = body.text.format if body.text else None
    return Response(
        id=id,
        object="response",
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningEcho(body.reasoning.effort if body.reasoning else None, None),
        temperature=job.params.temperature,
        text=TextEcho(format or TextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=[echo for tool in body.tools or () if (echo := _echo(tool)) is not None],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.params.top_p,
    )


def _echo(tool: ResponseTool) -> FunctionToolEcho | CustomToolEcho | None:
    """A tool as the response shows it; None for one that is left out."""
    name, description = cast(str, tool.name), tool.description or UNSET
    if tool.type == "function":
        parameters: Raw | None = tool.parameters
        return FunctionToolEcho(name, parameters, tool.strict, description)
    if tool.type == "custom":
        return CustomToolEcho(name, description, tool.format or UNSET)
    return None
