"""Streamed pieces joined are the text; a stop string ends it at the token that completed it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import TEXT, byte_fallback, byte_level

from minisgl.detokenizer import Detokenizer
from minisgl.tokenizer import Tokenizer


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> tuple[list[str], int]:
    """The pieces, and how many tokens were taken."""
    pieces: list[str] = []
    for count, id in enumerate(ids, 1):
        pieces.append(detokenizer.push(id))
        if detokenizer.stopped is not None:
            return [*pieces, detokenizer.flush()], count
    return [*pieces, detokenizer.flush()], len(ids)


@pytest.mark.parametrize("text", TEXT)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_joined_are_the_text(text: str, make: type) -> None:
    tokenizer: Tokenizer = make()
    ids = tokenizer.encode(text)
    pieces, _ = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).strip() == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text())
def test_pieces_joined_are_any_text(text: str) -> None:
    ids = byte_level().encode(text)
    assert "".join(stream(Detokenizer(byte_level(), skip_special_tokens=False), ids)[0]) == text


@given(st.lists(st.integers(0, 400)), st.booleans())
def test_pieces_joined_are_the_full_decode_of_any_tokens(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    pieces, _ = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_an_incomplete_character_waits_for_its_last_byte() -> None:
    tokenizer = byte_fallback()
    ids = [3 + byte for byte in "a€b".encode()]
    assert stream(Detokenizer(tokenizer), ids)[0] == ["a", "", "", "€", "b", ""]
    assert stream(Detokenizer(tokenizer), ids[:3])[0] == ["a", "", "", "\ufffd"]


def letters(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    pieces, _ = stream(Detokenizer(byte_fallback(), stop=["abac"]), letters("xabab!"))
    assert pieces == ["x", "", "", "", "ab", "ab!", ""]
    pieces, _ = stream(Detokenizer(byte_fallback(), stop=["abac"]), letters("xab"))
    assert pieces == ["x", "", "", "ab"]


@given(
    st.lists(st.sampled_from("abé"), max_size=30).map("".join),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_end_the_text_where_they_are_complete(
    text: str, stop: list[str], include: bool
) -> None:
    detokenizer = Detokenizer(byte_fallback(), stop=stop, include_stop=include)
    pieces, taken = stream(detokenizer, letters(text))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert "".join(pieces) == text and detokenizer.stopped is None
        return
    end = min(ends)
    assert taken == len(text[:end].encode())
    matches = [s for s in stop if text[:end].endswith(s)]
    start = min(end - len(s) for s in matches)
    assert detokenizer.stopped in matches
    assert "".join(pieces) == (text[:start] + detokenizer.stopped if include else text[:start])
    assert end - len(detokenizer.stopped) == start


def test_a_stop_string_inside_one_token_is_found() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("Hello, hello world!")
    detokenizer = Detokenizer(tokenizer, stop=["ello w"])
    pieces, _ = stream(detokenizer, ids)
    assert "".join(pieces) == "Hello, h"


def test_stop_strings_count_from_min_tokens_on() -> None:
    detokenizer = Detokenizer(byte_fallback(), stop=["b"], min_tokens=4)
    pieces, taken = stream(detokenizer, letters("abaab"))
    assert ("".join(pieces), taken) == ("abaa", 5)
    straddling = Detokenizer(byte_fallback(), stop=["ba"], min_tokens=3)
    pieces, taken = stream(straddling, letters("abab"))
    assert ("".join(pieces), taken) == ("a", 3)


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("Hello"), tokenizer.eos_token_id or 0]
    assert "".join(stream(Detokenizer(tokenizer), ids)[0]) == "Hello"
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, ids)[0]) == "Hello</s>"
