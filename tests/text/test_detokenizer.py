"""The detokenizer against a decode of the whole output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_tokenizers import TEXTS, byte_level, byte_level_backend, spelled, spelled_backend

from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
TRICKY = st.lists(
    st.sampled_from(
        ["👨‍👩‍👧", "🇩🇪", "e\u0301", "日本", "\ufffd", "\u200d", " ", "\n\n", " .", "नि", "a"]
    )
).map("".join)


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(params=[byte_level, spelled], ids=["byte-level", "spelled"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    return made


# -- the law: pieces joined are the full decode ----------------------------------------------------


@given(UNICODE | TRICKY)
def test_each_character_is_emitted_with_the_token_that_completes_it(text: str) -> None:
    for tokenizer in (byte_level(), spelled()):
        ids = tokenizer.encode(text)
        got = pieces(Detokenizer(tokenizer), ids)
        assert "".join(got) == text
        for num_tokens in range(len(ids) + 1):
            data = b"".join(map(tokenizer.token_bytes, ids[:num_tokens]))
            if tokenizer.drops_first_space:
                data = data.removeprefix(b" ")
            assert "".join(got[:num_tokens]) == data.decode("utf-8", "ignore")


@given(st.data(), st.booleans())
def test_any_token_ids_give_the_text_of_a_full_decode(data: st.DataObject, skip: bool) -> None:
    for tokenizer in (byte_level(), spelled()):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5)))
        got = "".join(pieces(Detokenizer(tokenizer, skip_special_tokens=skip), ids))
        assert got == tokenizer.decode(ids, skip_special_tokens=skip)
        if tokenizer is byte_level():
            assert got == byte_level_backend().decode(ids, skip_special_tokens=skip)


@given(UNICODE | TRICKY, st.sampled_from(TEXTS))
def test_output_after_a_prompt_equals_a_decode_of_both(text: str, prompt: str) -> None:
    for tokenizer, backend in (
        (byte_level(), byte_level_backend()),
        (spelled(), spelled_backend()),
    ):
        before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
        got = "".join(pieces(Detokenizer(tokenizer, prompt_token_ids=before), ids))
        assert got == backend.decode(before + ids).removeprefix(backend.decode(before))


def test_a_prompt_of_hidden_tokens_leaves_the_first_output_token_the_beginning() -> None:
    tokenizer = spelled()
    bos, ids = tokenizer.bos_token_id, tokenizer.encode("fox")
    assert bos is not None
    for skip, text in ((True, "fox"), (False, " fox")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=[bos])
        assert "".join(pieces(detokenizer, ids)) == text


def test_an_output_may_begin_with_a_token_without_text() -> None:
    tokenizer = spelled()
    assert tokenizer.eos_token_id is not None
    ids = [tokenizer.eos_token_id, *tokenizer.encode("fox")]
    assert "".join(pieces(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == "fox"


def test_an_incomplete_character_waits_and_a_broken_one_does_not() -> None:
    for tokenizer in (byte_level(), spelled()):
        id_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        ids = [id_of[bytes([byte])] for byte in "👍".encode()]
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "", "👍"]
        assert [detokenizer.push(token_id) for token_id in ids[:2]] == ["", ""]
        assert detokenizer.push(id_of[b"a"]) == "\ufffda"
        assert detokenizer.push(ids[0]) == ""
        assert detokenizer.flush() == "\ufffd"


def test_invalid_bytes_without_end_are_not_buffered() -> None:
    tokenizer = byte_level()
    id_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    for byte in (b"\xff", b"\x80", b"\xf0"):
        detokenizer = Detokenizer(tokenizer, stop=["never"])
        emitted = sum(len(detokenizer.push(id_of[byte])) for _ in range(1000))
        assert emitted >= 999 and emitted + len(detokenizer.flush()) == 1000


# -- stop strings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    num_tokens: int
    text: str
    stopped: str | None


def run(tokenizer: Tokenizer, ids: Sequence[int], **options: object) -> Outcome:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    got = []
    for num_tokens, token_id in enumerate(ids, 1):
        got.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            assert detokenizer.push(ids[-1]) == detokenizer.flush() == ""
            return Outcome(num_tokens, "".join(got), detokenizer.stopped)
    return Outcome(len(ids), "".join([*got, detokenizer.flush()]), None)


def expected(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: Sequence[str],
    include_stop: bool = False,
    min_tokens: int = 0,
) -> Outcome:
    """Decode everything after every token and look everywhere."""
    num_seen = 0
    for num_tokens in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:num_tokens]).rstrip("\ufffd")
        found = [
            (start, order)
            for order, string in enumerate(stop)
            for start in range(len(text))
            if text.startswith(string, start) and start + len(string) > num_seen
        ]
        num_seen = len(text)
        if found and num_tokens >= min_tokens:
            start, order = min(found)
            end = start + (len(stop[order]) if include_stop else 0)
            return Outcome(num_tokens, text[:end], stop[order])
    return Outcome(len(ids), tokenizer.decode(ids), None)


LETTERS = ["a", "b", "é"]
STOPS = st.lists(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5).map("".join), min_size=1, max_size=3
)


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Token ids whose text is poor in letters, so that stop strings overlap and begin often."""
    tokenizer = byte_level()
    wanted = {b"a", b"b", b"abab", "é".encode(), b"\xc3", b"\xa9"}
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in wanted]
    return draw(st.lists(st.sampled_from([*ids, tokenizer.eos_token_id or 0]), max_size=30))


