"""What is asked of a model that makes vectors of texts or scores of documents, and its answers.

Nothing here needs torch, which the HTTP server does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Input = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of a text, or the logits behind a prompt."""

    vector: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document answers a query, 0 to 1."""

    score: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """prompt_name: of the checkpoint's prompts, for its default one None. instruction: what a query
    is about, instead of a prompt. dimensions: first numbers of each vector that are kept.
    truncate_prompt_tokens: tokens to which longer texts are cut, -1 for the longest sequence; None
    refuses texts that are too long."""

    prompt_name: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankOptions:
    """instruction: what to look for; None: the passages that answer a web search.
    truncate_prompt_tokens: tokens to which longer prompts are cut at the end of their document, as
    in EmbedOptions. max_tokens_per_doc: tokens to which longer documents are cut."""

    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
