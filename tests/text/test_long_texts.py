"""Long texts, of which the beginning may show that they have too many tokens."""

from __future__ import annotations

import pytest
from support.toy_tokenizers import byte_level_backend, wrap
from tokenizers import AddedToken

from minisgl.errors import ContextLengthError
from minisgl.text.tokenizer import MIN_BEGINNING_BYTES, Tokenizer


def watched(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that it encodes from now on."""
    lengths: list[int] = []
    encode = tokenizer._encode_long

    def watching(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode_long", watching)
    return lengths


def test_a_text_with_too_many_tokens_is_encoded_only_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(wrap(byte_level_backend()))
    lengths = watched(tokenizer, monkeypatch)
    with pytest.raises(ContextLengthError, match="at least 32768 tokens") as caught:
        tokenizer.encode("0123456789" * 200_000, param="messages", max_tokens=1000)
    assert lengths == [MIN_BEGINNING_BYTES]
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", [" " * 400_000 + "<mask>", "<mask>" + " " * 400_000])
def test_a_long_text_of_few_tokens_is_encoded_whole(text: str) -> None:
    """The white space that a token takes in does not count, whichever side it is on."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    assert Tokenizer(wrap(backend)).encode(text, max_tokens=10) == backend.encode("<mask>").ids


def test_a_text_that_fits_has_the_tokens_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(wrap(byte_level_backend()))
    lengths = watched(tokenizer, monkeypatch)
    text = "日本 two words" * 20_000
    ids = tokenizer.encode(text, max_tokens=60_000)
    assert ids == byte_level_backend().encode(text).ids
    assert lengths == [len(text)]
    # Encoded in part first, and then as a whole all the same.
    assert tokenizer.encode(text, max_tokens=25_000) == ids
    assert len(lengths) == 3 and lengths[1] < len(text) / 2