@settings(max_examples=400)
@given(outputs(), STOPS, st.booleans(), st.integers(0, 8))
def test_a_stop_string_is_found_where_brute_force_finds_it(
    ids: list[int], stop: list[str], include_stop: bool, min_tokens: int
) -> None:
    got = run(byte_level(), ids, stop=tuple(stop), include_stop=include_stop, min_tokens=min_tokens)
    assert got == expected(byte_level(), ids, stop, include_stop, min_tokens)


@given(outputs(), STOPS)
def test_only_text_that_may_become_a_stop_string_is_held_back(
    ids: list[int], stop: list[str]
) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=stop)
    emitted = ""
    for num_tokens, token_id in enumerate(ids, 1):
        emitted += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            return
        plain = Detokenizer(tokenizer)
        text = "".join(plain.push(token_id) for token_id in ids[:num_tokens])
        begun = {string[:size] for string in stop for size in range(len(string))}
        num_held = max(size for size in range(len(text) + 1) if text[len(text) - size :] in begun)
        assert emitted == text[: len(text) - num_held]


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [token_id for letter in text for token_id in byte_level().encode(letter)]


def test_a_stop_string_across_tokens_is_never_emitted() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("END",))
    assert [detokenizer.push(i) for i in letters("aENEND")] == ["a", "", "", "EN", "", ""]
    assert detokenizer.stopped == "END"


def test_a_partial_stop_string_is_emitted_by_the_flush() -> None:
    detokenizer = Detokenizer(byte_level(), stop=("END",))
    assert pieces(detokenizer, letters("xEN")) == ["x", "", "", "EN"]
    assert detokenizer.stopped is None
    assert detokenizer.flush() == ""


def test_the_earliest_match_wins_and_ties_go_to_the_first_listed() -> None:
    fox = byte_level().encode(" brown")
    assert len(fox) == 1
    assert run(byte_level(), fox, stop=("own", "row", "ro")) == Outcome(1, " b", "row")
    assert run(byte_level(), fox, stop=("own", "ro", "row")) == Outcome(1, " b", "ro")
    assert run(byte_level(), fox, stop=("own", "ro"), include_stop=True).text == " bro"


def test_a_match_may_begin_before_min_tokens_but_not_end_there() -> None:
    ids = letters("abcabc")
    assert run(byte_level(), ids, stop=("abc",), min_tokens=3) == Outcome(3, "", "abc")
    assert run(byte_level(), ids, stop=("abc",), min_tokens=4) == Outcome(6, "abc", "abc")


def test_a_match_may_overlap_one_that_was_ignored() -> None:
    assert run(byte_level(), letters("aaab"), stop=("aa",), min_tokens=3) == Outcome(3, "a", "aa")
    two_in_one = byte_level().encode("abab")
    assert len(two_in_one) == 1
    assert run(byte_level(), two_in_one, stop=("ab",), min_tokens=2) == Outcome(1, "abab", None)


def test_special_tokens_can_be_stop_strings_only_where_they_are_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox</s>dog")
    assert run(tokenizer, ids, stop=("</s>",)).stopped is None
    shown = run(tokenizer, ids, stop=("</s>",), skip_special_tokens=False)
    assert (shown.text, shown.stopped) == ("fox", "</s>")


def test_a_long_stop_string_costs_linear_time_once() -> None:
    """Quadratic work would take minutes here: every letter may begin the stop string anew."""
    [a] = letters("a")
    detokenizer = Detokenizer(byte_level(), stop=("a" * 20_000 + "b",))
    text = "".join(detokenizer.push(a) for _ in range(20_001))
    assert text == "a" and len(detokenizer.flush()) == 20_000
