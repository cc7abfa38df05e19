"""What is compiled, what is refused and how, and that nothing else waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.grammars import ByteMatcher, GrammarBench

from minisgl.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from minisgl.grammar.checking import Checker
from minisgl.grammar.compiler import Grammars
from minisgl.grammar.source import MAX_BYTES, Source
from minisgl.request import StructuredOutput
from minisgl.subprocesses import send

pytestmark = pytest.mark.usefixtures("started_workers")

FIELD = "response_format.json_schema.schema"


def refusal(bench: GrammarBench, **constraint: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        bench.compile(StructuredOutput(**constraint))
    return str(caught.value)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "not": ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "not"),
    "one_of": ({"items": {"oneOf": [{"type": "integer"}, {}]}}, "/items/oneOf", "oneOf"),
    "unique": ({"anyOf": [{"uniqueItems": True}]}, "/anyOf/0/uniqueItems", "uniqueItems"),
    "format": (
        {"properties": {"x/y": {"type": "string", "format": "colour"}}},
        "/properties/x~1y/format",
        "format",
    ),
    "definition": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"if": {}, "then": {}}}},
        "/$defs/a/if",
        "if",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_strict_names_field_keyword_and_place_of_what_cannot_be_enforced(
    bench: GrammarBench, case: str
) -> None:
    schema, place, _ = UNSUPPORTED[case]
    said = refusal(bench, json_schema=schema, strict=True, field=FIELD)
    assert said.startswith(f"{FIELD}: at {place}: ")
    assert "strict" in said


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_without_strict_unsupported_keywords_are_ignored_and_listed(
    bench: GrammarBench, case: str
) -> None:
    schema, _, keyword = UNSUPPORTED[case]
    compiled = bench.compile(StructuredOutput(json_schema=schema))
    assert keyword in compiled.ignored_keywords


def test_of_a_schema_that_is_enforced_nothing_is_ignored(bench: GrammarBench) -> None:
    schema = {"type": "object", "title": "t", "properties": {"a": {"description": "d"}}}
    assert bench.compile(StructuredOutput(json_schema=schema)).ignored_keywords == ()


WRONG: dict[str, tuple[Any, str]] = {
    "itself": ({"$ref": "#"}, "at /$ref: nothing can satisfy it."),
    "lookahead": ({"properties": {"a": {"pattern": "(?=a)b"}}}, "at /properties/a/pattern: "),
    "beside_it": (
        {"properties": {"a": {"pattern": r"\d"}, "b": {"pattern": r"^(?!x)\d+$"}}},
        "at /properties/b/pattern: ",
    ),
    "in_name": ({"patternProperties": {"a": {}, r"(?=x)\d": {}}}, "at /patternProperties: "),
    "remote": ({"items": {"$ref": "http://127.0.0.1/x"}}, "at /items/$ref: "),
    "missing": ({"items": {"$ref": "#/$defs/x"}}, "at /items/$ref: "),
    "type": ({"items": {"type": "text"}}, "at /items/type: Invalid type: text."),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 2}, "at /minimum: "),
    "no_number": ({"type": "integer", "minimum": "x"}, "at /minimum: "),
    "no_object": ({"properties": [1]}, "at /properties: "),
    "required": (
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "at /required: ",
    ),
    "overlap": ({"patternProperties": {"^a": {}, "a$": {"const": 1}}}, "at /patternProperties: "),
    "rounded": (
        {"items": {"enum": [1, {"a": [-(2**53) - 1]}]}},
        "at /items/enum: integers beyond ±2**53 cannot be enforced exactly; use texts instead.",
    ),
    "text": ('{"type": ', "is not valid JSON: "),
    "list": ("[1]", "must be an object, or its JSON text."),
    "false": (False, "is false, which no answer satisfies."),
    "false_text": ("false", "is false, which no answer satisfies."),
    "not_json": ({"enum": [{1, 2}]}, "is not valid JSON: "),
    "infinite": ({"const": float("inf")}, "is not valid JSON: "),
    "surrogate": ({"const": "\ud800"}, "is not Unicode text (a lone surrogate)."),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_a_schema_that_is_wrong_is_refused_with_its_place(
    bench: GrammarBench, case: str, strict: bool
) -> None:
    schema, expected = WRONG[case]
    said = refusal(bench, json_schema=schema, strict=strict, field=FIELD)
    assert said.startswith(f"{FIELD}: {expected}")
    assert "\n" not in said


def test_a_schema_may_be_json_text_or_true(bench: GrammarBench) -> None:
    assert bench.random_answer(StructuredOutput(json_schema='{"const": 1}'), 0) == "1"
    assert bench.compile(StructuredOutput(json_schema=True)).matcher().error is None


def test_the_compiler_options_of_a_schema_are_its_server_s(bench: GrammarBench) -> None:
    schema = {"type": "array", "maxItems": 0, "x-guidance": {"whitespace_pattern": "x+"}}
    for seed in range(5):
        assert "x" not in bench.random_answer(StructuredOutput(json_schema=schema), seed)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"regex": "(a|b"}, "structured.regex: regex parse error: "),
        ({"regex": r"\bab"}, "structured.regex: lookarounds not supported"),
        ({"regex": "a[^\\w\\W]"}, "structured.regex: nothing can satisfy it."),
        ({"grammar": "start: x"}, 'structured.grammar: line 1, column 8: unknown name: "x".'),
        (
            {"grammar": 'start: a\na: "a" <[999999]>'},
            "structured.grammar: line 2, column 4: the token id 999999 is out of vocab",
        ),
        ({"grammar": 'start: "a'}, "structured.grammar: line 1, column 10: a text or a regex that"),
        (
            {"grammar": 'root ::= "a"\n| y'},
            "structured.grammar: as GBNF (it has `::=`): line 2, column 3: there is no rule `y`",
        ),
        (
            {"grammar": f"root ::= {'(' * 2000}"},
            "structured.grammar: it is nested too deeply",
        ),
        ({"grammar": ""}, "structured.grammar: "),
        ({"choice": ["\ud800"]}, "structured.choice: is not Unicode text (a lone surrogate)."),
        ({"regex": "a" * (MAX_BYTES + 1)}, f"structured.regex: has {MAX_BYTES + 1} bytes; "),
        ({"json_object": True, "whitespace_pattern": "("}, "structured.json_object: regex parse"),
        (
            {"json_object": True, "whitespace_pattern": "[ \n]{1,4}|x"},
            "structured.json_object: its whitespace_pattern may match blanks only",
        ),
        ({"structural_tag": {"format": {}}}, "structured.structural_tag: the nested form"),
        ({"structural_tag": {"structures": []}}, "structured.structural_tag: it needs"),
        (
            {"structural_tag": {"structures": [{"begin": "x", "end": ""}], "triggers": ["<"]}},
            "structured.structural_tag: structures.0.begin must start with",
        ),
        (
            {
                "structural_tag": {
                    "structures": [
                        {"begin": f"<t{i}>", "schema": {"type": "object"}, "end": "</t>"}
                        for i in range(3000)
                    ],
                    "triggers": [f"<t{i}>" for i in range(3000)],
                }
            },
            "structured.structural_tag: it is too large",
        ),
    ],
)
def test_other_constraints_that_are_wrong_are_refused_with_the_reason(
    bench: GrammarBench, constraint: dict[str, Any], expected: str
) -> None:
    said = refusal(bench, **constraint)
    assert said.startswith(expected)
    assert len(said) < 700


def test_blanks_may_be_given_as_the_class_of_blanks_which_is_json_s(bench: GrammarBench) -> None:
    structured = StructuredOutput(json_object=True, whitespace_pattern=r"[\s]{1,3}|\\{0}")
    matcher = bench.compile(structured).matcher()
    matcher.accept(bench.encode("{"))
    allowed = {bench.tokenizer.token_bytes(token_id) for token_id in bench.allowed(matcher)}
    assert {b"}", b" ", b"\t", b"\r", b"\n"} <= allowed
    assert not {b"\x0b", b"\x0c", b"\xc2"} & allowed


def chain(length: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}' for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "z"'


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"maxLength": i} for i in range(count)}}


def doubling(keyword: str, count: int) -> dict[str, Any]:
    """Each definition refers twice to the one before."""
    defs: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "string"}}}}
    for i in range(1, count + 1):
        before = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {keyword: [before, {"properties": {f"y{i}": {}}, "allOf": [before]}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{count}"}


ACCEPTED: dict[str, dict[str, Any]] = {
    "nested_plus": {"regex": "(a+)+b"},
    "overlapping": {"regex": "(x+x+)+y{1000}"},
    "long": {"regex": ".{0,5000}"},
    "many_stars": {"regex": "(.*a){30}"},
    "repetition": {"regex": "a{4294967295}"},
    "powers": {"regex": "((a{0,100}){0,100}){0,100}"},
    "max_length": {"json_schema": {"type": "string", "maxLength": 100_000}},
    "max_items": {"json_schema": {"type": "array", "maxItems": 10_000}},
    "min_items": {"json_schema": {"type": "array", "minItems": 100_000}},
    "enum": {"json_schema": {"enum": [f"value{i}" for i in range(2000)]}},
    "optional": {"json_schema": optional(200)},
    "references": {"json_schema": doubling("anyOf", 2)},
    "all_of": {"json_schema": doubling("allOf", 12)},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" | '},
    "choices": {"choice": [f"choice {i}" for i in range(2000)]},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_large_and_ambiguous_constraints_are_compiled(bench: GrammarBench, case: str) -> None:
    matcher = bench.compile(StructuredOutput(**ACCEPTED[case])).matcher()
    assert bench.allowed(matcher)


REFUSED: dict[str, dict[str, Any]] = {
    "stack": {"grammar": chain(30_000)},  # overflows it
    "star_chain": {"regex": "[^a]*" * 300 + "[^b]*" * 300},
    "intersection": {  # minutes
        "json_schema": {
            "allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(20)]
        }
    },
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 999_999_937}},
    "nested": {"json_schema": nested(200)},
    "nested_far": {"json_schema": nested(3000)},
    "doubling": {"json_schema": doubling("anyOf", 22)},
    "parentheses": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "gbnf_chain": {
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000))
        + '\nr20000 ::= "x"'
    },
}


@pytest.mark.parametrize("case", REFUSED)
async def test_pathological_constraints_are_refused_and_the_loop_goes_on(
    bench: GrammarBench, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.grammar.compiler.QUICK_SECONDS", 0.1)
    monkeypatch.setattr("minisgl.grammar.compiler.SLOW_SECONDS", 0.2)
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(InvalidRequestError):
        await grammars.compile(StructuredOutput(**REFUSED[case]))
    assert (await grammars.compile(StructuredOutput(choice=["a"]))).matcher().error is None
    assert ticks
    ticking.cancel()
    grammars.close()
    await asyncio.to_thread(grammars.join)


def plain_properties(count: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}}


def test_an_object_with_hundreds_of_optional_properties_is_followed_to_its_end(
    bench: GrammarBench,
) -> None:
    matcher = bench.compile(StructuredOutput(json_schema=plain_properties(650))).matcher()
    matcher.accept(bench.encode('{"p0": 1, "p300": 2, "p649": 3}'))
    assert matcher.error is None and matcher.may_end


TOO_WIDE: dict[str, dict[str, Any]] = {
    "repeated": {"grammar": 'start: (((((("a"{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}'},
    "nested": {
        "json_schema": {
            "type": "object",
            "properties": {"a": {"type": "array", "minItems": 1, "items": plain_properties(3000)}},
            "required": ["a"],
        }
    },
}


@pytest.mark.parametrize("case", TOO_WIDE)
def test_what_no_answer_could_be_followed_through_is_refused_when_it_is_compiled(
    bench: GrammarBench, case: str
) -> None:
    assert "too many ways to go on" in refusal(bench, **TOO_WIDE[case])


async def test_others_pass_a_grammar_that_is_slow(bench: GrammarBench) -> None:
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    slow = asyncio.ensure_future(grammars.compile(StructuredOutput(**REFUSED["intersection"])))
    for number in range(5):
        await grammars.compile(StructuredOutput(choice=[f"{number}"]))
    assert not slow.done()
    grammars.close()
    with pytest.raises(EngineStoppedError):
        await slow
    with pytest.raises(EngineStoppedError):
        await grammars.compile(StructuredOutput(choice=["a"]))
    await asyncio.to_thread(grammars.join)


def test_a_constraint_is_compiled_once_for_the_same_text_and_options(bench: GrammarBench) -> None:
    def compiled(**options: Any) -> object:
        return bench.compile(StructuredOutput(json_schema={"const": "once"}, **options))

    bench.seconds.clear()
    first = compiled()
    assert compiled() is first
    assert compiled(strict=True) is not first
    assert compiled(whitespace_pattern=" ") is not first
    assert [seconds is None for seconds in bench.seconds] == [False, True, False, False]


async def test_requests_at_the_same_time_share_a_compilation(bench: GrammarBench) -> None:
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    structured = StructuredOutput(choice=["a", "b"])
    waiting = [asyncio.ensure_future(grammars.compile(structured)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # a client that leaves takes nothing from others
    results = await asyncio.gather(*waiting[1:])
    assert len({id(result) for result in results}) == 1
    grammars.close()
    await asyncio.to_thread(grammars.join)


async def test_the_cache_forgets_the_least_recently_used(
    bench: GrammarBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.grammar.compiler.MAX_CACHED", 3)
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    kept = await grammars.compile(StructuredOutput(choice=["kept"]))
    old = await grammars.compile(StructuredOutput(choice=["old"]))
    for number in range(2):
        await grammars.compile(StructuredOutput(choice=["kept"]))
        await grammars.compile(StructuredOutput(regex=str(number)))
    assert await grammars.compile(StructuredOutput(choice=["kept"])) is kept
    assert await grammars.compile(StructuredOutput(choice=["old"])) is not old
    grammars.close()
    await asyncio.to_thread(grammars.join)


def test_a_model_without_an_end_takes_no_constraints(bench: GrammarBench) -> None:
    with pytest.raises(InvalidRequestError, match="no token that ends an answer"):
        Grammars(bench.tokenizer, bench.size, [])


def test_closing_ends_the_process_while_it_works(bench: GrammarBench) -> None:
    source = Source("json_schema", json.dumps(REFUSED["intersection"]["json_schema"]))
    checker = Checker(bench.grammars._vocabulary.outline, 60.0)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(checker.check, source)
        while checker._process is None:
            time.sleep(0.01)
        checker.close()
        with pytest.raises(EngineStoppedError):
            working.result()
    checker.wait()


def test_a_process_that_was_killed_from_outside_is_started_again(bench: GrammarBench) -> None:
    checker = Checker(bench.grammars._vocabulary.outline, 60.0)
    assert checker.check(Source("regex", "a")).reason == ""
    process = checker._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    while process.poll() is None:
        time.sleep(0.01)
    assert checker.check(Source("regex", "a")).reason == ""
    checker.close()
    checker.wait()


def test_the_process_ends_with_the_engine_even_if_that_was_killed(bench: GrammarBench) -> None:
    checker = Checker(bench.grammars._vocabulary.outline, 0.1)
    assert checker.check(Source("regex", "a")).reason == ""
    process = checker._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    source = Source("json_schema", json.dumps(REFUSED["intersection"]["json_schema"]))
    send(process.stdin, msgspec.json.encode(source))
    process.stdin.close()
    process.stdout.close()  # nobody is there to hear that it was too slow
    assert process.wait() == 0


SLOW = StructuredOutput(**REFUSED["intersection"])


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def closed(grammars: Grammars) -> None:
    grammars.close()
    await asyncio.to_thread(grammars.join)


async def test_what_nobody_waits_for_any_more_is_not_compiled(bench: GrammarBench) -> None:
    seconds: list[float | None] = []
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos, observe=seconds.append)
    left = [
        asyncio.ensure_future(grammars.compile(structured))
        for structured in (SLOW, *(StructuredOutput(choice=[f"{i}"]) for i in range(20)))
    ]
    twice = StructuredOutput(choice=["3"])
    staying = asyncio.ensure_future(grammars.compile(twice))
    await settle()
    for each in left:
        each.cancel()
    assert (await staying).matcher().error is None
    assert len([each for each in seconds if each is not None]) == 1
    again = await grammars.compile(StructuredOutput(choice=["5"]))  # which was dropped
    assert again.matcher().error is None
    await closed(grammars)


async def test_clients_take_turns(bench: GrammarBench) -> None:
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    ended: list[str] = []

    async def compile(client: str, text: str) -> None:
        await grammars.compile(StructuredOutput(choice=[text]), client)
        ended.append(text)

    texts = [("many", f"{i}") for i in range(9)] + [("few", "a"), ("few", "b"), ("one", "c")]
    await asyncio.gather(*(compile(*each) for each in texts))
    assert ended == ["0", "1", "a", "c", "2", "b", "3", "4", "5", "6", "7", "8"]
    await closed(grammars)


async def test_a_client_with_too_many_grammars_in_line_is_told_to_come_back(
    bench: GrammarBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.grammar.compiler.MAX_WAITING", 4)
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)

    def choice(text: str, client: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(grammars.compile(StructuredOutput(choice=[text]), client))

    many = [choice(f"{i}", "many") for i in range(7)]
    await settle()
    others = [choice("a", "other"), choice("b", "other"), choice("c", "other")]
    results = await asyncio.gather(*many, *others, return_exceptions=True)
    refused = [isinstance(result, QueueFullError) for result in results]
    assert refused == [False] * 5 + [True] * 2 + [False] * 2 + [True]
    retried = await grammars.compile(StructuredOutput(choice=["6"]), "many")
    assert retried.matcher().error is None
    await closed(grammars)


async def test_the_cache_counts_the_memory_that_grammars_take(
    bench: GrammarBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(bench.tokenizer, bench.size, bench.eos)
    small, large = (
        StructuredOutput(choice=["a"]),
        StructuredOutput(json_schema=plain_properties(300)),
    )
    first, other = await grammars.compile(small), await grammars.compile(large)
    text = len(json.dumps(large.json_schema))
    assert other.num_bytes > 20 * text and other.num_bytes > 5 * first.num_bytes > 0
    monkeypatch.setattr("minisgl.grammar.compiler.MAX_CACHED_BYTES", other.num_bytes * 3 // 2)
    assert await grammars.compile(small) is first
    await grammars.compile(StructuredOutput(json_schema=plain_properties(301)))
    assert await grammars.compile(small) is first
    assert await grammars.compile(large) is not other
    await closed(grammars)


@pytest.mark.parametrize(
    ("grammar", "answers", "others"),
    [
        (r'root ::= "\u00e4" "\U0001F600" "\\u00e4" "\u0041"', ["ä😀\\u00e4A"], ["a", "ä😀ä"]),
        (r"root ::= [\U0001F600-\U0001F64F]+ [\u00e4-\u00fc\u002d]", ["😀🙏ä", "😀-"], ["a", "😀"]),
    ],
)
def test_gbnf_names_characters_by_their_numbers(
    grammar: str, answers: list[str], others: list[str]
) -> None:
    matcher = ByteMatcher(StructuredOutput(grammar=grammar))
    assert [matcher.accepts(answer) for answer in answers] == [True] * len(answers)
    assert [matcher.accepts(other) for other in others] == [False] * len(others)


@pytest.mark.parametrize("number", ["D800", "DFFF"])
def test_gbnf_with_half_a_character_is_refused(bench: GrammarBench, number: str) -> None:
    said = refusal(bench, grammar=rf'root ::= "\u{number}"')
    place = "as GBNF (it has `::=`): line 1, column 11"
    assert said == rf"structured.grammar: {place}: \u{number} is not a character."


def test_limits_may_be_written_as_decimals() -> None:
    schema = {"items": {"enum": [{"maxItems": 1.5}, "a"], "maxLength": 1.0}, "maxItems": 2.0}
    matcher = ByteMatcher(StructuredOutput(json_schema={"type": "array", **schema}, strict=True))
    assert matcher.accepts('["a", "a"]') and matcher.accepts('[{"maxItems": 1.5}]')
    assert not matcher.accepts('["a", "a", "a"]')


def test_under_draft_7_an_id_beside_a_reference_does_not_count() -> None:
    """The case of JSON-Schema-Test-Suite; later drafts have it count."""
    definitions = {
        "foo": {"$id": "http://localhost:1234/sibling_id/foo.json", "type": "string"},
        "base_foo": {"$id": "foo.json", "type": "number"},
    }
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://localhost:1234/sibling_id/base/",
        "definitions": definitions,
        "allOf": [{"$id": "http://localhost:1234/sibling_id/", "$ref": "foo.json"}],
    }
    matcher = ByteMatcher(StructuredOutput(json_schema=schema, strict=True))
    assert matcher.accepts("1") and not matcher.accepts('"a"')
    del schema["$schema"]
    matcher = ByteMatcher(StructuredOutput(json_schema=schema, strict=True))
    assert matcher.accepts('"a"') and not matcher.accepts("1")


def test_properties_come_in_the_order_of_the_schema() -> None:
    properties = {name: {"type": "integer"} for name in ("b", "a", "c")}
    schema = {"type": "object", "properties": properties, "required": ["c", "a"]}
    matcher = ByteMatcher(StructuredOutput(json_schema=schema))
    assert matcher.accepts('{"b": 1, "a": 2, "c": 3, "d": 4}')
    assert matcher.accepts('{"a": 2, "c": 3}')
    assert not matcher.accepts('{"a": 1, "b": 2, "c": 3}')
    assert not matcher.accepts('{"d": 4, "a": 2, "c": 3}')
