"""Tool calls in all formats. `parse` replays each answer in all splits of its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.parsed_answers import (
    DEEPSEEK,
    GLM,
    HARMONY,
    LLAMA,
    MISTRAL,
    OLD_MISTRAL,
    PLAIN,
    QWEN,
    Parsed,
    fed_in_runs,
    form_of,
    parse,
    parsed,
    replay,
)
from support.tool_cases import hermes
from support.toy_tokenizers import spelled_backend, wrap
from tokenizers import Tokenizer as Backend

from minisgl.text.tokenizer import Tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
# Arguments as models write them, which have to come out letter for letter.
ARGUMENTS = [
    "{}",
    '{"city": "Köln"}',
    '{"city":"K\\u00f6ln","days":  3.50e+1}',
    '{"command": "mkdir test/{a,b && echo \\"}\\" \\\\"}',
    '{"text": "</tool_call> <tool_call> ]} [ARGS] {"}',
    '{"emoji": "👨‍👩‍👧", "escaped": "\\ud83d\\udc4d", "zero": "\\u0000"}',
    '{"nested": {"list": [1, [2, {"a": []}]], "none": null}, "big": 12345678901234567890}',
    '{\n  "city": "Ulm"\n}',
    '{"path": "C:\\\\"}',
]


# -- hermes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_hermes_arguments_come_out_letter_for_letter(tokenizer: Tokenizer, arguments: str) -> None:
    answer = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert parse(tokenizer, "hermes", answer) == Parsed("", "", [("f", arguments)], 1)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("Hello {you}: <tool> \n", "Hello {you}: <tool> \n", []),
        (call("f", '{"a": 1}') + "\n", "", [("f", '{"a": 1}')]),
        (
            "\n".join(call(name, "{}") for name in "fgh"),
            "",
            [("f", "{}"), ("g", "{}"), ("h", "{}")],
        ),
        (call("f", "{}") + call("f", "{}"), "", [("f", "{}"), ("f", "{}")]),
        ("I look.\n\n" + call("f", "{}") + "\n\nDone. \n", "I look.\n\nDone. \n", [("f", "{}")]),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f", "parameters": {"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "extra": [1, "}"], "arguments": {}, "id": 3}</tool_call>',
            "",
            [("f", "{}")],
        ),
        # The closing tag is missing, and so is a brace.
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', "x", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>', "",
         [("no_such_tool", "{}")]),
        # No calls.
        ('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
        ("<tool_call> is a tag", "<tool_call> is a tag", []),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("<tool_call>", "<tool_call>", []),
        ('<tool_call>{"name"', '<tool_call>{"name"', []),
        ("<tool_ca", "<tool_ca", []),
    ],
)  # fmt: skip
def test_hermes_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(tokenizer, "hermes", answer) == Parsed("", content, calls, len(calls))


def test_an_escaped_lone_surrogate_stays_an_escape() -> None:
    inside = '{"a": "\\ud800"}'
    for arguments in (inside, json.dumps(json.loads(inside), ensure_ascii=True)):
        assert parse(QWEN, "hermes", call("f", arguments)).calls == [("f", inside)]
    broken = '"{\\"a\\": \\"\\ud800\\"}"'
    assert parse(QWEN, "hermes", call("f", broken)).calls == [("f", broken)]


def test_a_call_that_is_cut_keeps_what_the_model_wrote() -> None:
    answer = '<tool_call>\n{"name": "f", "arguments": {"a": "x{'
    for natural in (True, False):
        got = parse(QWEN, "hermes", answer, natural=natural)
        assert got == Parsed("", "", [("f", '{"a": "x{')], 1)


# -- qwen3_coder -----------------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "items": {"type": "array"},
    "thing": {"$ref": "#/$defs/Thing"},
    "choice": {"enum": ["a", "1"]},
    "self": {"$ref": "#/properties/self"},
    "a<b>": {"type": "string"},
    "a<b>c>d": {"type": "integer"},
}
XML_TOOLS = {"f": {"type": "object", "properties": TYPES, "$defs": {"Thing": {"type": "object"}}}}


def xml_call(*parameters: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters)
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "5", '"5"'),
        ("text", 'a "b" \\ <i>x</i>\n\n  y\t👍🏽', '"a \\"b\\" \\\\ <i>x</i>\\n\\n  y\\t👍🏽"'),
        ("text", "", '""'),
        ("text", "\nx\n", '"\\nx\\n"'),
        ("text", "a </parameter> b </function> c", '"a </parameter> b </function> c"'),
        ("text", "a </tool_call> b\n</tool_call>", '"a </tool_call> b\\n</tool_call>"'),
        ("text", "</parameter>\n<div>", '"</parameter>\\n<div>"'),
        ("whole", "5", "5"),
        ("whole", "five", '"five"'),
        ("whole", "05", '"05"'),
        ("real", "5.50", "5.50"),
        ("real", "NaN", '"NaN"'),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("flag", "yes", '"yes"'),
        ("maybe", "null", "null"),
        ("maybe", "5", '"5"'),
        ("either", "5", "5"),
        ("either", "x", '"x"'),
        ("items", '[1,  "a"]', '[1,  "a"]'),
        ("items", "['a', True, None]", '["a", true, null]'),
        ("items", "{1}", '"{1}"'),
        ("thing", '{"a": 1.0}', '{"a": 1.0}'),
        ("thing", "broken {", '"broken {"'),
        ("choice", "1", '"1"'),
        ("self", "1", "1"),
        ("unknown", "5", "5"),
        ("unknown", "five", '"five"'),
    ],
)
def test_xml_values_have_the_type_of_the_schema(
    tokenizer: Tokenizer, name: str, text: str, value: str
) -> None:
    got = parse(tokenizer, "qwen3_coder", xml_call((name, text)), tools=XML_TOOLS)
    assert got == Parsed("", "", [("f", f'{{"{name}": {value}}}')], 1)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        True,
        {"properties": None},
        {"properties": [1]},
        {"properties": {"text": True}},
        {"properties": {"text": {"type": [1, {}]}}},
        {"properties": {"text": {"$ref": "#/$defs/1/x"}}, "$defs": [1]},
        {"properties": {"text": {"$ref": "https://example.org"}}},
        {"properties": {"text": {"enum": []}}},
        {"properties": {"text": {"anyOf": [None, {"$ref": "#/properties/text"}]}}},
    ],
)
def test_a_schema_that_says_nothing_leaves_json_as_it_is(schema: Any) -> None:
    got = parse(QWEN, "qwen3_coder", xml_call(("text", "5")), tools={"f": schema})
    assert got.calls == [("f", '{"text": 5}')]
    got = parse(QWEN, "pythonic", "[f(text=5)]", tools={"f": schema})
    assert got.calls == [("f", '{"text": 5}')]


def test_a_deeply_nested_schema_is_followed_to_its_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20_000):
        schema = {"anyOf": [schema]}
    answer = xml_call(("text", "5"))
    form = form_of(QWEN, "qwen3_coder")
    tools = {"f": {"properties": {"text": schema}}}
    assert parsed(replay(QWEN, form, QWEN.encode(answer), tools=tools)).calls == [
        ("f", '{"text": "5"}')
    ]


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "arguments"),
    [
        (xml_call(), "", ["{}"]),
        ("Well.\n" + xml_call(), "Well.", ["{}"]),
        ("\n".join([xml_call(("text", "a")), xml_call()]), "", ['{"text": "a"}', "{}"]),
        (
            xml_call(("text", "a"), ("whole", "1"), ("text", "b")),
            "<parameter=text>\nb\n</parameter>",
            ['{"text": "a", "whole": 1}'],
        ),
        # The tag around is forgotten, in front or behind.
        ("<function=f>\n<parameter=text>\na\n</parameter>\n</function>", "", ['{"text": "a"}']),
        ("<function=f>\n</function>\n</tool_call>\nx", "x", ["{}"]),
        ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "",
         ['{"text": "a"}']),
        (
            "<tool_call>\n<function=f>\n</function>\n<function=f>\n</function>\n</tool_call>",
            "",
            ["{}", "{}"],
        ),
        ("<tool_call>\n<function=f>\n<parameter=text>\na\n</tool_call>", "", ['{"text": "a"}']),
        ("<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>", "",
         ['{"text": "a"}']),
        # A closing of a parameter is missing.
        (
            "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=whole>\n1\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            ['{"text": "a", "whole": 1}'],
        ),
        (
            "<tool_call>\n<function=f>\n<parameter=text>\n<parameter=whole>\n1\n"
            "<parameter=either>\nb\n</function>\n</tool_call>",
            "",
            ['{"text": "", "whole": 1, "either": "b"}'],
        ),
        (
            xml_call(("text", "a <parameter=whole>\n<parameter=other>\n<parameter=text>")),
            "",
            ['{"text": "a <parameter=whole>\\n<parameter=other>\\n<parameter=text>"}'],
        ),
        # Names with what ends others.
        (
            xml_call(("a<b>", "1"), ("a<b>c>d", "1"), ("text", "x")),
            "",
            ['{"a<b>": "1", "a<b>c>d": 1, "text": "x"}'],
        ),
        (
            xml_call(("text", "x"), ("no<pe>", "1"), ("whole", "2")),
            "",
            ['{"text": "x", "no<pe>": 1, "whole": 2}'],
        ),
        # The model ends without closing anything.
        ("<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>", "", ['{"text": "a"}']),
        ("<tool_call>\n<function=f>\n<parameter=whole>\n1", "", ['{"whole": 1}']),
        ("<tool_call>\n<function=f>\n<parameter=text>\na\n", "", ['{"text": "a"}']),
        ("<tool_call>\n<function=f>", "", ["{}"]),
        # No calls.
        ("Write `<function=f>` for it.", "Write `<function=f>` for it.", []),
        ("<tool_call> what?", "<tool_call> what?", []),
        ("<function=", "<function=", []),
        ("<tool_call>\n<function=a<b\nc", "<tool_call>\n<function=a<b\nc", []),
    ],
)  # fmt: skip
def test_xml_answers(tokenizer: Tokenizer, answer: str, content: str, arguments: list[str]) -> None:
    got = parse(tokenizer, "qwen3_coder", answer, tools=XML_TOOLS)
    assert got == Parsed("", content, [("f", text) for text in arguments], len(arguments))


@pytest.mark.parametrize(
    ("parameter", "arguments"),
    [
        ("text>\nab\n", '{"text": "ab\\n'),
        ("text>\nab", '{"text": "ab'),
        ("whole>\n12", '{"whole": '),
        ("whole>\n12\n</parameter>\n", '{"whole": 12'),
        ("te", "{"),
    ],
)
def test_an_xml_call_that_is_cut_is_not_completed(parameter: str, arguments: str) -> None:
    answer = f"<tool_call>\n<function=f>\n<parameter={parameter}"
    got = parse(QWEN, "qwen3_coder", answer, natural=False, tools=XML_TOOLS)
    assert got == Parsed("", "", [("f", arguments)], 1)


# -- llama3_json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_llama_arguments_come_out_letter_for_letter(arguments: str) -> None:
    answer = f'{{"name": "f", "parameters": {arguments}}}'
    assert parse(LLAMA, "llama3_json", answer) == Parsed("", "", [("f", arguments)], 1)


@pytest.mark.parametrize("tokenizer", [LLAMA, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n{"type": "function", "name": "f", "parameters": {}} \n', "", [("f", "{}")]),
        ('{"parameters": {"a": 1}, "name": "g"}', "", [("g", '{"a": 1}')]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": ";"}}',
            "",
            [("f", "{}"), ("g", '{"a": ";"}')],
        ),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('Now: <|python_tag|>{"name": "f", "parameters": {}}', "Now:", [("f", "{}")]),
        ('{"name": "known"}', "", [("known", "{}")]),
        ('{"name": "f", "parameters": {}}; and {', "and {", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"a": 1} {', '{"a": 1} {', [("f", "{}")]),
        # No calls.
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"name": "unknown"}', '{"name": "unknown"}', []),
        ('{"answer": {"name": "f", "parameters": {}}}',
         '{"answer": {"name": "f", "parameters": {}}}', []),
        (' {"na', ' {"na', []),
        ('It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
        ("{}", "{}", []),
        ('{"name": "f", "parameters": {no json}', '{"name": "f", "parameters": {no json}', []),
        # In a text: calls of the tools that are offered.
        ('It is: {"name": "known", "parameters": {"a": [{"b": "}"}]}} Is it?', "It is:\n\nIs it?",
         [("known", '{"a": [{"b": "}"}]}')]),
        ('A: {"name": "known", "parameters": {}}; {"name": "known", "arguments": {"a": 1}} b {c}',
         "A:\n\nb {c}", [("known", "{}"), ("known", '{"a": 1}')]),
        ('{"name": "known", "parameters": {}} and { "parameters": {}, "name": "known"}', "and",
         [("known", "{}"), ("known", "{}")]),
        ('{"name": "known", "parameters": {{"name": "known", "parameters": {}}',
         '{"name": "known", "parameters": {', [("known", "{}")]),
        ('No {"name": "f", "parameters": {"name": "known", "parameters": {}}} call.',
         'No {"name": "f", "parameters": {"name": "known", "parameters": {}}} call.', []),
        ('{"tools": [{"name": "known", "parameters": {}}]} {"name": "known", "parameters": {}}',
         '{"tools": [{"name": "known", "parameters": {}}]}', [("known", "{}")]),
        ('A {"name": "known", "age": {"name": "known", "parameters": {}}}',
         'A {"name": "known", "age": {"name": "known", "parameters": {}}}', []),
        ('A {"name": "known", "parameters": {a: 1}}', 'A {"name": "known", "parameters": {a: 1}}',
         []),
        ('if (a) { "b"; } ${c} {"d"', 'if (a) { "b"; } ${c} {"d"', []),
    ],
)  # fmt: skip
def test_llama_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    got = parse(tokenizer, "llama3_json", answer, tools={"known": {}})
    assert got == Parsed("", content, calls, len(calls))


# -- pythonic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ('[f(a=1, b="x"), g()]', "", [("f", '{"a": 1, "b": "x"}'), ("g", "{}")]),
        (' [f(a=1)]\n', "", [("f", '{"a": 1}')]),
        ("[get-it.now(a=[1, (2, 3)], b={'k': True, 'n': None})]", "",
         [("get-it.now", '{"a": [1, [2, 3]], "b": {"k": true, "n": null}}')]),
        ("[f(a=true, b=null, c=-1.5)]", "", [("f", '{"a": true, "b": null, "c": -1.5}')]),
        ("""[f(a=")'] (", b=')"] (', c='''it's "q" \\'''  ''')]""", "",
         [("f", json.dumps({"a": ")'] (", "b": ')"] (', "c": "it's \"q\" '''  "}))]),
        ('[f(a="", b=\'\', c="ö\\n\\u00e9 👍🏽 \\d")]', "",
         [("f", '{"a": "", "b": "", "c": "ö\\né 👍🏽 \\\\d"}')]),
        (
            """[f(from="a, if=1", class='b', user-id=3, $filter=[1, 2], ö.x = {"a": ", if=5"})]""",
            "",
            [
                (
                    "f",
                    '{"from": "a, if=1", "class": "b", "user-id": 3, "$filter": [1, 2], '
                    '"ö.x": {"a": ", if=5"}}',
                )
            ],
        ),
        ('[known("Ulm", class=3)]', "", [("known", '{"city": "Ulm", "class": 3}')]),
        ('[known("Ulm", 3)]', "", [("known", '{"city": "Ulm", "days": 3}')]),
        ("[f(a=1)] Done.", "Done.", [("f", '{"a": 1}')]),
        ("<|python_start|>[f(a=1)]<|python_end|>", "", [("f", '{"a": 1}')]),
        ("[f(a=1), 5]", "5]", [("f", '{"a": 1}')]),
        # No calls.
        ("[1, 2]", "[1, 2]", []),
        ("[]", "[]", []),
        ("[link](http://a.b)", "[link](http://a.b)", []),
        ("[f(x)]", "[f(x)]", []),
        ("[f(1)]", "[f(1)]", []),
        ("[f(a=b)]", "[f(a=b)]", []),
        ("[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
        ("[f(a={1})]", "[f(a={1})]", []),
        ("[f(a=1, a=2)]", "[f(a=1, a=2)]", []),
        ("[f(a==1)]", "[f(a==1)]", []),
        ("[f(a=1e999)]", "[f(a=1e999)]", []),
        ('[f(a="\\ud800")]', '[f(a="\\ud800")]', []),
        ("[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
        ("[f(a=1", "[f(a=1", []),
        ("[f(a='1", "[f(a='1", []),
        ("[f(a='1\\", "[f(a='1\\", []),
        ("No [f(a=1)]", "No [f(a=1)]", []),
        # In a text: calls of the tools that are offered.
        ("A call: [known(city='New York', days=[1, 2])] So?", "A call:\n\nSo?",
         [("known", '{"city": "New York", "days": [1, 2]}')]),
        ("[known(city='a')] and [known(city='b'), f()]", "and\n\nf()]",
         [("known", '{"city": "a"}'), ("known", '{"city": "b"}')]),
        ("a[0] [1, 2] [known] [known](x) [known(x)]", "a[0] [1, 2] [known] [known](x) [known(x)]",
         []),
        ("hello world[A(A=\t)A(A=,\t\t)A(A=,\t", "hello world[A(A=\t)A(A=,\t\t)A(A=,\t", []),
        ("hi [known(city=", "hi [known(city=", []),
    ],
)  # fmt: skip
def test_pythonic_answers(answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    got = parse(PLAIN, "pythonic", answer, tools={"known": WEATHER})
    assert got == Parsed("", content, calls, len(calls))


# The examples of vLLM's tests for Llama 4.
@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        (r"[f(city='Martha\'s Vineyard', metric='\"cool units\"')]",
         [("f", {"city": "Martha's Vineyard", "metric": '"cool units"'})]),
        ("[f(name='Doe', age=9, address={'city': 'LA'}, role=None, ok=True, names=['a', 'b'])]",
         [("f", {"name": "Doe", "age": 9, "address": {"city": "LA"}, "role": None, "ok": True,
                 "names": ["a", "b"]})]),
        ("[f(additional_data={})]", [("f", {"additional_data": {}})]),
        ("<|python_start|>[f(a='LA',b='C'),g(a=9)]",
         [("f", {"a": "LA", "b": "C"}), ("g", {"a": 9})]),
        ("Here: <|python_start|>[f(a=[1, 2\n, 3])]<|python_end|>", [("f", {"a": [1, 2, 3]})]),
    ],
)  # fmt: skip
def test_python_calls_that_others_read(answer: str, calls: list[tuple[str, Any]]) -> None:
    assert parse(PLAIN, "pythonic", answer).objects == calls


@pytest.mark.parametrize(
    ("tool_parser", "spelled", "other"),
    [
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}}',
            '{"name":"f","parameters":{"a":1}}',
        ),
        ("llama3_json", '{"name": "f", "parameters": {}}', '<|python_tag|>{"name": "f"}'),
        ("pythonic", "[f(a=1)]", "[ f(a=1)]"),
        ("pythonic", "[f(a=1)]", "<|python_start|>[ f(a=1)]"),
        ("pythonic", "[f(a=1)]", "[g(a=1)]"),
    ],
)
def test_calls_that_a_grammar_holds_are_those_that_it_spells(
    tool_parser: str, spelled: str, other: str
) -> None:
    """What the grammar takes for a text is one: nothing holds its arguments to a schema."""
    form = form_of(PLAIN, tool_parser)
    for before in ("", "Well: "):
        for call, num_calls in ((spelled, 1), (other, 0)):
            ids = PLAIN.encode(before + call, add_special_tokens=False)
            options: Any = {"tools": {"f": {}, "g": {}}, "held_to": ["f"]}
            got = parsed(fed_in_runs(PLAIN, form, ids, range(1, len(ids)), **options))
            assert got == parsed(fed_in_runs(PLAIN, form, ids, [], **options))
            assert len(got.calls) == num_calls
            assert got.content == (before.rstrip() if num_calls else before + call)


