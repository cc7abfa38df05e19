"""Calls and thoughts as Gemma 4 writes them, and the grammar of such calls."""

from __future__ import annotations

import pytest
from support.grammars import ByteMatcher
from support.parsed_answers import GEMMA, PLAIN, Parsed, parse

from minisgl.grammar.tool_grammars import Tool, tool_calls
from minisgl.text.parsing import formats
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


def test_a_grammar_holds_calls() -> None:
    markers = {text: 400 + index for index, text in enumerate(formats.GEMMA4.markers)}
    properties = {"s": {"enum": ["a", "b"], "type": "string"}, "n": {"type": "integer"}, "l": {}}
    tool = Tool(name="f", parameters={"properties": properties, "required": ["s"]})
    spelling = formats.GEMMA4.spelling
    matcher = ByteMatcher(tool_calls([tool], spelling, markers, required=True), markers)
    for inside in (f"s:{Q}a{Q}", f"s:{Q}b{Q},n:3", f"s:{Q}b{Q},l:[{{k:{Q}}}{Q}}},1.5,null]"):
        assert matcher.accepts(call("f", inside))
        assert matcher.accepts(call("f", inside) * 2)
        assert parse(GEMMA, "gemma4", call("f", inside)).objects
    for inside in ("", f"s:{Q}c{Q}", "s:a", f"s:{Q}b{Q},n:x", f"n:3,s:{Q}a{Q}"):
        assert not matcher.accepts(call("f", inside))
    free = ByteMatcher(tool_calls([tool], spelling, markers, required=False), markers)
    assert free.accepts("I look." + call("f", f"s:{Q}a{Q}")) and free.accepts("No.")
