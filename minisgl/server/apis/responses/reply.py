"""Answers to POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from msgspec import UNSET, Raw
from msgspec.structs import replace

from minisgl.errors import foreseen
from minisgl.request import OutputDelta
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
from minisgl.server.apis.responses import answer_types as answers
from minisgl.server.apis.responses.conversation import NAMES
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
from minisgl.text.tokenizer import Tokenizer

# The events that go on with items, made of an id, an index and a text.
DELTAS: Mapping[type, Callable[[str, int, str], answers.StreamEvent]] = {
    answers.MessageItem: answers.OutputTextDelta,
    answers.ReasoningItem: answers.ReasoningTextDelta,
    answers.FunctionCallItem: answers.ArgumentsDelta,
    answers.CustomCallItem: answers.InputDelta,
}
ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True, slots=True)
class _DeltaEvent:
    """The frequent event of an item, encoded once and cut where its text and its number are."""

    head: bytes
    middle: bytes
    tail: bytes

    @classmethod
    def of(cls, empty: answers.StreamEvent) -> _DeltaEvent:
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
        tokenizer: Tokenizer | None,
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
        self.opening: answers.StreamEvent | None = None  # comes before the first item

    def numbered(self, event: answers.StreamEvent) -> bytes:
        """The next event of the stream."""
        event.sequence_number = self._num_events
        self._num_events += 1
        return typed_event(event)

    @property
    def has_begun(self) -> bool:
        """Whether anything has been generated."""
        return self._started

    @property
    def items(self) -> list[answers.OutputItem]:
        """The items of the answer, as far as it has come."""
        return [self._item(block, block.text, self._status(block)) for block in self.blocks]

    @property
    def usage(self) -> answers.ResponseUsage:
        last = self.last
        num_input, num_output = len(self.job.prompt_token_ids), last.num_output_tokens
        return answers.ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=answers.ResponseInputDetails(last.num_cached_tokens, 0),
            output_tokens=num_output,
            output_tokens_details=answers.ResponseOutputDetails(last.num_reasoning_tokens),
            total_tokens=num_input + num_output,
        )

    def _opening(self, delta: OutputDelta) -> bytes:
        return b"" if self.opening is None else self.numbered(self.opening)

    def _more(self, block: Block, text: str) -> bytes:
        assert self._delta is not None
        number, self._num_events = self._num_events, self._num_events + 1
        return self._delta.encoded(text, number)

    def _event(self, found: BlockEvent) -> bytes:
        match found:
            case BlockText(block, text, []):
                return self._more(block, text)
            case BlockText(block, text, scored):
                delta = answers.OutputTextDelta(
                    self._id(block), block.index, text, self._shown(scored)
                )
                return self.numbered(delta)
            case BlockStart(block):
                return b"".join(map(self.numbered, self._first_of(block)))
            case BlockEnd(block):
                return b"".join(map(self.numbered, self._last_of(block)))

    def _first_of(self, block: Block) -> Iterator[answers.StreamEvent]:
        """The events before the first delta of an item."""
        id, index = self._id(block), block.index
        item = self._item(block, "", "in_progress")
        match item:
            case answers.MessageItem(content=[part]) | answers.ReasoningItem(content=[part]):
                item.content = []
                yield answers.ItemAdded(index, item)
                yield answers.PartAdded(id, index, part)
            case _:
                yield answers.ItemAdded(index, item)
        self._delta = _DeltaEvent.of(DELTAS[type(item)](id, index, ""))

    def _last_of(self, block: Block) -> Iterator[answers.StreamEvent]:
        """The events after the last delta of an item."""
        id, index = self._id(block), block.index
        item = self._item(block, block.text, self._status(block))
        match item:
            case answers.MessageItem(content=[text]):
                yield answers.OutputTextDone(id, index, text.text, text.logprobs)
                yield answers.PartDone(id, index, text)
            case answers.ReasoningItem(content=[thought]):
                yield answers.ReasoningTextDone(id, index, thought.text)
                yield answers.PartDone(id, index, thought)
            case answers.FunctionCallItem(name=name, arguments=arguments):
                yield answers.ArgumentsDone(id, index, name, arguments)
            case answers.CustomCallItem(input=input):
                yield answers.InputDone(id, index, input)
        yield answers.ItemDone(index, item)

    def _item(self, block: Block, text: str, status: answers.ItemStatus) -> answers.OutputItem:
        id, call = self._id(block), block.call
        if call is not None:
            kind = answers.CustomCallItem if call.custom else answers.FunctionCallItem
            namespace, name = self._spaced.get(call.name, (UNSET, call.name))
            return kind(id, call.id, name, text, status, namespace)
        if block.kind == "reasoning":
            return answers.ReasoningItem(id, [], [answers.ReasoningText(text)], status)
        part = answers.OutputText(text, [], self._shown(block.scored))
        return answers.MessageItem(id, "assistant", status, [part])

    def _id(self, block: Block) -> str:
        prefix = "ctc" if block.call and block.call.custom else ID_PREFIXES[block.kind]
        return item_id(prefix, self._response_id, block.index)

    def _status(self, block: Block) -> answers.ItemStatus:
        if block is self._open:
            return "in_progress"
        return "incomplete" if block.cut else "completed"

    def _shown(self, scored: Sequence[PlacedToken]) -> list[ScoredToken]:
        as_id = self.job.tokens_as_ids
        return [scored_token(token, self._tokenizer, as_id=as_id) for token in scored]


class ResponsesReply(Reply):
    """The answer to a request of the Responses API."""

    prompt_field, limit_field = NAMES.prompt_field, NAMES.limit_field

    def __init__(
        self,
        job: GenerationJob,
        body: ResponsesRequest,
        *,
        model: str,
        tokenizer: Tokenizer | None,
        spaced: Mapping[str, tuple[str, str]],
        id: str,
        response_id: str,
        keep: Callable[[answers.Response], None] | None,
    ) -> None:
        """`id` must differ from that of every other reply. It may be logged; response_id, which
        the client gets, may not. spaced: see ResponseChoice. keep: stores the answer."""
        super().__init__(f"resp_{id}")
        self.response_id = response_id
        self._choice = ResponseChoice(job, tokenizer, spaced, response_id)
        self.choices: Sequence[ResponseChoice] = [self._choice]
        self._keep = None if body.background else keep
        self._begun = _begun(response_id, job, body, model, is_stored=keep is not None)
        self._end: answers.Response | None = None

    def so_far(self) -> answers.Response:
        """The response in the background, as far as it has come."""
        if self._end is not None:
            return self._end
        status = "in_progress" if self._choice.has_begun else "queued"
        return replace(self._begun, status=status, output=self._choice.items)

    def ended(self) -> answers.Response:
        """The response in the background, after its events: one without an end was cancelled."""
        if self._end is None:
            self._choice.cut_open()
            self._end = self._stopped("cancelled")
        return self._end

    def first_events(self) -> bytes:
        choice, begun = self._choice, self._begun
        created = choice.numbered(answers.ResponseCreated(begun))
        in_progress = answers.ResponseInProgress(replace(begun, status="in_progress"))
        if not begun.background:
            return created + choice.numbered(in_progress)
        choice.opening = in_progress
        return created + choice.numbered(answers.ResponseQueued(begun))

    def last_events(self) -> bytes:
        response = self._ended()
        kind = (
            answers.ResponseIncomplete if response.incomplete_details else answers.ResponseCompleted
        )
        return self._choice.numbered(kind(response))

    def failure_events(self, error: Exception) -> bytes:
        message = str(foreseen(error))[:MAX_ERROR_CHARS]
        failure = answers.ResponseFailure("server_error", message)
        self._end = self._stopped("failed", failure)
        return self._choice.numbered(answers.ResponseFailed(self._end))

    def whole(self) -> bytes:
        return encode(self._ended())

    def _stopped(
        self,
        status: Literal["failed", "cancelled"],
        error: answers.ResponseFailure | None = None,
    ) -> answers.Response:
        choice = self._choice
        return replace(
            self._begun, status=status, error=error, output=choice.items, usage=choice.usage
        )

    def _ended(self) -> answers.Response:
        """The whole response; it is stored before the client can know that it has ended."""
        choice = self._choice
        cut = choice.check_finished() == "length"
        response = replace(
            self._begun,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=answers.IncompleteDetails("max_output_tokens") if cut else None,
            output=choice.items,
            usage=choice.usage,
        )
        self._end = response
        if self._keep is not None:
            self._keep(response)
        return response


def _begun(
    id: str, job: GenerationJob, body: ResponsesRequest, model: str, *, is_stored: bool
) -> answers.Response:
    """The response before its answer."""
    format = body.text.format if body.text else None
    tools = [] if body.tool_choice == "none" else body.tools or []  # that the model sees
    return answers.Response(
        id=id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        model=model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        background=bool(body.background),
        store=is_stored,
        truncation=body.truncation or "disabled",
        reasoning=answers.ReasoningEcho(body.reasoning.effort if body.reasoning else None, None),
        temperature=job.params.temperature,
        text=answers.TextEcho(format or TextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=[echo for tool in tools if (echo := _echo(tool)) is not None],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.params.top_p,
    )


def _echo(
    tool: ResponseTool,
) -> answers.FunctionToolEcho | answers.CustomToolEcho | answers.NamespaceEcho | None:
    """A tool as the response shows it; None for one that is left out."""
    if tool.type != NAMESPACE:
        return _echo_of_one(tool)
    inner = [echo for each in tool.tools or () if (echo := _echo_of_one(each)) is not None]
    return answers.NamespaceEcho(cast(str, tool.name), tool.description or "", inner)


def _echo_of_one(tool: FlatTool) -> answers.FunctionToolEcho | answers.CustomToolEcho | None:
    name, description = cast(str, tool.name), tool.description or UNSET
    if tool.type == "function":
        parameters: Raw | None = tool.parameters
        return answers.FunctionToolEcho(name, parameters, tool.strict, description)
    if tool.type == "custom":
        return answers.CustomToolEcho(name, description, tool.format or UNSET)
    return None