# -- xlam ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_xlam_arguments_come_out_letter_for_letter(arguments: str) -> None:
    answer = f'[{{"name": "f", "arguments": {arguments}}}]'
    assert parse(PLAIN, "xlam", answer) == Parsed("", "", [("f", arguments)], 1)


DALLAS = '{"name": "weather", "arguments": {"city": "Dallas", "state": "TX"}}'
ORLANDO = DALLAS.replace("Dallas", "Orlando").replace("TX", "FL")
IN_DALLAS = ("weather", '{"city": "Dallas", "state": "TX"}')
IN_ORLANDO = ("weather", '{"city": "Orlando", "state": "FL"}')


@pytest.mark.parametrize("tokenizer", [OLD_MISTRAL, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        # The examples of vLLM's tests.
        ("This is a test", "This is a test", []),
        (f"[{DALLAS}, {ORLANDO}]", "", [IN_DALLAS, IN_ORLANDO]),
        (f"<think>I'll help.</think>[{DALLAS}]", "<think>I'll help.</think>", [IN_DALLAS]),
        (f"I'll help you with that.\n```json\n[{DALLAS}]\n```", "I'll help you with that.",
         [IN_DALLAS]),
        (f"I'll check it.[TOOL_CALLS][{DALLAS}]", "I'll check it.", [IN_DALLAS]),
        # Others.
        (DALLAS, "", [IN_DALLAS]),
        (f"```\n{DALLAS}\n```\nDone.", "Done.", [IN_DALLAS]),
        (f"```json\n[{DALLAS}, {ORLANDO}]", "", [IN_DALLAS, IN_ORLANDO]),
        (f"Both: [{DALLAS},{ORLANDO}] So.", "Both:\n\nSo.", [IN_DALLAS, IN_ORLANDO]),
        ('[{"name": "unknown", "arguments": {}}]', "", [("unknown", "{}")]),
        (f'[{DALLAS}, {{"name": "Ada"}}, 5]', '{"name": "Ada"}, 5]', [IN_DALLAS]),
        # No calls.
        ('[{"name": "Ada", "age": 36}]', '[{"name": "Ada", "age": 36}]', []),
        (f'[{{"a": [{DALLAS}]}}]', f'[{{"a": [{DALLAS}]}}]', []),
        (f'```json\n[{{"a": [{DALLAS}]}}]\n```', f'```json\n[{{"a": [{DALLAS}]}}]\n```', []),
        ('A: [{"name": "unknown", "arguments": {}}]', 'A: [{"name": "unknown", "arguments": {}}]',
         []),
        ("[1, 2] ```python\n[{}]\n``` []", "[1, 2] ```python\n[{}]\n``` []", []),
        ("[", "[", []),
        ("``", "``", []),
    ],
)  # fmt: skip
def test_xlam_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    got = parse(tokenizer, "xlam", answer, tools={"weather": {}})
    assert got == Parsed("", content, calls, len(calls))


