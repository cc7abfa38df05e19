"""Bounds the text that one token can stand for, so that a length shows what cannot fit."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Characters that canonical composition makes one at most (U+1F82 is made of four).
MAX_COMPOSED = 4
# Parts of tokenizers by the library's names. These leave no character out.
KEEPING_NORMALIZERS = frozenset({"Lowercase", "NFD", "NFKD", "Prepend"})
COMPOSING_NORMALIZERS = frozenset({"NFC", "NFKC"})
KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
NUM_BYTES = 256


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that become one token, or None where there is no bound.

    There is none where a part of the tokenizer may leave characters out, where a token takes in
    the white space beside it, or where one stands for all that is unknown.
    """
    added = [*backend.get_added_tokens_decoder().values()]
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if not all(map(_keeps, _steps(backend.pre_tokenizer, "pretokenizers"))):
        return None
    composed = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] in COMPOSING_NORMALIZERS:
            composed *= MAX_COMPOSED
        elif step["type"] not in KEEPING_NORMALIZERS and not _lengthens(step):
            return None
    if not _knows_every_character(backend):
        return None
    # Of a vocabulary of bytes, a token is spelled with as many characters as it has bytes.
    spelled = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    if backend.normalizer is not None:  # added tokens may be found in what it leaves of a text
        found = (len(backend.normalizer.normalize_str(token.content)) for token in added)
        spelled = max(spelled, *found, 1)
    return composed * spelled


def _steps(part: Any, members: str) -> list[dict[str, Any]]:
    """The parts that a normalizer or pre-tokenizer is made of; they pickle as JSON."""
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
    """Whether it replaces a text with one that is as long at least."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return len(content) >= len(pattern)
        case _:
            return False


def _knows_every_character(backend: tokenizers.Tokenizer) -> bool:
    """By its bytes at least, so that nothing is left out or counted with its neighbours."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        names = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    elif _spells_bytes(backend):
        names = pre_tokenizers.ByteLevel.alphabet()
    else:
        return False
    return all(model.token_to_id(name) is not None for name in names)


def _spells_bytes(backend: tokenizers.Tokenizer) -> bool:
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)
