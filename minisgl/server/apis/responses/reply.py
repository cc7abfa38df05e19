"""Answers to POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, Raw
from msgspec.structs import replace

from minisgl.errors import foreseen
from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.blocks import (
    Block,
    BlockChoice,
    BlockEnd,
    BlockEvent,
    BlockStart,
    BlockText,
)
from minisgl.server.answers.content_scores import ScoredToken, scored_token
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.reply import Reply
from minisgl.server.apis.responses.answer_types import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCallItem,
    CustomToolEcho,
    FunctionCallItem,
    FunctionToolEcho,
    IncompleteDetails,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    NamespaceEcho,
    OutputItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningEcho,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseInputDetails,
    ResponseOutputDetails,
    ResponseUsage,
    StreamEvent,
    TextEcho,
)
from minisgl.server.apis.responses.ids import item_id
from minisgl.server.apis.responses.request_types import (
    NAMESPACE,
    FlatTool,
    ResponsesRequest,
    ResponseTool,
)
from minisgl.server.http.encoding import encode, typed_event
from minisgl.server.http.error_bodies import MAX_ERROR_CHARS
from minisgl.server.requests.constraint_types import TextFormat
from minisgl.server.served_engine import ServedTokenizer

ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


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
    """The one answer of a response. Its blocks are items."""

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: ServedTokenizer | None,
        spaced: Mapping[str, tuple[str, str]],
        response_id: str,
    ) -> None:
        """spaced: namespace and name of the tools in namespaces, by the names for the model."""
        super().__init__(job, tokenizer)
        self._response_id = response_id
        self._tokenizer = tokenizer
        self._spaced = spaced
        self._num_events = 0
        self._delta: _DeltaEvent | None = None  # of the open item

    def numbered(self, event: StreamEvent) -> bytes:
        """The next event of the stream."""
        event.sequence_number = self._num_events
        self._num_events += 1
        return typed_event(event)

    @property
    def items(self) -> list[OutputItem]:
        """The items of the answer, as far as it has come."""
        return [self._item(block, block.text, self._status(block)) for block in self.blocks]

    @property
    def usage(self) -> ResponseUsage:
        last = self.last
        num_input, num_output = len(self.job.prompt_token_ids), last.num_output_tokens
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=ResponseInputDetails(last.num_cached_tokens, 0),
            output_tokens=num_output,
            output_tokens_details=ResponseOutputDetails(last.num_reasoning_tokens),
            total_tokens=num_input + num_output,
        )

    def _more(self, block: Block, text: str) -> bytes:
        assert self._delta is not None
        number, self._num_events = self._num_events, self._num_events + 1
        return self._delta.encoded(text, number)

    def _event(self, found: BlockEvent) -> bytes:
        match found:
            case BlockText(block, text, []):
                return self._more(block, text)
            case BlockText(block, text, scored):
                delta = OutputTextDelta(self._id(block), block.index, text, self._shown(scored))
                return self.numbered(delta)
            case BlockStart(block):
                return b"".join(map(self.numbered, self._first_of(block)))
            case BlockEnd(block):
                return b"".join(map(self.numbered, self._last_of(block)))

    def _first_of(self, block: Block) -> Iterator[StreamEvent]:
        """The events before the first delta of an item."""
        id, index = self._id(block), block.index
        item = self._item(block, "", "in_progress")
        empty: StreamEvent
        match item:
            case MessageItem(content=[part]) | ReasoningItem(content=[part]):
                item.content = []
                yield ItemAdded(index, item)
                yield PartAdded(id, index, part)
                kind = OutputTextDelta if isinstance(item, MessageItem) else ReasoningTextDelta
                empty = kind(id, index, "")
            case _:
                yield ItemAdded(index, item)
                kind_of_call = InputDelta if isinstance(item, CustomCallItem) else ArgumentsDelta
                empty = kind_of_call(id, index, "")
        self._delta = _DeltaEvent.of(empty)

    def _last_of(self, block: Block) -> Iterator[StreamEvent]:
        """The events after the last delta of an item."""
        id, index = self._id(block), block.index
        item = self._item(block, block.text, self._status(block))
        match item:
            case MessageItem(content=[text]):
                yield OutputTextDone(id, index, text.text, text.logprobs)
                yield PartDone(id, index, text)
            case ReasoningItem(content=[thought]):
                yield ReasoningTextDone(id, index, thought.text)
                yield PartDone(id, index, thought)
            case FunctionCallItem(name=name, arguments=arguments):
                yield ArgumentsDone(id, index, name, arguments)
            case CustomCallItem(input=input):
                yield InputDone(id, index, input)
        yield ItemDone(index, item)

    def _item(self, block: Block, text: str, status: ItemStatus) -> OutputItem:
        id, call = self._id(block), block.call
        if call is not None:
            kind = CustomCallItem if call.custom else FunctionCallItem
            namespace, name = self._spaced.get(call.name, (UNSET, call.name))
            return kind(id, call.id, name, text, status, namespace)
        if block.kind == "reasoning":
            return ReasoningItem(id, [], [ReasoningText(text)], status)
        part = OutputText(text, [], self._shown(block.scored))
        return MessageItem(id, "assistant", status, [part])

    def _id(self, block: Block) -> str:
        prefix = "ctc" if block.call and block.call.custom else ID_PREFIXES[block.kind]
        return item_id(prefix, self._response_id, block.index)

    def _status(self, block: Block) -> ItemStatus:
        if block is self._open:
            return "in_progress"
        return "incomplete" if block.cut else "completed"

    def _shown(self, scored: Sequence[PlacedToken]) -> list[ScoredToken]:
        as_id = self.job.tokens_as_ids
        return [scored_token(token, self._tokenizer, as_id=as_id) for token in scored]


class ResponsesReply(Reply):
    """The answer to a request of the Responses API."""

    prompt_field = "input"

    def __init__(
        self,
        job: GenerationJob,
        body: ResponsesRequest,
        *,
        model: str,
        tokenizer: ServedTokenizer | None,
        spaced: Mapping[str, tuple[str, str]],
        id: str,
        response_id: str,
        keep: Callable[[Response], None] | None,
    ) -> None:
        """`id` must differ from that of every other reply. It may be logged; response_id, which
        the client gets, may not. spaced: see ResponseChoice. keep: stores the answer."""
        super().__init__(f"resp_{id}")
        self._choice = ResponseChoice(job, tokenizer, spaced, response_id)
        self.choices: Sequence[ResponseChoice] = [self._choice]
        self._keep = keep
        self._begun = _begun(response_id, job, body, model, is_stored=keep is not None)

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
        """The whole response; it is stored before the client can know that it has ended."""
        choice = self._choice
        cut = choice.check_finished() == "length"
        response = replace(
            self._begun,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=choice.items,
            usage=choice.usage,
        )
        if self._keep is not None:
            self._keep(response)
        return response


def _begun(
    id: str, job: GenerationJob, body: ResponsesRequest, model: str, *, is_stored: bool
) -> Response:
    """The response before its answer."""
    format = body.text.format if body.text else None
    tools = [] if body.tool_choice == "none" else body.tools or []  # that the model sees
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
        previous_response_id=body.previous_response_id,
        store=is_stored,
        truncation=body.truncation or "disabled",
        reasoning=ReasoningEcho(body.reasoning.effort if body.reasoning else None, None),
        temperature=job.params.temperature,
        text=TextEcho(format or TextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=[echo for tool in tools if (echo := _echo(tool)) is not None],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.params.top_p,
    )


def _echo(tool: ResponseTool) -> FunctionToolEcho | CustomToolEcho | NamespaceEcho | None:
    """A tool as the response shows it; None for one that is left out."""
    if tool.type != NAMESPACE:
        return _echo_of_one(tool)
    inner = [echo for each in tool.tools or () if (echo := _echo_of_one(each)) is not None]
    return NamespaceEcho(cast(str, tool.name), tool.description or "", inner)


def _echo_of_one(tool: FlatTool) -> FunctionToolEcho | CustomToolEcho | None:
    name, description = cast(str, tool.name), tool.description or UNSET
    if tool.type == "function":
        parameters: Raw | None = tool.parameters
        return FunctionToolEcho(name, parameters, tool.strict, description)
    if tool.type == "custom":
        return CustomToolEcho(name, description, tool.format or UNSET)
    return None