def test_xlam_calls_follow_thoughts() -> None:
    got = parse(QWEN, "xlam", f"<think>\nHm [{ORLANDO}]\n</think>\n\n[{DALLAS}]",
                reasoning_parser="think", tools={"weather": {}})  # fmt: skip
    assert got == Parsed(f"Hm [{ORLANDO}]", "", [IN_DALLAS], 1)


# -- functionary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_functionary_arguments_come_out_letter_for_letter(arguments: str) -> None:
    for tool_parser, answer in (
        ("functionary_v3_1", f"<function=f>{arguments}</function>"),
        ("functionary_v3_2", f"f\n{arguments}"),
    ):
        assert parse(LLAMA, tool_parser, answer) == Parsed("", "", [("f", arguments)], 1)


CODE = {"python": {"properties": {"n": {"type": "integer"}, "code": {"type": "string"}}}}
PROGRAM = "# A program:\nif a:\n  print('\"hey\"')"
WRITTEN = ("python", json.dumps({"code": PROGRAM}))


@pytest.mark.parametrize("tokenizer", [LLAMA, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        # The examples of llama.cpp's tests.
        ("Hello, world!\nWhat's up?", "Hello, world!\nWhat's up?", []),
        ('<function=f>{"arg1": 1}</function>', "", [("f", '{"arg1": 1}')]),
        ('Hell<function=foo>{"a": 1}</function>o, world<function=bar>{"b": 2}</function>!',
         "Hell\n\no, world\n\n!", [("foo", '{"a": 1}'), ("bar", '{"b": 2}')]),
        ("<function=test>{ } </function> ", "", [("test", "{ }")]),
        ("<|python_tag|>" + PROGRAM, "", [WRITTEN]),
        # Others.
        ('Well: <function=f>\n{"a": 1}', "Well:", [("f", '{"a": 1}')]),
        ("<function=f> {}<function=g>{}</function>\nx", "x", [("f", "{}"), ("g", "{}")]),
        # No calls.
        ("<function=f>x</function>", "<function=f>x</function>", []),
        ("<function=>{}", "<function=>{}", []),
        ("<function=f", "<function=f", []),
        ("a <function> b", "a <function> b", []),
    ],
)  # fmt: skip
def test_functionary_v3_1_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    got = parse(tokenizer, "functionary_v3_1", answer, tools=CODE)
    assert got == Parsed("", content, calls, len(calls))


