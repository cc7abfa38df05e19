"""Bounds on the number of tokens of a text from its length alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_tokenizers import byte_level_backend, spelled_backend, wrap
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minisgl.errors import ContextLengthError
from minisgl.text.longest_token import longest_token
from minisgl.text.tokenizer import MIN_BEGINNING_BYTES, Tokenizer


def changed(backend: Backend, **parts: Any) -> Backend:
    copy = Backend.from_str(backend.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


COMPOSING = [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.NFD()]
BOUNDED = [
    byte_level_backend(),
    spelled_backend(),
    *(changed(byte_level_backend(), normalizer=normalizer) for normalizer in COMPOSING),
    changed(byte_level_backend(), normalizer=normalizers.Sequence(COMPOSING)),
]
# Texts that become few tokens: long ones, and what composition shortens most.
DENSE = st.lists(
    st.sampled_from(["two words", "<think>", "日本", "α\u0313\u0300\u0345", "\u1100\u1161\u11a8"])
    | st.text(max_size=5)
).map("".join)


@settings(max_examples=60)
@given(DENSE)
def test_no_text_has_fewer_tokens_than_the_bound_of_its_length(text: str) -> None:
    for backend in BOUNDED:
        longest = longest_token(backend)
        assert longest is not None
        num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
        assert len(text) <= longest * num_tokens


def with_token(backend: Backend, **flags: bool) -> Backend:
    copy = changed(backend)
    copy.add_special_tokens([AddedToken("<mask>", **flags)])
    return copy


UNBOUNDED = {
    "takes the space before it": with_token(byte_level_backend(), lstrip=True),
    "takes the space behind it": with_token(byte_level_backend(), rstrip=True),
    "strips": changed(byte_level_backend(), normalizer=normalizers.Strip()),
    "shortens": changed(byte_level_backend(), normalizer=normalizers.Replace("ab", "a")),
    "replaces what it likes": changed(
        byte_level_backend(), normalizer=normalizers.Replace(Regex(" +"), " ")
    ),
    "drops the spaces": changed(
        byte_level_backend(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        ),
    ),
    "removes": changed(
        byte_level_backend(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]
        ),
    ),
    "has one token for all it does not know": changed(
        spelled_backend(), model=models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>")
    ),
    "is no BPE": Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}


@pytest.mark.parametrize("backend", UNBOUNDED.values(), ids=UNBOUNDED)
def test_tokenizers_with_unbounded_tokens_have_no_longest_token(backend: Backend) -> None:
    assert longest_token(backend) is None


def test_the_fewest_tokens_are_rounded_up() -> None:
    tokenizer = Tokenizer(wrap(byte_level_backend()))
    longest = longest_token(byte_level_backend())
    assert longest is not None
    assert [tokenizer.fewest_tokens(longest * n + 1) for n in (0, 1, 5)] == [1, 2, 6]
    unbounded = Tokenizer(wrap(with_token(byte_level_backend(), lstrip=True)))
    assert unbounded.fewest_tokens(10**9) == 0


# -- the beginning of a long text -----------------------------------------------------------------


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
    backend = with_token(byte_level_backend(), lstrip=True, rstrip=True)
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
