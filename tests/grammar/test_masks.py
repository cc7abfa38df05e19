"""What masks allow, against other ways to find it out."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.grammars import ByteMatcher, GrammarBench

from minisgl.grammar.matching import REFUSED
from minisgl.matcher import mask_words
from minisgl.request import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["fox", "dog", "日本"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/home"}]},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
    "$defs": {
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[a-z ]{1,8}$"}},
            "required": ["street"],
            "additionalProperties": False,
        }
    },
}
CHOICES = ("The quick brown fox", "The quick", "", "日本語", 'a"\\/\n\x7f\t', "<think>", "}")


def test_a_token_is_allowed_if_and_only_if_a_choice_goes_on_with_its_bytes(
    any_bench: GrammarBench,
) -> None:
    bench, texts = any_bench, [choice.encode() for choice in CHOICES]
    words = [id for id in range(bench.tokenizer.vocab_size) if id not in bench.control]
    matcher = bench.compile(StructuredOutput(choice=CHOICES)).matcher
    for seed in range(12):
        for taken, allowed in bench.walk(matcher(), random.Random(seed)):
            said = bench.bytes_of(taken)
            expected = {
                token_id
                for token_id in words
                if (data := bench.tokenizer.token_bytes(token_id))
                and any(text.startswith(said + data) for text in texts)
            }
            assert allowed == expected | (bench.eos if said in texts else set())


@pytest.mark.parametrize("pattern", [r"[a-z ]{3,9}!", r"(fox|dog|The )+[0-9]{2}", r"a/b\"?\\?x*"])
def test_a_token_is_allowed_if_and_only_if_a_regex_goes_on_with_its_bytes(
    any_bench: GrammarBench, pattern: str
) -> None:
    bench, compiled = any_bench, regex.compile(pattern.encode())
    matcher = bench.compile(StructuredOutput(regex=pattern)).matcher()
    for taken, allowed in bench.walk(matcher, random.Random(1)):
        said = bench.bytes_of(taken)
        expected = {
            token_id
            for token_id in range(bench.tokenizer.vocab_size)
            if token_id not in bench.control
            and (data := bench.tokenizer.token_bytes(token_id))
            and compiled.fullmatch(said + data, partial=True)
        }
        assert allowed == expected | (bench.eos if compiled.fullmatch(said) else set())


def test_a_token_is_allowed_if_and_only_if_a_schema_goes_on_with_its_bytes(
    any_bench: GrammarBench,
) -> None:
    bench, structured = any_bench, StructuredOutput(json_schema=PERSON, strict=True)
    words = [id for id in range(bench.size) if id not in bench.control]
    reference = ByteMatcher(structured)
    steps = bench.walk(bench.compile(structured).matcher(), random.Random(3))
    for number, (taken, allowed) in enumerate(steps):
        if taken:
            assert reference.goes_on_with(bench.tokenizer.token_bytes(taken[-1]))
        if number % 5:
            continue
        expected = {
            token_id
            for token_id in words
            if (data := bench.tokenizer.token_bytes(token_id))
            and reference.copy().goes_on_with(data)
        }
        assert allowed == expected | (bench.eos if reference.may_end else set())


@pytest.mark.parametrize("seed", range(10))
def test_random_answers_to_a_bounded_schema_end_and_are_valid(
    any_bench: GrammarBench, seed: int
) -> None:
    answer = any_bench.random_answer(StructuredOutput(json_schema=PERSON, strict=True), seed)
    jsonschema.validate(json.loads(answer), PERSON)


def _bounded(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text('abcXYZ_/~"é', min_size=1, max_size=4)
    objects = st.dictionaries(names, children, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties] or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.tuples(children, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {
            "type": "array",
            "items": parts[0],
            "minItems": parts[1],
            "maxItems": parts[1] + parts[2],
        }
    )
    return (
        objects
        | arrays
        | st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    )


EXACT_INTEGERS = st.integers(-(2**53), 2**53)
SCALARS = (
    st.just({"type": "boolean"})
    | st.just({"type": "null"})
    | st.integers(0, 9).map(lambda most: {"type": "string", "maxLength": most})
    | st.integers(-99, 99).map(
        lambda least: {"type": "integer", "minimum": least, "maximum": least + 37}
    )
    | st.lists(st.text(max_size=5) | EXACT_INTEGERS | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    )
)


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(schema=st.recursive(SCALARS, _bounded, max_leaves=6), seed=st.integers(0, 9))
def test_random_answers_to_generated_schemas_end_and_are_valid(
    bench: GrammarBench, schema: dict[str, Any], seed: int
) -> None:
    answer = bench.random_answer(StructuredOutput(json_schema=schema, strict=True), seed)
    jsonschema.validate(json.loads(answer), schema)


def test_control_tokens_are_allowed_nowhere_in_a_string(any_bench: GrammarBench) -> None:
    bench = any_bench
    matcher = bench.compile(StructuredOutput(json_schema={"type": "string"})).matcher()
    matcher.accept(bench.encode('"x')[-2:] if bench.tokenizer.drops_first_space else [])
    for taken, allowed in bench.walk(matcher, random.Random(2)):
        complete = bool(taken) and bench.bytes_of(taken).endswith(b'"') and len(taken) > 1
        assert not allowed & (bench.control - bench.eos)
        assert all(token_id < bench.tokenizer.vocab_size for token_id in allowed)
        if not complete:
            assert not allowed & bench.eos
        if len(taken) == 40:
            break


def test_the_characters_of_a_control_token_can_be_spelled(bench: GrammarBench) -> None:
    spelled = [token_id for char in '"<think>"' for token_id in bench.encode(char)]
    assert not bench.control & set(spelled)
    matcher = bench.compile(StructuredOutput(json_schema={"type": "string"})).matcher()
    matcher.accept(spelled)
    assert matcher.error is None
    assert matcher.may_end


def test_a_lark_grammar_names_control_tokens(bench: GrammarBench) -> None:
    [think] = bench.encode("<think>")
    matcher = bench.compile(StructuredOutput(grammar='start: "a" <think> "b"')).matcher()
    matcher.accept(bench.encode("a"))
    assert bench.allowed(matcher) == {think}
    matcher.accept([think, *bench.encode("b")])
    assert matcher.finished


def test_every_end_of_the_model_is_allowed_at_the_end_only(bench: GrammarBench) -> None:
    matcher = bench.compile(StructuredOutput(choice=["fox"])).matcher()
    assert not bench.allowed(matcher) & bench.eos
    matcher.accept(bench.encode("fox"))
    assert matcher.finished
    assert bench.allowed(matcher) == bench.eos
    for token_id in bench.eos:
        ended = matcher.copy()
        ended.accept([token_id])
        assert ended.error is None
        assert ended.finished


def test_white_space_between_parts_is_bounded(bench: GrammarBench) -> None:
    for seed in range(20):
        structured = StructuredOutput(json_schema={"type": "array", "maxItems": 0})
        answer = bench.random_answer(structured, seed)
        assert json.loads(answer) == []
        assert len(answer) <= 2 + 42


def test_an_empty_whitespace_pattern_allows_none(bench: GrammarBench) -> None:
    structured = StructuredOutput(json_schema=PERSON, whitespace_pattern="")
    answer = bench.random_answer(structured, 5)
    assert answer == json.dumps(json.loads(answer), ensure_ascii=False, separators=(",", ":"))


def test_a_token_that_is_not_allowed_fails_the_matcher_without_quoting_it(
    bench: GrammarBench,
) -> None:
    matcher = bench.compile(StructuredOutput(choice=["fox"])).matcher()
    matcher.accept(bench.encode("lazy"))
    assert matcher.error == REFUSED
    assert not matcher.finished
    assert matcher.copy().error == REFUSED


def test_a_copy_goes_its_own_way(bench: GrammarBench) -> None:
    matcher = bench.compile(StructuredOutput(choice=["ab", "cd"])).matcher()
    copied = matcher.copy()
    matcher.accept(bench.encode("a"))
    assert bench.allowed(matcher) == {*bench.encode("b")}
    assert bench.allowed(copied) >= {*bench.encode("a"), *bench.encode("c")}


def test_matchers_of_one_grammar_are_filled_by_several_threads(bench: GrammarBench) -> None:
    compiled = bench.compile(StructuredOutput(json_schema=PERSON))

    def answer(seed: int) -> object:
        *_, (taken, _) = bench.walk(compiled.matcher(), random.Random(seed))
        return json.loads(bench.bytes_of(taken))

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(answer, range(64))] == [*map(answer, range(64))]


def test_a_row_of_the_wrong_size_is_refused(bench: GrammarBench) -> None:
    matcher = bench.compile(StructuredOutput(json_object=True)).matcher()
    with pytest.raises(ValueError, match="size"):
        matcher.fill(np.zeros(mask_words(bench.size) - 1, np.uint32))