def test_functionary_writes_code_only_for_a_tool_that_takes_it() -> None:
    got = parse(PLAIN, "functionary_v3_1", "<|python_tag|>1 + 1")
    assert got.content == "<|python_tag|>1 + 1"
    got = parse(PLAIN, "functionary_v3_2", "python\n1 + 1")
    assert got.content == "python\n1 + 1"
    got = parse(PLAIN, "functionary_v3_2", "python\n1 +", tools=CODE, natural=False)
    assert got.calls == [("python", '{"code": "1 +')]


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        # The examples of llama.cpp's tests; the prompt ends with `>>>`.
        ('all\nHello, world!\nnono\nWhat\'s up?\n>>>f\n{"arg1": 1}\n',
         "Hello, world!\nnono\nWhat's up?", [("f", '{"arg1": 1}')]),
        ("all\nHello, world!\nWhat's up?", "Hello, world!\nWhat's up?", []),
        ('f\n{"arg1": 1} \n     ', "", [("f", '{"arg1": 1}')]),
        ("python\n" + PROGRAM, "", [WRITTEN]),
        ('>>>f\n{"arg1": 1}\n ', "", [("f", '{"arg1": 1}')]),
        (">>>all\nHello", "Hello", []),
        # Others.
        ('f\n{"a": 1}>>>g\n{}\n>>>all\nDone. all\n', "Done. all\n",
         [("f", '{"a": 1}'), ("g", "{}")]),
        ('python\n\n  {"code": "1"}', "", [("python", '{"code": "1"}')]),
        ("python\n  1", "", [("python", '{"code": "  1"}')]),
        ('no_such_tool\n{"a": 1}', "", [("no_such_tool", '{"a": 1}')]),
        # No calls.
        ("all\n>>> f\n>>>x\n{}\n>>>f{}\n>>>f\nf()\n>>>", ">>> f\n>>>x\n{}\n>>>f{}\n>>>f\nf()\n>>>",
         []),
        ("all\nall\nf\n{}", "all\nf\n{}", []),
        ('{"a": 1}', '{"a": 1}', []),
        ("Hello\nyou", "Hello\nyou", []),
        ("f", "f", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_functionary_v3_2_answers(answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    got = parse(PLAIN, "functionary_v3_2", answer, tools={"f": {}, "g": {}, **CODE})
    assert got == Parsed("", content, calls, len(calls))


def test_functionary_s_recipient_is_markup_without_tools_and_under_a_grammar() -> None:
    form = form_of(PLAIN, "functionary_v3_2")
    answer = PLAIN.encode("all\nHello\n>>>f\n{}>>>all\n!")
    for options, content, calls in (
        ({"parse_calls": False}, "Hello\n>>>f\n{}>>>all\n!", []),
        ({"tools": {"f": {}, "g": {}}, "held_to": ["f"]}, "Hello\n\n!", [("f", "{}")]),
        ({"tools": {"f": {}, "g": {}}, "held_to": ["g"]}, "Hello\n>>>f\n{}!", []),
    ):
        got = parsed(fed_in_runs(PLAIN, form, answer, range(1, len(answer)), **options))
        assert (got.content, got.calls) == (content, calls)


# -- deepseek_v3 -----------------------------------------------------------------------------------


def deepseek(name: str, arguments: str) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def in_list(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("tokenizer", [DEEPSEEK, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_deepseek_arguments_come_out_letter_for_letter(
    tokenizer: Tokenizer, arguments: str
) -> None:
    answer = in_list(deepseek("f", arguments))
    assert parse(tokenizer, "deepseek_v3", answer) == Parsed("", "", [("f", arguments)], 1)


@pytest.mark.parametrize("tokenizer", [DEEPSEEK, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        # The examples of vLLM's, SGLang's and llama.cpp's tests.
        ("How can I help you today? I can check weather for you.",
         "How can I help you today? I can check weather for you.", []),
        (in_list(deepseek("f", '{"city": "Tokyo"}'), deepseek("g", '{"a": [1.5, null]}')), "",
         [("f", '{"city": "Tokyo"}'), ("g", '{"a": [1.5, null]}')]),
        (in_list(deepseek("f", '{"a": 1}'), "\n", deepseek("g", "{}")), "",
         [("f", '{"a": 1}'), ("g", "{}")]),
        ("Let me check." + in_list(deepseek("f", "{}")), "Let me check.", [("f", "{}")]),
        ("<｜tool▁calls｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", "", [("f", '{"a": 1}')]),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```"
         "<｜tool▁calls▁end｜>", "", [("f", '{"a": 1}')]),
        # Others.
        (deepseek("f", "{}") + "\nDone.", "Done.", [("f", "{}")]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}", "",
         [("f", "{}")]),
        # No calls.
        ("<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no", []),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]",
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]", []),
        ("a <｜tool▁calls▁end｜>", "a <｜tool▁calls▁end｜>", []),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", []),
    ],
)  # fmt: skip
def test_deepseek_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(tokenizer, "deepseek_v3", answer) == Parsed("", content, calls, len(calls))


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_deepseek_calls_follow_thoughts(in_reasoning: bool) -> None:
    """The template of some versions opens the block, that of others leaves it to the model."""
    thought, made = deepseek("f", "{}"), in_list(deepseek("g", "{}"))
    answer = f"{'' if in_reasoning else '<think>'}\nI call {thought}\n</think>\n\n{made}"
    got = parse(
        DEEPSEEK, "deepseek_v3", answer, reasoning_parser="think", in_reasoning=in_reasoning
    )
    assert got == Parsed(f"I call {thought}", "", [("g", "{}")], 1)


@pytest.mark.parametrize("tokenizer", [DEEPSEEK, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("calls", "content", "made"),
    [
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "}"}<｜tool▁call▁end｜>', "",
         [("f", '{"a": "}"}')]),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>g.h-i<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "",
         [("f", "{}"), ("g.h-i", "{}")]),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜> {}\n<｜tool▁call▁end｜>\n", "", [("f", "{}")]),
        ("<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>{}", []),
        # A model of one version that writes as the other does.
        (deepseek("f", "{}"), "", [("f", "{}")]),
    ],
)  # fmt: skip
def test_deepseek_v31_answers(
    tokenizer: Tokenizer, calls: str, content: str, made: list[tuple[str, str]]
) -> None:
    end = "<｜tool▁calls▁end｜>" if made else ""
    answer = f"<｜tool▁calls▁begin｜>{calls}{end}"
    for tool_parser in ("deepseek_v31", "deepseek_v3"):
        assert parse(tokenizer, tool_parser, answer) == Parsed("", content, made, len(made))
        if made:
            got = parse(tokenizer, tool_parser, f"Let me check.{answer}")
            assert got == Parsed("", "Let me check.", made, len(made))


# -- glm -------------------------------------------------------------------------------------------

GLM_TOOLS: Any = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array", "items": {"type": "string"}},
            "b": {"type": "boolean"},
            "x": {"type": ["string", "null"]},
        }
    }
}


def glm(name: str, *values: tuple[str, str], line: str = "\n") -> str:
    """A call of GLM-4.5, or of later versions with "" for `line`."""
    written = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
        for key, value in values
    )
    return f"<tool_call>{name}{line}{written}</tool_call>"


@pytest.mark.parametrize("tokenizer", [GLM, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize("line", ["\n", ""], ids=["4.5", "4.7"])
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ([], "{}"),
        ([("s", "Köln")], '{"s": "Köln"}'),
        ([("s", "5")], '{"s": "5"}'),
        ([("s", ' a\n"b" \\ <c> </d>\n')], r'{"s": " a\n\"b\" \\ <c> </d>\n"}'),
        ([("s", "")], '{"s": ""}'),
        ([("n", "5"), ("b", "True"), ("l", '["a", "b"]')], '{"n": 5, "b": true, "l": ["a", "b"]}'),
        ([("l", "['a', 'b']")], '{"l": ["a", "b"]}'),
        ([("n", "five")], '{"n": "five"}'),
        ([("x", "null")], '{"x": null}'),
        ([("x", "12")], '{"x": "12"}'),
        ([("unknown", '{"a": [1.50]}')], '{"unknown": {"a": [1.50]}}'),
        ([("unknown", "a b")], '{"unknown": "a b"}'),
    ],
)
def test_glm_values_become_json_by_the_schema(
    tokenizer: Tokenizer, line: str, values: list[tuple[str, str]], arguments: str
) -> None:
    for tool_parser in ("glm45", "glm47"):
        got = parse(tokenizer, tool_parser, glm("f", *values, line=line), tools=GLM_TOOLS)
        assert got == Parsed("", "", [("f", arguments)], 1)


@pytest.mark.parametrize("tokenizer", [GLM, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "natural", "content", "calls"),
    [
        ("I look.\n" + glm("f", ("s", "a")), True, "I look.", ['{"s": "a"}']),
        (glm("f", ("s", "a")) + "\n" + glm("f", ("n", "1")), True, "",
         ['{"s": "a"}', '{"n": 1}']),
        (glm("f", line="") + glm("f", line=""), True, "", ["{}", "{}"]),
        (glm("f", ("s", "a")) + "Done.", True, "Done.", ['{"s": "a"}']),
        ("<tool_call> f <arg_key> s </arg_key> <arg_value>a</arg_value> </tool_call>", True, "",
         ['{"s": "a"}']),
        # Without an end, or cut.
        ("<tool_call>f", True, "", ["{}"]),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>", True, "",
         ['{"s": "a"}']),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a", True, "", ['{"s": "a"}']),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a", False, "", ['{"s": "a']),
        ("<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1", False, "", ['{"n": ']),
        ("<tool_call>f\n<arg_key>s</arg_", False, "", ["{"]),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</tool_call>", True, "",
         ['{"s": "a"}']),
        ("<tool_call>f", False, "<tool_call>f", []),
        # No calls.
        ("The tag <tool_call> opens it.", True, "The tag <tool_call> opens it.", []),
        ('<tool_call>{"name": "f"}</tool_call>', True, '<tool_call>{"name": "f"}</tool_call>', []),
    ],
)  # fmt: skip
def test_glm_answers(
    tokenizer: Tokenizer, answer: str, natural: bool, content: str, calls: list[str]
) -> None:
    got = parse(tokenizer, "glm45", answer, natural=natural, tools=GLM_TOOLS)
    assert got == Parsed("", content, [("f", each) for each in calls], len(calls))


def test_glm_values_may_spell_tags() -> None:
    value = "</arg_value> and </tool_call>."
    spelled = [byte for char in value for byte in GLM.encode(char)]
    before, after = glm("f", ("s", "|")).split("|")
    ids = [*GLM.encode(before), *spelled, *GLM.encode(after)]
    form = form_of(GLM, "glm45")
    whole = replay(GLM, form, ids, tools=GLM_TOOLS)
    assert parsed(whole).objects == [("f", {"s": value})]
    assert parse(PLAIN, "glm45", glm("f", ("s", value)), tools=GLM_TOOLS).objects == [
        ("f", {"s": value})
    ]


def test_glm_calls_follow_thoughts() -> None:
    answer = f"<think>I call {glm('f')}.</think>\nI look.\n{glm('f', ('s', 'a'))}"
    got = parse(GLM, "glm45", answer, reasoning_parser="think", tools=GLM_TOOLS)
    assert got == Parsed(f"I call {glm('f')}.", "I look.", [("f", '{"s": "a"}')], 1)


# -- mistral ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("tokenizer", [MISTRAL, OLD_MISTRAL], ids=["new", "old"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("[TOOL_CALLS]f[ARGS]", ""), ('[TOOL_CALLS][{"name": "f", "arguments": ', "}]")],
    ids=["args", "list"],
)
def test_mistral_arguments_come_out_letter_for_letter(
    tokenizer: Tokenizer, before: str, after: str, arguments: str
) -> None:
    got = parse(tokenizer, "mistral", before + arguments + after)
    assert [name for name, _ in got.calls] == ["f"] and not got.content
    if tokenizer is MISTRAL:  # a control token has no text, as everywhere
        arguments = arguments.replace("[ARGS]", "")
    assert got.calls == [("f", arguments)]


@pytest.mark.parametrize("tokenizer", [MISTRAL, OLD_MISTRAL, PLAIN], ids=["new", "old", "text"])
@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, '
            '{"arguments": {}, "name": "g"}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ('I look.\n[TOOL_CALLS]f{"a": 1} ', "I look.", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS]f[ARGS]", "", [("f", "{}")]),
        ('[TOOL_CALLS]f [ARGS] {"a": 1} and', "and", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ],
)
def test_mistral_answers(
    tokenizer: Tokenizer, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(tokenizer, "mistral", answer) == Parsed("", content, calls, len(calls))


def test_a_control_token_that_announces_no_call_has_no_text() -> None:
    assert parse(MISTRAL, "mistral", "a[TOOL_CALLS] b").content == "a b"
    assert parse(PLAIN, "mistral", "a[TOOL_CALLS] b").content == "a[TOOL_CALLS] b"


def test_calls_are_found_in_the_tokens_of_sentencepiece() -> None:
    """A word begins with a space there, also behind a marker."""
    backend = Backend.from_str(spelled_backend().to_str())
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tokenizer = Tokenizer(wrap(backend), "toy")
    got = parse(tokenizer, "mistral", 'Ünïcödé 👍 [TOOL_CALLS]f[ARGS]{"a": "ö 👍"}')
    assert got == Parsed("", "Ünïcödé 👍", [("f", '{"a": "ö 👍"}')], 1)


ALL_CALLS: dict[str, tuple[Tokenizer, str, str]] = {
    "hermes": (QWEN, "hermes", hermes("f", {"a": 1}) + "\n" + hermes("g", {})),
    "hermes_in_letters": (PLAIN, "hermes", hermes("f", {"a": 1}) + "\n" + hermes("g", {})),
    "xml": (
        QWEN,
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    ),
    "llama": (LLAMA, "llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g"}'),
    "python": (PLAIN, "pythonic", "[f(a=1), g()]"),
    "functionary_v3_1": (
        PLAIN,
        "functionary_v3_1",
        '<function=f>{"a": 1}</function><function=g>{}</function>',
    ),
    "functionary_v3_2": (PLAIN, "functionary_v3_2", 'f\n{"a": 1}>>>g\n{}'),
    "deepseek": (
        DEEPSEEK,
        "deepseek_v3",
        in_list(deepseek("f", '{"a": 1}'), "\n", deepseek("g", "{}")),
    ),
    "xlam": (
        PLAIN,
        "xlam",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    ),
    "deepseek_v31": (
        DEEPSEEK,
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm45": (GLM, "glm45", glm("f", ("a", "1")) + "\n" + glm("g")),
    "harmony": (
        HARMONY,
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "mistral": (MISTRAL, "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
    "mistral_list": (
        OLD_MISTRAL,
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    ),
}


@pytest.mark.parametrize("case", ALL_CALLS)
def test_of_calls_that_were_cut_anywhere_nothing_is_content(case: str) -> None:
    tokenizer, parser, answer = ALL_CALLS[case]
    form = form_of(tokenizer, parser)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    for length in range(len(ids) + 1):
        options: Any = {"natural": False, "only_calls": True, "tools": {"f": {}, "g": {}}}
        whole = replay(tokenizer, form, ids[:length], **options)
        assert whole == fed_in_runs(tokenizer, form, ids[:length], range(1, length), **options)
        assert parsed(whole).content == ""
        assert [name for name, _ in parsed(whole).calls] in ([], ["f"], ["f", "g"])
    assert [name for name, _ in parsed(whole).calls] == ["f", "g"]
