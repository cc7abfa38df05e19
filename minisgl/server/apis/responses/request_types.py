"""The body of POST /v1/responses as types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from minisgl.errors import InvalidRequestError
from minisgl.server.requests.chat_messages import MAX_MESSAGES, Detail, Effort, TemplateOptions
from minisgl.server.requests.constraint_types import (
    JsonObjectFormat,
    Parameters,
    Schema,
    TextFormat,
)
from minisgl.server.requests.described import NOT_GIVEN, Ignored, Unsupported, takes, unsupported
from minisgl.server.requests.request_types import NumLogprobs, PositiveCount, check_off
from minisgl.server.requests.tools import MAX_TOOLS, TextInput
from minisgl.server.requests.translation import TranslatedFields

# As OpenAI limits it.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]

STATELESS = (
    "is not supported, because answers are not stored. Send the whole conversation in input: its "
    "items, the output of each answer, and what is new."
)
STREAM_INSTEAD = (
    "is not supported, because answers are not stored. Leave it out; with stream: true the answer "
    "comes as it is written."
)
NO_CONVERSATIONS = unsupported(
    "send previous_response_id, or the whole conversation in input: its items, the output of each "
    "answer, and what is new"
)
NO_PROMPTS = unsupported("send instructions and input, because prompts are not stored")
REFERENCE = "item_reference"
# Types of tools that OpenAI runs, or that its models know: their names may be logged.
HOSTED = frozenset(
    (
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "shell", "tool_search"),
        *("web_search", "web_search_preview"),
    )
)
# Types of items of the tools that OpenAI runs, or that its models know. They are left out.
LEFT_OUT_ITEMS = (
    *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call"),
    *("compaction", "compaction_trigger", "computer_call", "computer_call_output"),
    *("configuration_update", "file_search_call", "image_generation_call", "local_shell_call"),
    *("local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
    *("mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output"),
    *("tool_search_call", "tool_search_output", "web_search_call"),
)
if TYPE_CHECKING:
    ItemType: TypeAlias = str
else:
    ItemType = Literal[
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output", REFERENCE, *LEFT_OUT_ITEMS),
    ]
# Types of tools that the client runs, and that of several of these under a name of their own.
CALLABLE = frozenset(("function", "custom"))
NAMESPACE = "namespace"


class InputTextPart(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    text: str


class PlainTextPart(Struct, tag_field="type", tag="text"):
    text: str


class ReasoningTextPart(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(Struct, tag_field="type", tag="summary_text"):
    text: str


class RefusedPart(Struct, tag_field="type", tag="refusal", rename={"text": "refusal"}):
    text: str


class InputImagePart(Struct, tag_field="type", tag="input_image", omit_defaults=True):
    """An image."""

    image_url: str | None = None
    detail: Detail | None = None
    file_id: str | None = None  # which only OpenAI's servers know

    text: ClassVar[str] = ""  # beside the texts of other parts it adds none


Part: TypeAlias = (
    InputTextPart
    | InputImagePart
    | OutputTextPart
    | PlainTextPart
    | ReasoningTextPart
    | SummaryTextPart
    | RefusedPart
)
Parts: TypeAlias = str | list[Part]


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """An item of the conversation. Which fields it has depends on its type."""

    type: ItemType | None = None  # None: a message, or a reference
    id: str | None = None  # of an item of an earlier answer
    role: Literal["user", "assistant", "system", "developer"] | None = None  # of a message
    content: Parts | None = None  # of a message, or of reasoning
    summary: Parts | None = None  # of reasoning
    call_id: str | None = None  # of calls and their outputs
    name: str | None = None  # of calls
    namespace: str | None = None  # of calls, where the tool is in one
    arguments: str | dict[str, Raw] | None = None  # of a function's call a text
    input: str | None = None  # of a custom tool's call
    output: Raw = NOT_GIVEN  # Parts, of functions and custom tools

    @property
    def is_reference(self) -> bool:
        """Whether it stands for an item of an earlier answer. Its type may be left out."""
        bare = self.type is None and self.role is None and self.content is None
        return self.type == REFERENCE or (bare and self.id is not None)


class CallOutput(Struct):
    """What a function or a custom tool has returned."""

    output: Parts | None = None


class FlatGrammar(Struct, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class FlatTool(Struct, kw_only=True):
    """A tool. Types other than function and custom are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Parameters = NOT_GIVEN
    strict: bool | None = None
    format: TextInput | FlatGrammar | None = None  # of a custom tool


class ResponseTool(FlatTool, kw_only=True):
    """A tool, or a namespace of tools."""

    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None  # of a namespace


class FunctionChoice(Struct, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class CustomChoice(Struct, tag_field="type", tag="custom", omit_defaults=True):
    name: str
    namespace: str | None = None


class AllowedTool(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponseToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice
)


class FlatJsonSchema(Struct, tag_field="type", tag="json_schema"):
    name: str
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct):
    format: TextFormat | JsonObjectFormat | FlatJsonSchema | None = None
    verbosity: Ignored = NOT_GIVEN


class ReasoningOptions(Struct):
    effort: Effort | None = None
    summary: Ignored = NOT_GIVEN
    generate_summary: Ignored = NOT_GIVEN


@takes(Unsupported, "moderation", "messages", "max_tokens")
@takes(Ignored, "client_metadata", "context_management", "max_tool_calls", "prompt_cache_key")
@takes(Ignored, "prompt_cache_options", "prompt_cache_retention", "safety_identifier")
@takes(Ignored, "service_tier", "stream_options")
class ResponsesRequest(TranslatedFields, kw_only=True):
    """POST /v1/responses"""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    """The question, or the items of a conversation. Example: `"Hello!"`"""
    instructions: str | None = None
    """The system prompt of this response. Default: none. Example: `"Be brief."`"""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """What the model may call. Default: none. Example: `[{"type": "function", "name":
    "get_weather", "parameters": {"type": "object", "properties": {"city": {"type":
    "string"}}}}]`"""
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    """Holds the answer to JSON, or to JSON of a schema. Default: free text. Example: `{"format":
    {"type": "json_object"}}`"""
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    max_output_tokens: PositiveCount | None = None
    """How many tokens the answer may have. Default: the room that is left. Example: `100`"""
    include: list[str] | None = None
    """What a response has besides its text. Default: nothing. Example: `[]`"""
    top_logprobs: NumLogprobs | None = None
    """How many alternatives each token has. Default: 0. Example: `5`"""
    stream: bool | None = None
    metadata: Metadata | None = None
    """Repeated in the answer. Default: none. Example: `{"topic": "weather"}`"""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drop the oldest items if there is no room. Default: disabled. Example: `"auto"`"""
    previous_response_id: str | None = None
    """The id of a stored response to go on from. Default: none. Example: `"resp_1"`"""
    store: bool | None = None
    """Whether the answer is kept, to go on from its id. Default: true. Example: `false`"""

    background: bool | None = None
    """Answer at once, and generate the response without its client. Default: false. Example:
    `true`"""

    conversation: Annotated[None, NO_CONVERSATIONS] = None
    prompt: Annotated[None, NO_PROMPTS] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_off(logprobs=self.logprobs, return_token_ids=self.return_token_ids)
        if self.background and self.store is False:
            raise InvalidRequestError("background", "is only allowed with store: true.")

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)
