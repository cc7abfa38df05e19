"""Bounds the number of characters per token, to refuse texts by their length alone."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Maximum number of characters that canonical composition merges (four for U+1F82).
MAX_COMPOSED = 4
# Normalizers, by the library's names, that drop no character.
KEEPING_NORMALIZERS = frozenset({"Lowercase", "NFD", "NFKD", "Prepend"})
COMPOSING_NORMALIZERS = frozenset({"NFC", "NFKC"})
KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
NUM_BYTES = 256


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """The maximum number of characters that become one token; None if there is no bound.

    There is none if the tokenizer may drop characters, if a token absorbs the white space around
    it, or if one token replaces any unknown text.
    """
    added = [*backend.get_added_tokens_decoder().values()]
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if not all(map(_keeps, steps_of(backend.pre_tokenizer, "pretokenizers"))):
        return None
    composed = 1
    for step in steps_of(backend.normalizer, "normalizers"):
        if step["type"] in COMPOSING_NORMALIZERS:
            composed *= MAX_COMPOSED
        elif step["type"] not in KEEPING_NORMALIZERS and not _lengthens(step):
            return None
    if not _knows_every_character(backend):
        return None
    # In a byte-level vocabulary, a token has one character per byte.
    spelled = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    if backend.normalizer is not None:  # added tokens may match normalized text
        found = (len(backend.normalizer.normalize_str(token.content)) for token in added)
        spelled = max(spelled, *found, 1)
    return composed * spelled


def steps_of(part: Any, members: str) -> list[dict[str, Any]]:
    """The components of a part of a tokenizer, whose pickled state is JSON."""
    if part is None:
        return []
    found = [json.loads(part.__getstate__())]
    while any(step["type"] == "Sequence" for step in found):
        found = [
            inner
            for step in found
            for inner in (step[members] if step["type"] == "Sequence" else [step])
        ]
    return found


def _keeps(step: dict[str, Any]) -> bool:
    return step["type"] in KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _lengthens(step: dict[str, Any]) -> bool:
    """True if the component replaces a text with one at least as long."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return len(content) >= len(pattern)
        case _:
            return False


def _knows_every_character(backend: tokenizers.Tokenizer) -> bool:
    """True if every character has a token of its own or tokens of its bytes, so none is dropped."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        names = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    elif "ByteLevel" in (each["type"] for each in steps_of(backend.pre_tokenizer, "pretokenizers")):
        names = pre_tokenizers.ByteLevel.alphabet()
    else:
        return False
    return all(model.token_to_id(name) is not None for name in names)
