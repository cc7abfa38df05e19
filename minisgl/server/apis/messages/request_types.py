"""The bodies of requests to the Messages API as types.

Null stands for a field that is not given. What asks for work at Anthropic's own servers is known
and has no effect: their tools, their caches, their way to shorten a conversation.
"""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError
from minisgl.server.requests.chat_messages import MAX_MESSAGES
from minisgl.server.requests.described import NOT_GIVEN, Ignored, Unsupported, takes
from minisgl.server.requests.request_types import PositiveCount, StopStrings, check_off
from minisgl.server.requests.tools import MAX_TOOLS
from minisgl.server.requests.translation import TranslatedFields

Schema: TypeAlias = dict[str, Raw]  # of JSON


# -- content ---------------------------------------------------------------------------------------


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: Ignored = NOT_GIVEN


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking that only Anthropic can read."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call that the assistant has made."""

    id: str
    name: str
    input: Raw  # an object; clients that read a stream send back whatever its pieces make


class ImageSource(Struct):
    type: str = ""  # base64 or url; others are those of Anthropic's servers
    data: str = ""
    media_type: str = ""
    url: str = ""


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: ImageSource | None = None

    @property
    def url(self) -> str | None:
        """Its address; None where it has none."""
        match self.source:
            case ImageSource("base64", data, media_type):
                return f"data:{media_type};base64,{data}"
            case ImageSource("url", url=url):
                return url
        return None


class TextSource(Struct, tag_field="type", tag="text"):
    data: str


class PartsSource(Struct, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document of plain text."""

    source: TextSource | PartsSource
    title: str | None = None
    context: str | None = None
    citations: Ignored = NOT_GIVEN


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    content: list[TextBlock]
    title: str = ""
    source: str = ""


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """Names a tool that a search has found."""

    tool_name: str


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class ServerToolUseBlock(Struct, tag_field="type", tag="server_tool_use"):
    """A call of a tool that Anthropic runs itself; so are the results below."""


class CompactionBlock(Struct, tag_field="type", tag="compaction"):
    """What Anthropic has made of a long conversation, if it has."""

    content: str | None = None


# Results of such calls, and calls of other kinds, by the names of their types.
SERVER_BLOCKS = {
    "WebSearchResultBlock": "web_search_tool_result",
    "WebFetchResultBlock": "web_fetch_tool_result",
    "CodeExecutionResultBlock": "code_execution_tool_result",
    "BashResultBlock": "bash_code_execution_tool_result",
    "EditorResultBlock": "text_editor_code_execution_tool_result",
    "ToolSearchResultBlock": "tool_search_tool_result",
    "McpToolUseBlock": "mcp_tool_use",
    "McpToolResultBlock": "mcp_tool_result",
    "McpToolListingBlock": "mcp_tool_listing",
    "AdvisorResultBlock": "advisor_tool_result",
    "FallbackBlock": "fallback",  # where another model has taken over
}
if TYPE_CHECKING:
    ServerBlock: TypeAlias = ServerToolUseBlock
else:
    kinds = (
        msgspec.defstruct(name, (), tag_field="type", tag=tag)
        for name, tag in SERVER_BLOCKS.items()
    )
    ServerBlock = reduce(or_, kinds, ServerToolUseBlock)
ResultPart: TypeAlias = (
    TextBlock | SearchResultBlock | ToolReferenceBlock | ImageBlock | DocumentBlock
)
ContentBlock: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SearchResultBlock
    | ImageBlock
    | DocumentBlock
    | CompactionBlock
    | ServerBlock
)


ShownThinking: TypeAlias = Literal["shown", "omitted", "none"]  # omitted: blocks without a text


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


# -- tools -----------------------------------------------------------------------------------------


class ToolSpec(Struct):
    """A tool of the client; of another type one of Anthropic's: see client_tools.py. Those that it
    runs itself are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None


class MessagesToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of type `tool`
    disable_parallel_tool_use: bool | None = None


# -- the request -----------------------------------------------------------------------------------


class Thinking(Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: PositiveCount | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    schema: Schema


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class Thread(Struct):
    """Where the client's messages are kept: nowhere, so none can be continued."""

    type: str | None = None


class Metadata(Struct):
    user_id: Raw = NOT_GIVEN  # separates the users of a client, if it is a text


@takes(Unsupported, "chat_template_kwargs", "top_logprobs")
@takes(Ignored, "betas", "billing_policy", "cache_control", "compaction", "container")
@takes(Ignored, "context_management", "diagnostics", "fallback_credit_token", "fallbacks")
@takes(Ignored, "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id")
class Prompt(TranslatedFields, kw_only=True):
    """What a prompt is made of, and what all APIs have in common."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    """The system prompt. Default: none. Example: `"Be brief."`"""
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] | None = None
    """What the model may call. Default: none. Example: `[{"name": "get_weather", "input_schema":
    {"type": "object", "properties": {"city": {"type": "string"}}}}]`"""
    tool_choice: MessagesToolChoice | None = None
    """Whether the model must call a tool, and which. Default: auto. Example: `{"type": "auto"}`"""
    thinking: Thinking | None = None
    """Whether the model thinks. Default: off. Example: `{"type": "disabled"}`"""
    output_config: OutputConfig | None = None
    """The form of the answer, and how much to think. Default: none. Example: `{"effort": "low"}`"""
    output_format: SchemaFormat | None = None
    """The older place of output_config.format. Default: free text. Example: `{"type":
    "json_schema", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}`"""
    mcp_servers: list[Ignored] | None = None
    """Left out: this server runs no tools."""

    thread: Thread | None = None
    """Accepted, and without effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_off(logprobs=self.logprobs, return_token_ids=self.return_token_ids)

    @property
    def has_late_system(self) -> bool:
        """Whether instructions follow other messages, which not every chat template takes."""
        roles = [role for role, _ in groupby(message.role for message in self.messages)]
        return "system" in roles[1:]

    @property
    def format(self) -> SchemaFormat | None:
        """What the answer must be."""
        return (self.output_config and self.output_config.format) or self.output_format


class MessagesRequest(Prompt, kw_only=True):
    """POST /v1/messages"""

    max_tokens: PositiveCount | None = None
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    """Texts that end the answer where they appear. Default: none. Example: `["END"]`"""
    metadata: Metadata | None = None
    """Its user_id stands for user. Default: none. Example: `{"user_id": "ada"}`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop is not None and self.stop_sequences is not None:
            raise InvalidRequestError("stop", "is not allowed beside stop_sequences.")

    @property
    def shown_thinking(self) -> ShownThinking:
        """What the answer has of the thinking."""
        if self.thinking is None or self.thinking.type == "disabled":
            return "none"
        return "omitted" if self.thinking.display == "omitted" else "shown"


# What clients leave in the body of the request that they count for.
@takes(Ignored, "max_tokens", "stream", "stop_sequences", "metadata")
class CountTokensRequest(Prompt, kw_only=True):
    """POST /v1/messages/count_tokens"""
