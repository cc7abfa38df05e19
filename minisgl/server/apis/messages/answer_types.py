"""The answers of the Messages API as types."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from minisgl.server.http.error_bodies import MessagesError

StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TokenCount(Struct):
    input_tokens: int


# -- the answer ------------------------------------------------------------------------------------


class AnswerText(Struct, tag_field="type", tag="text"):
    text: str


class AnswerThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnswerToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]  # as the model wrote it


AnswerBlock: TypeAlias = AnswerText | AnswerThinking | AnswerToolUse


class OutputTokensDetails(Struct):
    thinking_tokens: int  # of thinking, with its markers, shown or not


class MessagesUsage(Struct):
    """Token counts. The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int  # of the prompt, without those found in the prefix cache
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageAnswer(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None  # null where a stream begins
    stop_sequence: str | None  # the one that was found
    usage: MessagesUsage


# -- the events of a stream ------------------------------------------------------------------------


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock  # empty


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent: TypeAlias = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesError
)
