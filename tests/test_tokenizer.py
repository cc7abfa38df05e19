from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import TEXT, byte_fallback, byte_level

from minisgl.errors import CheckpointError, InvalidRequestError
from minisgl.tokenizer import Tokenizer


@given(st.text())
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text(alphabet="ab the é中€👍,."))
def test_byte_fallback_text_survives_the_round_trip(text: str) -> None:
    tokenizer = byte_fallback()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 400)))
def test_decode_agrees_with_the_library(ids: list[int]) -> None:
    tokenizer = byte_level()
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._backend.decode(
            ids, skip_special_tokens=skip
        )


def test_bytes_of_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("é 👍 a word")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é 👍 a word".encode()
    assert tokenizer.token_bytes(10_000) == b""
    assert byte_fallback().token_bytes(3 + 0xE2) == b"\xe2"
    assert byte_fallback().token_text(3 + 0xE2) == "\ufffd"


def test_chat_takes_texts_and_parts_and_explains_refusals() -> None:
    tokenizer = byte_level()
    plain = [{"role": "user", "content": "Hello world"}]
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " world"}],
        }
    ]
    ids = tokenizer.chat(plain)
    assert tokenizer.chat(parts) == ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<s>user: Hello world</s><s>assistant: "
    assert tokenizer.decode(tokenizer.chat(plain, add_generation_prompt=False)) == (
        "user: Hello world"
    )
    developer = tokenizer.chat([{"role": "developer", "content": "x"}])
    assert "system: x" in tokenizer.decode(developer)
    with pytest.raises(InvalidRequestError, match="no tools here"):
        tokenizer.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidRequestError, match="no chat template"):
        byte_level(None).chat(plain)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = byte_level()
    texts = [text * 50 for text in TEXT] * 20
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(t) for t in texts]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert not Tokenizer.found_in(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
