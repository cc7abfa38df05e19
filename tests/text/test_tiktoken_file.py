"""Tokenizers that are published as tiktoken.model alone, against tiktoken's algorithm."""

from __future__ import annotations

import base64
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from support.toy_tokenizers import TEXTS, byte_level_backend

from minisgl.errors import CheckpointError
from minisgl.text.tokenizer import Tokenizer

# As the code of Kimi-K2 has it. In V1 of the package regex && is an intersection, as in Rust.
PATTERN = regex.compile(
    "|".join(
        [
            r"""[\p{Han}]+""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
            r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
            r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    ),
    regex.V1,
)
NAMED = ("[BOS]", "[EOS]", "<|im_end|>", None, "<|tool_call_begin|>")
SPECIAL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@cache
def ids_by_token() -> dict[bytes, int]:
    """Of all bytes, and of the tokens that merges of TEXTS make."""
    found = {bytes([byte]): byte for byte in range(256)}
    for text in (*TEXTS, "中文分词。 It's 2024, ISN'T it?"):
        for word in PATTERN.findall(text):
            data = word.encode()
            for size in range(2, len(data) + 1):
                found.setdefault(data[:size], len(found))
    return found


def save(folder: Path, ids: dict[bytes, int], **config: Any) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % token_id for token, token_id in ids.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(ids) + index): SPECIAL | {"content": name, "special": "tool" not in name}
        for index, name in enumerate(NAMED)
        if name
    }
    tokens = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    config = tokens | KIMI_CODE | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(KIMI_K2))
    return folder


KIMI_CODE = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "tokenizer_class": "TikTokenTokenizer",
}
# transformers does not know it, and cannot read a rope_scaling without its class.
KIMI_K2 = {
    "model_type": "kimi_k2",
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 32.0, "original_max_position_embeddings": 4096, "type": "yarn"},
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save(tmp_path_factory.mktemp("kimi"), ids_by_token())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    assert Tokenizer.found_in(folder)
    return Tokenizer.load(folder)


def encode(text: str) -> list[int]:
    """Of each piece the two neighbours that make the token with the lowest id, until none do."""
    ids, found = ids_by_token(), list[int]()
    for piece in PATTERN.findall(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in ids:
            parts = [piece.encode()]
        while True:
            pairs = [left + right for left, right in pairwise(parts)]
            known = [pair for pair in pairs if pair in ids]
            if not known:
                break
            at = pairs.index(min(known, key=ids.__getitem__))
            parts[at : at + 2] = [pairs[at]]
        found += [ids[part] for part in parts]
    return found


WORDS = st.sampled_from([*" .,'\n\r\tsStT12345", *"aAéÉßǅʰ中文漢かПр\u0301😀", *TEXTS[0].split()])


@given(st.lists(WORDS, max_size=40).map("".join))
def test_texts_are_cut_and_merged_as_by_tiktoken(kimi: Tokenizer, text: str) -> None:
    found = kimi.encode(text)
    assert found == encode(text)
    assert kimi.decode(found) == text


def test_added_tokens_have_their_names_and_the_others_are_reserved(kimi: Tokenizer) -> None:
    first = len(ids_by_token())
    assert kimi.vocab_size == first + 256
    assert (kimi.bos_token_id, kimi.eos_token_id) == (first, first + 1)
    assert kimi.encode("a[EOS]<|tool_call_begin|>") == [97, first + 1, first + 4]
    assert kimi.decode([97, first + 1, first + 4]) == "a<|tool_call_begin|>"
    assert kimi.token_text(first + 3) == f"<|reserved_token_{first + 3}|>"
    assert kimi.chat([{"role": "user", "content": "a"}]) == [97, first + 2]


@pytest.mark.parametrize(
    ("ids", "config", "message"),
    [
        ({b"a": 0}, {"tokenizer_class": "QWenTokenizer"}, r"alone; add the tokenizer\.json of"),
        ({b"a": 0, b"b": 2}, {}, "ids from 0 on"),
        ({b"a": 0, b"a" * 1025: 1}, {}, "up to 1024 bytes"),
        ({}, {}, "ids from 0 on"),
        (
            {b"a": 0},
            {"added_tokens_decoder": {"2": {"content": "a"}}},
            "the token 'a' has another id, too",
        ),
    ],
)
def test_what_is_no_tokenizer_of_kimi_is_refused_in_a_sentence(
    tmp_path: Path, ids: dict[bytes, int], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(save(tmp_path, ids, **config))


@pytest.mark.parametrize("own", [{}, KIMI_CODE], ids=["plain", "own-code"])
def test_a_model_type_that_transformers_does_not_know_is_no_obstacle(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | own)
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode(TEXTS[1]) == byte_level_backend().encode(TEXTS[1]).ids
    assert tokenizer.eos_token_id == 1
