"""The tokenizer that tests and benchmarks make for folders without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dummy_tokenizer import make_tokenizer, write_tokenizer

from minisgl.text.tokenizer import Tokenizer


@pytest.mark.parametrize("vocab_size", [259, 300, 5000])
def test_a_dummy_tokenizer_has_the_requested_size_and_encodes_any_text(
    tmp_path: Path, vocab_size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.eos_token_id == vocab_size - 1
    text = "some words, Ünïcode, 漢字 and\na line"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < len(text.encode()) or vocab_size == 259
    assert tokenizer.chat([{"role": "user", "content": "hi"}])
    spelled = [tokenizer.token_text(token_id) for token_id in range(vocab_size)]
    assert sum("�" in text for text in spelled) == 128


def test_a_dummy_tokenizer_is_never_smaller_than_its_bytes() -> None:
    with pytest.raises(ValueError, match="259 is the least"):
        make_tokenizer(258)
