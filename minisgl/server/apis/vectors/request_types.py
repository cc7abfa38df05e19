"""The bodies of requests for vectors and scores: OpenAI's, Jina's, Cohere's and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from minisgl.engine.vector_types import EmbedOptions, Input, RerankOptions
from minisgl.errors import InvalidRequestError
from minisgl.server.http.validation_errors import NOT_SUPPORTED
from minisgl.server.requests.described import NOT_GIVEN, Ignored, Unsupported, only, takes
from minisgl.server.requests.request_types import (
    ClientFields,
    NumKept,
    PositiveCount,
    TokenId,
    separated,
)

MAX_INPUTS = 2048  # of one request: texts, documents, or pairs of texts

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
On = Annotated[Annotated[bool, Meta(extra_json_schema={"const": True})] | None, only(True)]


class VectorFields(ClientFields, kw_only=True):
    """The fields that requests for vectors and for scores have in common."""

    model: str | None = None
    instruction: str | None = None
    """What is looked for. Default: that of the model's card. Example: `"Find what purrs."`"""
    truncate_prompt_tokens: NumKept | None = None
    """Cut what the model reads to so many tokens; -1: to as many as it takes. Default: refused if
    too long. Example: `512`"""

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens", "must be -1 or at least 1.")


@takes(Unsupported, "normalize", "embed_dtype", "embedding_type", "endianness", "input_type")
@takes(Unsupported, "late_chunking", "messages", "task")
class EmbeddingRequest(VectorFields, kw_only=True):
    """POST /v1/embeddings"""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    """The texts, or their token ids. Example: `["a text", "another"]`"""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: float32 numbers, little-endian. Default: float. Example: `"base64"`"""
    dimensions: PositiveCount | None = None
    """How many numbers each vector keeps, the first. Default: all. Example: `64`"""
    prompt_name: str | None = None
    """A prompt of the checkpoint, before each text. Default: its default. Example: `"query"`"""
    add_special_tokens: On = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.add_special_tokens is False:
            raise InvalidRequestError("add_special_tokens", f"{NOT_SUPPORTED}.")

    def inputs(self) -> Sequence[Input]:
        """The inputs, each a text or a list of token ids; raises InvalidRequestError."""
        found = separated("input", self.input)
        if len(found) > MAX_INPUTS:
            raise InvalidRequestError("input", f"must have at most {MAX_INPUTS} entries.")
        return found

    def options(self) -> EmbedOptions:
        return EmbedOptions(
            prompt_name=self.prompt_name,
            instruction=self.instruction,
            dimensions=self.dimensions,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ScoringFields(VectorFields, kw_only=True):
    """The fields that all requests for scores have in common."""

    max_tokens_per_doc: PositiveCount | None = None
    """Cut each document to so many tokens. Default: none. Example: `256`"""

    def options(self) -> RerankOptions:
        return RerankOptions(
            instruction=self.instruction,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            max_tokens_per_doc=self.max_tokens_per_doc,
        )


class RerankDocument(Struct):
    """A document as an object, of which only the text is read."""

    text: str
    image: Unsupported = None


Documents = Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(ScoringFields, kw_only=True):
    """POST /v1/rerank and /v2/rerank"""

    query: str
    """What the documents are scored for. Example: `"What purrs?"`"""
    documents: Documents
    """Texts, or objects with a text. Example: `["It rains.", "A cat does."]`"""
    top_n: PositiveCount | None = None
    """How many documents to answer with, the best. Default: all. Example: `1`"""
    return_documents: bool | None = None
    """Add the texts of the documents. Default: false. Example: `true`"""
    rank_fields: list[Literal["text"]] | None = None
    """Only ["text"]. Default: none. Example: `["text"]`"""
    max_chunks_per_doc: Unsupported = None
    priority: Ignored = NOT_GIVEN

    def texts(self) -> list[str]:
        """The texts of the documents, in their order."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(ScoringFields, kw_only=True):
    """POST /v1/score"""

    text_1: str | Texts
    """A query, or one for each text_2. Example: `"What purrs?"`"""
    text_2: str | Texts
    """A document, or several. Example: `["It rains.", "A cat does."]`"""

    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of query and document; raises InvalidRequestError."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        documents = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise InvalidRequestError(
                "text_1", "must be one text, or as many texts as text_2 has, which are paired."
            )
        return [*zip(queries, documents, strict=True)]
