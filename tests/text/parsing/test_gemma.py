"""Calls and thoughts as Gemma 4 writes them, and the grammar of such calls."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammars import ByteMatcher
from support.parsed_answers import GEMMA, PLAIN, Parsed, parse

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tool_grammars import Tool, tool_calls
from minisgl.text.parsing import formats
from minisgl.text.parsing.formats import BY_NAME
from minisgl.text.parsing.selection import choose_format
from minisgl.text.tokenizer import Tokenizer

Q = '<|"|>'


def call(name: str, inside: str) -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


@pytest.mark.parametrize("tokenizer", [GEMMA, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", "{}"),
        (f"a:{Q}x{Q}", '{"a": "x"}'),
        (f'a:{Q}"x" {{y}}, [z]: \\ \n{Q},b:2', r'{"a": "\"x\" {y}, [z]: \\ \n", "b": 2}'),
        ("n:-1.50,t:true,f:false,z:null", '{"n": -1.50, "t": true, "f": false, "z": null}'),
        (f"l:[1,{Q}a{Q},[],{{}}],o:{{k:{Q}v{Q},m:{{n:[2]}}}}",
         '{"l": [1, "a", [], {}], "o": {"k": "v", "m": {"n": [2]}}}'),
        (f"a : {Q}x{Q} , b : [ 1 , 2 ] ", '{"a": "x", "b": [1, 2]}'),
        (f"{Q}a b{Q}:1,c:celsius,", '{"a b": 1, "c": "celsius"}'),
    ],
)  # fmt: skip
def test_arguments_become_json(tokenizer: Tokenizer, inside: str, arguments: str) -> None:
    want = Parsed("", "", [("f.g-h", arguments)], 1)
    assert parse(tokenizer, "gemma4", call("f.g-h", inside)) == want


@pytest.mark.parametrize("tokenizer", [GEMMA, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "natural", "content", "calls"),
    [
        ("I look.\n" + call("f", "a:1") + call("f", ""), True, "I look.", ['{"a": 1}', "{}"]),
        ("call:f{a:1}", True, "call:f{a:1}", []),
        (f"<|tool_call>call:f{{a:{Q}x", True, "", ['{"a": "x"}']),
        (f"<|tool_call>call:f{{a:{Q}x", False, "", ['{"a": "x']),
        ("<|tool_call>call:f{a:[1,2", False, "", ['{"a": [1, ']),
        ("<|tool_call>call:f{a:[1<tool_call|>Done.", True, "Done.", ['{"a": [1]}']),
        (f"<|tool_call>call:f{{a:{Q}x<tool_call|>", True, "", ['{"a": "x"}']),
    ],
)
def test_answers(
    tokenizer: Tokenizer, answer: str, natural: bool, content: str, calls: list[str]
) -> None:
    got = parse(tokenizer, "gemma4", answer, natural=natural)
    assert got == Parsed("", content, [("f", each) for each in calls], len(calls))


def test_thoughts_have_a_title() -> None:
    form = choose_format(GEMMA, tool_parser="gemma4", reasoning_parser="think")
    assert form.reasoning is formats.THOUGHT
    for answer in ("<|channel>thought\nHm.\n<channel|>Yes.", "<|channel>Hm.<channel|>Yes."):
        assert parse(GEMMA, "gemma4", answer, reasoning_parser="think") == Parsed("Hm.", "Yes.")
    for prompt, opens in (("<|channel>thought\n", True), ("<|channel>thought\n<channel|>", False)):
        ids = GEMMA.encode(f"<|turn>model\n{prompt}")
        assert form.opens_reasoning(GEMMA, ids) is opens


SCHEMA = {
    "properties": {
        "sku": {"type": "string"},
        "note": {"type": "string"},
        "n": {"type": "integer"},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"$ref": "#/$defs/o"},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "x": {},
    },
    "$defs": {"o": {"properties": {"k": {"type": "string"}, "m": {"type": "integer"}}}},
}


@pytest.mark.parametrize("tokenizer", [GEMMA, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("inside", "arguments", "content"),
    [
        # Values in the quotes of JSON or Python, and = for a colon.
        ('note:"a, \\"b}",n:3', {"note": 'a, "b}', "n": 3}, ""),
        ("note:'it, is',n:3", {"note": "it, is", "n": 3}, ""),
        ('note="x",n=4', {"note": "x", "n": 4}, ""),
        ("l:[\"a, b\",'c'],n:1", {"l": ["a, b", "c"], "n": 1}, ""),
        ('"o": {"k": "v, w", "m": 2}, "n": 1', {"o": {"k": "v, w", "m": 2}, "n": 1}, ""),
        ("u:None,x:True", {"u": None, "x": True}, ""),
        # Types are those of the schema.
        ("sku:12345,note:true", {"sku": "12345", "note": "true"}, ""),
        ("sku:null,u:null,x:null", {"sku": "null", "u": None, "x": None}, ""),
        ("l:null,n:None,o:null", {"l": None, "n": None, "o": None}, ""),
        (f"n:{Q}null{Q},note:None", {"n": None, "note": "None"}, ""),
        ('note:{"a": 1, "b": 2},n:1', {"note": '{"a": 1, "b": 2}', "n": 1}, ""),
        (f"n:{Q}5{Q},l:{Q}[1, 2]{Q}", {"n": 5, "l": [1, 2]}, ""),
        # A text without quotes goes as far as what may follow it.
        ("note:hello, world,n:3", {"note": "hello, world", "n": 3}, ""),
        ("note:use {x} now, n: 1", {"note": "use {x} now", "n": 1}, ""),
        ("note:http://a.b/c?d=e,f=g,n:2", {"note": "http://a.b/c?d=e,f=g", "n": 2}, ""),
        ("l:[red wine, beer],note:", {"l": ["red wine", "beer"], "note": ""}, ""),
        ("o:{k:a, b, m:3}", {"o": {"k": "a, b", "m": 3}}, ""),
        # So does one with quotes: others in it are its own.
        (f"note:{Q}He said {Q}hi{Q}, ok: 1{Q},n:3", {"note": 'He said "hi", ok: 1', "n": 3}, ""),
        (f"note:{Q}print({{{Q}x{Q}}}){Q},n:1", {"note": 'print({"x"})', "n": 1}, ""),
        (f"l:[{Q}a {Q}b{Q}, c{Q},{Q}d{Q}]", {"l": ['a "b", c', "d"]}, ""),
        (f"l:[{Q}a{Q},5,null]", {"l": ["a", "5", "null"]}, ""),
        # A quote or a bracket is missing, or one too many.
        (f"note:{Q}x", {"note": "x"}, ""),
        (f"l:[{Q}a{Q},{Q}b{Q}}}", {"l": ["a", "b"]}, ""),
        # Keys that no schema has are keys, as the template writes them.
        (f"odd:{Q}a{Q},n:1,odder:3", {"odd": "a", "n": 1, "odder": 3}, ""),
        # What cannot be read is content.
        ("foo, n:1", {"n": 1}, "foo"),
        (f"n:1,n:2,note:a,note:{Q}b{Q}", {"n": 1, "note": "a"}, 'n:2 note:"b"'),
    ],
)
def test_a_slip_is_read_where_it_has_one_meaning(
    tokenizer: Tokenizer, inside: str, arguments: dict[str, Any], content: str
) -> None:
    got = parse(tokenizer, "gemma4", call("f", inside), tools={"f": SCHEMA})
    assert (got.objects, got.content) == ([("f", arguments)], content)


MARKERS = {text: 400 + index for index, text in enumerate(BY_NAME["gemma4"].markers)}


def held(parameters: dict[str, Any], *, strict: bool = False, required: bool = True) -> ByteMatcher:
    tool = Tool(name="f", parameters=parameters, strict=strict)
    structured = tool_calls([tool], BY_NAME["gemma4"].spelling, MARKERS, required=required)
    return ByteMatcher(structured, MARKERS)


def test_a_grammar_holds_calls() -> None:
    properties = {"s": {"enum": ["a", "b"], "type": "string"}, "n": {"type": "integer"}, "l": {}}
    parameters = {"properties": properties, "required": ["s"]}
    matcher = held(parameters)
    for inside in (f"s:{Q}a{Q}", f"n:3,s:{Q}b{Q}", f"l:[{{k:{Q}}}{Q}}},1.5,null],s:{Q}b{Q}"):
        assert matcher.accepts(call("f", inside))
        assert matcher.accepts(call("f", inside) * 2)
        assert parse(GEMMA, "gemma4", call("f", inside)).objects
    for inside in ("", f"s:{Q}c{Q}", "s:a", f"n:x,s:{Q}b{Q}", f"s:{Q}a{Q},n:3"):
        assert not matcher.accepts(call("f", inside))
    free = held(parameters, required=False)
    assert free.accepts("I look." + call("f", f"s:{Q}a{Q}")) and free.accepts("No.")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
         (f"{Q}abc{Q}",), (f"{Q}abcd{Q}", f"{Q}a1{Q}", "abc")),
        ({"type": "array", "items": {"type": "integer", "maximum": 3}, "minItems": 1,
          "maxItems": 2},
         ("[1]", "[1,3]"), ("[]", "[1,2,3]", "[4]", "null", "5", f"[{Q}1{Q}]")),
        ({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 1},
         ("[]", f"[{Q}a{Q}]", "[1]"), ("[1,1]", f"[{Q}b{Q}]")),
        ({"type": "object", "properties": {"b": {"type": "boolean"}, "A": {}}, "required": ["b"]},
         ("{b:true}", "{A:1,b:false}", "{A:{},b:true}"), ("{}", "{b:1}", "{b:true,A:1}", "null")),
        ({"type": "object", "additionalProperties": {"type": "null"}},
         ("{}", "{x:null,y:null}"), ("{x:1}", "[]")),
        ({"type": "object", "properties": {"x": {}}, "additionalProperties": True},
         ("{x:1}", "{y:1,z:2}", "{x:1,xy:1}"), ("{x:1,x:2}",)),
        ({"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
         ("null", "{l:{l:{}}}"), ("{l:null}", "{r:{}}", f"{Q}null{Q}")),
        ({"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 2}]},
         (f"{Q}ab{Q}",), (f"{Q}{Q}", f"{Q}abc{Q}")),
        ({"const": {"b": [1, "x"], "a": None}}, (f"{{a:null,b:[1,{Q}x{Q}]}}",), ("{}",)),
        ({}, ("1", "[{a:true}]", f"{Q}{Q}"), ("infinity", "01", "None", "x")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_a_grammar_holds_every_value_to_its_schema(
    schema: dict[str, Any], right: tuple[str, ...], wrong: tuple[str, ...], strict: bool
) -> None:
    tree = {
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/tree"}},
        "additionalProperties": False,
    }
    parameters = {"properties": {"v": schema}, "required": ["v"], "$defs": {"tree": tree}}
    matcher = held(parameters, strict=strict)
    for value in right:
        answer = call("f", f"v:{value}")
        assert matcher.accepts(answer)
        [(_, arguments)] = parse(GEMMA, "gemma4", answer, tools={"f": parameters}).objects
        jsonschema.validate(arguments, parameters)
    assert not any(matcher.accepts(call("f", f"v:{value}")) for value in wrong)


def test_what_a_grammar_cannot_hold_is_refused_by_strict_alone() -> None:
    inner = {"type": "array", "items": {"type": "string", "format": "date"}}
    parameters = {"properties": {"l": inner}}
    with pytest.raises(InvalidRequestError, match=r"at /properties/l/items/format: "):
        held(parameters, strict=True)
    assert held(parameters).accepts(call("f", f"l:[{Q}x{Q}]"))


def test_arguments_that_are_not_described_are_any() -> None:
    matcher = held({"type": "object"})
    for inside in ("", "a:1", f"a:{Q}x{Q},b:[]"):
        assert matcher.accepts(call("f", inside))


LEAVES = st.sampled_from(
    [
        {},
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": "string", "pattern": "b|^a", "maxLength": 3},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "boolean"},
        {"enum": ["a", "b, c", 3, None]},
        {"$ref": "#/$defs/p"},
    ]
)
KEYS = st.sampled_from(["a", "b", "C", "user_id", "z-1"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": [key for key in properties if key in required],
        },
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.sets(KEYS),
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=6,
)
LIKELY = [*map(ord, 'abcxyz019,:{}[]"<| nulltrefs-.')]


@settings(max_examples=30, deadline=None)
@given(objects(SCHEMAS), st.randoms(use_true_random=False))
def test_what_a_grammar_accepts_is_read_as_arguments_that_are_valid(
    schema: dict[str, Any], rng: random.Random
) -> None:
    parameters = {**schema, "$defs": {"p": {"type": "string", "pattern": "^[xy]{1,2}$"}}}
    answer = held(parameters).random_answer(rng, LIKELY)
    [(_, arguments), *_] = parse(GEMMA, "gemma4", answer, tools={"f": parameters}).objects
    jsonschema.validate(arguments, parameters)
