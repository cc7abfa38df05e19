"""The answers of the Responses API as types: a response, its items, and the events of a stream."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType

from minisgl.server.answers.content_scores import ScoredToken
from minisgl.server.apis.responses.request_types import (
    FlatGrammar,
    FlatJsonSchema,
    ResponseToolChoice,
)
from minisgl.server.requests.constraint_types import JsonObjectFormat, TextFormat
from minisgl.server.requests.tools import TextInput

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


# -- items -----------------------------------------------------------------------------------------


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None]
    logprobs: list[ScoredToken]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[None]
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # as the model wrote them: JSON, if the answer was not cut
    status: ItemStatus
    namespace: str | UnsetType = UNSET  # of the tool, if it is in one


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


# -- the response ----------------------------------------------------------------------------------


class FunctionToolEcho(Struct, tag_field="type", tag="function"):
    name: str
    parameters: Raw | None
    strict: bool | None
    description: str | UnsetType = UNSET


class CustomToolEcho(Struct, tag_field="type", tag="custom"):
    name: str
    description: str | UnsetType = UNSET
    format: TextInput | FlatGrammar | UnsetType = UNSET


class NamespaceEcho(Struct, tag_field="type", tag="namespace"):
    name: str
    description: str
    tools: list[FunctionToolEcho | CustomToolEcho]


class TextEcho(Struct):
    format: TextFormat | JsonObjectFormat | FlatJsonSchema


class ReasoningEcho(Struct):
    effort: str | None
    summary: None


class ResponseInputDetails(Struct):
    cached_tokens: int  # found in the prefix cache
    cache_write_tokens: int


class ResponseOutputDetails(Struct):
    reasoning_tokens: int  # with their markers


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseFailure(Struct):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Response(Struct, tag_field="object", tag="response", kw_only=True):
    id: str
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    background: bool = False
    store: bool
    reasoning: ReasoningEcho
    temperature: float
    text: TextEcho
    tool_choice: ResponseToolChoice
    tools: list[FunctionToolEcho | CustomToolEcho | NamespaceEcho]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]


class DeletedResponse(Struct, tag_field="object", tag="response"):
    id: str
    deleted: Literal[True] = True


# -- events ----------------------------------------------------------------------------------------


class StreamEvent(Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class ResponseCreated(StreamEvent, tag="response.created"):
    response: Response


class ResponseQueued(StreamEvent, tag="response.queued"):
    response: Response


class ResponseInProgress(StreamEvent, tag="response.in_progress"):
    response: Response


class ResponseCompleted(StreamEvent, tag="response.completed"):
    response: Response


class ResponseIncomplete(StreamEvent, tag="response.incomplete"):
    response: Response


class ResponseFailed(StreamEvent, tag="response.failed"):
    response: Response


class ItemAdded(StreamEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(StreamEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(StreamEvent):
    """An event inside of an item."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText
    content_index: int = 0


class PartDone(ItemEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText
    content_index: int = 0


class OutputTextDelta(ItemEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ScoredToken] = []
    content_index: int = 0


class OutputTextDone(ItemEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[ScoredToken]
    content_index: int = 0


class ReasoningTextDelta(ItemEvent, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningTextDone(ItemEvent, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


AnyEvent: Any = reduce(
    or_,
    [
        *(kind for kind in StreamEvent.__subclasses__() if kind is not ItemEvent),
        *ItemEvent.__subclasses__(),
    ],
)
