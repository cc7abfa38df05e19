"""The bodies of answers with vectors or scores: answers are built from them, and /openapi.json
describes them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class PromptUsage(Struct):
    """Token counts where nothing is generated, so that both are equal."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str  # a text: base64 of float32, little-endian


class EmbeddingList(Struct, tag_field="object", tag="list"):
    data: list[EmbeddingItem]
    model: str
    usage: PromptUsage


class RankedDocument(Struct):
    text: str


class RankedResult(Struct):
    index: int  # among the documents of the request
    relevance_score: float  # 0 to 1
    document: RankedDocument | UnsetType = UNSET


class APIVersion(Struct):
    version: Literal["1", "2"]


class TokenCounts(Struct):
    input_tokens: int
    output_tokens: int


class RerankMeta(Struct):
    """Where Cohere's clients look for the token counts."""

    api_version: APIVersion
    tokens: TokenCounts


class RankedList(Struct, tag_field="object", tag="list"):
    """The best results first; of equal ones the first of the request."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PromptUsage
    meta: RerankMeta


class ScoreItem(Struct, tag_field="object", tag="score"):
    index: int
    score: float  # 0 to 1


class ScoreList(Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: PromptUsage
