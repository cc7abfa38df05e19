"""Tokens that a request may have, and words that it may not, against a plain reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.engine_loop import EOS, VOCAB, ScriptedRunner, deltas_of, engine_on, params
from support.fake_matcher import FakeMatcher, held_to, tokens_after
from support.fake_runner import expected_output

from minisgl.errors import InvalidRequestError
from minisgl.matcher import MaskRows, mask_words
from minisgl.models.hub import DEMO_FOLDER
from minisgl.parts.masks.token_rules import TokenRules, mask_of, word_token_ids
from minisgl.request import SamplingParams
from minisgl.text.tokenizer import Tokenizer

SIZE = 70
Words = Sequence[Sequence[int]]


def ids_in(words: MaskRows) -> set[int]:
    return {i for i in range(SIZE) if words[i // 32] >> (i % 32) & 1}


def filled(rules: TokenRules) -> set[int]:
    words = np.full(mask_words(SIZE), 7, np.uint32)
    rules.fill(words)
    return ids_in(words)


def reference(output: Sequence[int], allowed: set[int], words: Words) -> set[int]:
    """What may follow an output: whatever would not end it with one of the words."""
    left = {
        token
        for token in allowed
        if not any([*output, token][-len(word) :] == [*word] for word in words)
    }
    return left or {token for token in allowed if [token] not in [[*word] for word in words]}


def test_masks_are_those_of_the_reference_for_random_words_and_outputs() -> None:
    rng = random.Random(0)
    for _ in range(60):
        letters = [1, 2, 33, 69]
        words = [tuple(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(6)]
        allowed = set(rng.sample(range(SIZE), 30)) | {*letters, 5}
        rules = TokenRules(mask_of(SIZE, allowed), words)
        output: list[int] = []
        for _ in range(40):
            assert filled(rules) == reference(output, allowed, words)
            output.append(rng.choice(letters))
            rules.accept(output[-1:])


def test_a_word_is_not_held_back_where_a_grammar_or_the_list_has_nothing_else() -> None:
    only = TokenRules(mask_of(SIZE, [4]), [(4, 4)])
    only.accept([4])
    assert filled(only) == {4}
    inner = FakeMatcher(lambda output: {6} if output else {4, 5})
    rules = TokenRules(mask_of(SIZE, None), [(4,), (5, 6)], inner)
    assert filled(rules) == {5}
    rules.accept([5])
    assert filled(rules) == {6}
    assert inner.output == [5] and not rules.finished and rules.error is None


def test_rules_that_leave_no_token_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bad_words: leave none of allowed_token_ids"):
        TokenRules(mask_of(SIZE, [4]), [(4,)])


def test_words_are_tokenized_alone_and_behind_a_space() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    vocabulary = ("the", "capital", "zzqj", " of", "can I")
    assert len(tokenizer.encode("can I")) != len(tokenizer.encode(" can I"))
    found = word_token_ids(tokenizer, vocabulary)
    texts = {tokenizer.decode([*ids]) for ids in found}
    assert {word.lstrip() for word in vocabulary} <= texts
    assert texts <= {prefix + word.lstrip() for prefix in ("", " ") for word in vocabulary}
    assert {" the", " can I"} <= texts and len(set(found)) == len(found)


@pytest.mark.parametrize("overlap", [True, False])
async def test_requests_obey_their_rules_and_others_get_their_own_tokens(overlap: bool) -> None:
    allowed = {1, 2, 3, 5, 8, 13}

    def rule(output: Sequence[int]) -> set[int]:
        return allowed

    async with engine_on(ScriptedRunner(4), overlap=overlap) as engine:
        ruled = engine.submit([1, 2], params(20, allowed_token_ids=[*allowed]))
        plain = engine.submit([1, 2], params(20))
        found = [
            [token for delta in await deltas_of(stream) for token in delta.token_ids]
            for stream in (ruled, plain)
        ]

    def expect(allowed: Callable[[Sequence[int]], set[int]] | None) -> list[int]:
        return expected_output(
            [1, 2],
            seed=0,
            max_tokens=20,
            stop=frozenset({EOS}),
            vocab_size=VOCAB,
            allowed=allowed,
        )

    assert found == [expect(rule), expect(None)]
    assert {*found[0]} <= allowed


async def test_what_the_rules_cannot_mean_is_refused() -> None:
    async with engine_on(ScriptedRunner(4)) as engine:
        matcher = FakeMatcher(tokens_after(VOCAB))
        with pytest.raises(InvalidRequestError, match="allowed_token_ids: is not allowed beside"):
            engine.submit([1], params(allowed_token_ids=[1]), extras=held_to(matcher))
        with pytest.raises(InvalidRequestError, match="allowed_token_ids: the token id 50 "):
            engine.submit([1], params(allowed_token_ids=[1, VOCAB]))
        with pytest.raises(InvalidRequestError, match="bad_words: the model has no tokenizer"):
            engine.submit([1], params(bad_words=["a"]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids: must be a list of one or more integers"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids: must be a list of one or more"),
        ({"allowed_token_ids": range(40_000)}, "allowed_token_ids: at most 32768 entries"),
        ({"bad_words": ["a"] * 257}, "bad_words: at most 256 words"),
        ({"bad_words": ["a", " "]}, "bad_words: must be texts of 1 to 256 characters"),
        ({"bad_words": ["a" * 100] * 99}, "bad_words: at most 8192 characters are allowed in all"),
        ({"bad_words": ["a" * 257]}, "bad_words: must be texts of 1 to 256 characters"),
    ],
)
def test_rules_of_the_wrong_kind_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]
