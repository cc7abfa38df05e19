"""Grammars of tool calls accept exactly the calls of the offered tools, in the model's format."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from support.grammars import ByteMatcher, GrammarBench
from support.parsed_answers import PLAIN, fed_in_runs, form_of, parse, parsed

from minisgl.errors import InvalidRequestError
from minisgl.grammar.tool_grammars import Tool, tool_calls
from minisgl.text.parsing import formats, json_formats
from minisgl.text.parsing.call_format import CallSpelling
from minisgl.text.parsing.formats import BY_NAME

HERMES = BY_NAME["hermes"].spelling
QWEN3_CODER = BY_NAME["qwen3_coder"].spelling
LLAMA3_JSON = BY_NAME["llama3_json"].spelling
PYTHONIC = BY_NAME["pythonic"].spelling
DEEPSEEK_V31 = BY_NAME["deepseek_v31"].spelling
GLM45 = BY_NAME["glm45"].spelling
GLM47 = BY_NAME["glm47"].spelling
XLAM = BY_NAME["xlam"].spelling
FUNCTIONARY_V3_1 = BY_NAME["functionary_v3_1"].spelling
FUNCTIONARY_V3_2 = BY_NAME["functionary_v3_2"].spelling
DEEPSEEK_V3 = BY_NAME["deepseek_v3"].spelling
MISTRAL_LIST = json_formats.MISTRAL_LIST.spelling
MISTRAL = BY_NAME["mistral"].spelling
MARKERS = {"<tool_call>": 400, "</tool_call>": 401, "[TOOL_CALLS]": 402, "[ARGS]": 403}
MARKERS |= {text: 410 + index for index, text in enumerate(BY_NAME["deepseek_v3"].markers)}
MARKERS |= {text: 430 + index for index, text in enumerate(BY_NAME["glm45"].markers[2:])}
OTHERS = ("seed_oss", "minimax_m2", "deepseek_v32", "kimi_k2", "lfm2")
OF_OTHERS = (text for form in formats.CALL_FORMATS if form.name in OTHERS for text in form.markers)
MARKERS |= {text: 450 + index for index, text in enumerate(OF_OTHERS)}
WEATHER = Tool(
    name="get-weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "now": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string"}},
    },
    strict=True,
)
CLOCK = Tool(name="clock")

# Of each format: a call of each tool, two calls, and what almost is one.
HERMES_WEATHER = (
    '<tool_call>\n{"name": "get-weather", "arguments": {"city": "a\\"}b", "days": 3}}\n</tool_call>'
)
HERMES_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
XML_WEATHER = (
    '<tool_call>\n<function=get-weather>\n<parameter=city>\na<b>\n"c\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n<parameter=now>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
LLAMA_WEATHER = '{"name": "get-weather", "parameters": {"city": "x", "now": true}}'
LLAMA_CLOCK = '{"name": "clock", "parameters": {}}'
MISTRAL_WEATHER = '[TOOL_CALLS]get-weather[ARGS]{"city": "x"}'
MISTRAL_CLOCK = "[TOOL_CALLS]clock[ARGS]{}"
DEEPSEEK_WEATHER = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-weather\n```json\n"
    '{"city": "x", "days": 3}\n```<｜tool▁call▁end｜>'
)
DEEPSEEK_CLOCK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>"
)
V31_WEATHER = (
    '<｜tool▁call▁begin｜>get-weather<｜tool▁sep｜>{"city": "x", "days": 3}<｜tool▁call▁end｜>'
)
V31_CLOCK = "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
GLM45_WEATHER = (
    "<tool_call>get-weather\n<arg_key>city</arg_key>\n<arg_value>a<b>\n</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
GLM45_CLOCK = "<tool_call>clock\n</tool_call>"
GLM47_WEATHER = (
    "<tool_call>get-weather<arg_key>city</arg_key><arg_value>a<b>\n</arg_value>"
    "<arg_key>now</arg_key><arg_value>true</arg_value></tool_call>"
)
GLM47_CLOCK = "<tool_call>clock</tool_call>"
SEED_WEATHER = (
    "<seed:tool_call>\n<function=get-weather>\n<parameter=city>a<b>\n</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
)
SEED_CLOCK = "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>"
MINIMAX_WEATHER = (
    '<invoke name="get-weather">\n<parameter name="city">a<b>\n</parameter>\n'
    '<parameter name="now">true</parameter>\n</invoke>\n'
)
MINIMAX_CLOCK = '<invoke name="clock">\n</invoke>\n'
DSML_WEATHER = (
    '<｜DSML｜invoke name="get-weather">\n'
    '<｜DSML｜parameter name="city" string="true">a<b>\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
DSML_CLOCK = '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
KIMI_WEATHER = (
    "<|tool_call_begin|>functions.get-weather:0<|tool_call_argument_begin|>"
    '{"city": "x", "days": 3}<|tool_call_end|>'
)
KIMI_CLOCK = "<|tool_call_begin|>functions.clock:12<|tool_call_argument_begin|>{}<|tool_call_end|>"


def around(name: str, *calls: str) -> str:
    """Calls with what the format has around them."""
    [spelling] = [form.spelling for form in formats.CALL_FORMATS if form.name == name]
    return spelling.begin + "".join(calls) + spelling.end


CASES: dict[str, tuple[CallSpelling, str, str, str]] = {
    "seed_oss": (
        BY_NAME["seed_oss"].spelling,
        SEED_WEATHER,
        SEED_CLOCK,
        f"{SEED_CLOCK}\n{SEED_WEATHER}",
    ),
    "minimax_m2": (
        BY_NAME["minimax_m2"].spelling,
        around("minimax_m2", MINIMAX_WEATHER),
        around("minimax_m2", MINIMAX_CLOCK),
        around("minimax_m2", MINIMAX_CLOCK, MINIMAX_WEATHER),
    ),
    "deepseek_v32": (
        BY_NAME["deepseek_v32"].spelling,
        around("deepseek_v32", DSML_WEATHER),
        around("deepseek_v32", DSML_CLOCK),
        around("deepseek_v32", DSML_CLOCK, DSML_WEATHER),
    ),
    "kimi_k2": (
        BY_NAME["kimi_k2"].spelling,
        around("kimi_k2", KIMI_WEATHER),
        around("kimi_k2", KIMI_CLOCK),
        around("kimi_k2", KIMI_CLOCK, KIMI_WEATHER),
    ),
    "lfm2": (
        BY_NAME["lfm2"].spelling,
        '<|tool_call_start|>[get-weather(city="x\\n", days=3, now=True)]<|tool_call_end|>',
        "<|tool_call_start|>[clock()]<|tool_call_end|>",
        '<|tool_call_start|>[clock(), get-weather(city="x", now=False)]<|tool_call_end|>',
    ),
    "hermes": (HERMES, HERMES_WEATHER, HERMES_CLOCK, f"{HERMES_WEATHER}\n{HERMES_CLOCK}"),
    "qwen3_coder": (QWEN3_CODER, XML_WEATHER, XML_CLOCK, f"{XML_CLOCK}\n{XML_WEATHER}"),
    "llama3_json": (LLAMA3_JSON, LLAMA_WEATHER, LLAMA_CLOCK, f"{LLAMA_CLOCK}; {LLAMA_WEATHER}"),
    "pythonic": (
        PYTHONIC,
        '[get-weather(city="x\\n", days=3, now=True)]',
        "[clock()]",
        '[clock(), get-weather(city="x", now=False)]',
    ),
    "functionary_v3_1": (
        FUNCTIONARY_V3_1,
        '<function=get-weather>{"city": "x", "days": 3}</function>',
        "<function=clock>{}</function>",
        '<function=clock>{}</function><function=get-weather>{"city": ""}</function>',
    ),
    "functionary_v3_2": (
        FUNCTIONARY_V3_2,
        'get-weather\n{"city": "x", "days": 3}',
        "clock\n{}",
        'clock\n{}>>>get-weather\n{"city": ""}',
    ),
    "deepseek_v3": (
        DEEPSEEK_V3,
        f"<｜tool▁calls▁begin｜>{DEEPSEEK_WEATHER}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK_CLOCK}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK_CLOCK}\n{DEEPSEEK_WEATHER}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        DEEPSEEK_V31,
        f"<｜tool▁calls▁begin｜>{V31_WEATHER}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V31_CLOCK}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V31_CLOCK}{V31_WEATHER}<｜tool▁calls▁end｜>",
    ),
    "glm45": (GLM45, GLM45_WEATHER, GLM45_CLOCK, f"{GLM45_CLOCK}\n{GLM45_WEATHER}"),
    "glm47": (GLM47, GLM47_WEATHER, GLM47_CLOCK, GLM47_CLOCK + GLM47_WEATHER),
    "xlam": (
        XLAM,
        '[{"name": "get-weather", "arguments": {"city": "x", "days": 3}}]',
        '[{"name": "clock", "arguments": {}}]',
        '[{"name": "clock", "arguments": {}}, {"name": "get-weather", "arguments": {"city": ""}}]',
    ),
    "mistral": (MISTRAL, MISTRAL_WEATHER, MISTRAL_CLOCK, MISTRAL_WEATHER + MISTRAL_CLOCK),
    "mistral_list": (
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "get-weather", "arguments": {"city": "x"}}]',
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]',
    ),
}
BARE = ("llama3_json", "pythonic", "xlam", "functionary_v3_2")  # calls without an opening


@pytest.mark.parametrize("markers", [MARKERS, {}], ids=["tokens", "texts"])
@pytest.mark.parametrize("case", CASES)
def test_required_accepts_calls_and_nothing_else(case: str, markers: dict[str, int]) -> None:
    spelling, weather, clock, both = CASES[case]
    structured = tool_calls([WEATHER, CLOCK], spelling, markers, required=True)
    matcher = ByteMatcher(structured, markers)
    for answer in (weather, clock, both):
        assert matcher.accepts(answer)
        assert not matcher.accepts(f"{answer}x")
        assert not matcher.accepts(f"Well. {answer}")
        assert not matcher.accepts(answer[:-1])
    assert not matcher.accepts("")
    for wrong in ("town", "cit"):
        assert not matcher.accepts(weather.replace("city", wrong))
    assert not matcher.accepts(clock.replace("clock", "watch"))
    assert not matcher.accepts(weather.replace("3", "9")) or "3" not in weather
    assert not matcher.accepts(clock.replace("clock", "get-weather"))  # without its city


@pytest.mark.parametrize("case", CASES)
def test_without_parallel_calls_there_is_one(case: str) -> None:
    spelling, weather, clock, both = CASES[case]
    for required in (True, False):
        structured = tool_calls(
            [WEATHER, CLOCK], spelling, MARKERS, required=required, parallel=False
        )
        matcher = ByteMatcher(structured, MARKERS)
        assert matcher.accepts(weather)
        assert matcher.accepts(clock)
        assert not matcher.accepts(both)


@pytest.mark.parametrize("markers", [MARKERS, {}], ids=["tokens", "texts"])
@pytest.mark.parametrize("case", CASES)
def test_optional_calls_may_follow_a_text_and_are_held_to_their_tools(
    case: str, markers: dict[str, int]
) -> None:
    spelling, weather, clock, both = CASES[case]
    structured = tool_calls([WEATHER, CLOCK], spelling, markers, required=False)
    matcher = ByteMatcher(structured, markers)
    for answer in (weather, clock, both, "", f"{spelling.text}No call. Why?\n"):
        assert matcher.accepts(answer)
    for wrong in (
        weather.replace("city", "town"),
        clock.replace("clock", "watch"),
        f"{clock} and more",
    ):
        assert not matcher.accepts(wrong)
        if case not in BARE:
            assert not matcher.accepts(f"Let me see.\n{wrong}")
    if case not in BARE:
        assert matcher.accepts(f"Let me see.\n{both}")


@pytest.mark.parametrize("case", BARE)
def test_calls_without_a_marker_may_follow_a_text_and_are_held_to_their_tools(case: str) -> None:
    spelling, weather, clock, both = CASES[case]
    matcher = ByteMatcher(tool_calls([WEATHER, CLOCK], spelling, {}, required=False))
    begin = f"{spelling.text}Let me see: "
    not_yet = 'not [1] {a} {"name": "watch"} [watch(1)] >>>watch but '
    for answer in (weather, clock, both):
        answer = spelling.after_text + answer
        assert matcher.accepts(begin + answer)
        assert matcher.accepts(begin + not_yet + answer)
        assert not matcher.accepts(f"{begin}{answer} and more")
    wrong = spelling.after_text + weather.replace("city", "town")
    assert not matcher.accepts(begin + wrong)
    alone = tool_calls([WEATHER, CLOCK], spelling, {}, required=False, parallel=False)
    assert not ByteMatcher(alone).accepts(begin + spelling.after_text + both)


def test_more_tools_than_a_text_is_searched_for_are_held_without_one(bench: GrammarBench) -> None:
    tools = [replace(WEATHER, name=f"weather-{index}") for index in range(1000)]
    names = [tool.name for tool in tools]
    structured = tool_calls(tools, LLAMA3_JSON, {}, required=False)
    form = form_of(PLAIN, "llama3_json")
    call = LLAMA_WEATHER.replace("get-weather", names[-1])
    for answer, num_calls in ((call, 1), (f"Well: {call}", 0)):
        matcher = bench.compile(structured).matcher()
        matcher.accept(bench.encode(answer))
        assert matcher.may_end and matcher.error is None
        ids = PLAIN.encode(answer)
        got = fed_in_runs(PLAIN, form, ids, [], tools={key: {} for key in names}, held_to=names)
        assert len(parsed(got).calls) == num_calls


def test_a_named_tool_is_the_only_one() -> None:
    structured = tool_calls([CLOCK], HERMES, MARKERS, required=True, parallel=False)
    matcher = ByteMatcher(structured, MARKERS)
    assert matcher.accepts(HERMES_CLOCK)
    assert not matcher.accepts(HERMES_WEATHER)


def test_references_of_several_tools_do_not_meet() -> None:
    def tool(name: str, kind: str) -> Tool:
        item = {"anyOf": [{"type": kind}, {"type": "array", "items": {"$ref": "#/$defs/x"}}]}
        parameters = {
            "properties": {"x": {"$ref": "#/$defs/x"}, "all": {"$ref": "#/properties/x"}},
            "required": ["x"],
            "$defs": {"x": item},
        }
        return Tool(name=name, parameters=parameters, strict=True)

    tools = [tool("a", "integer"), tool("b", "boolean")]
    structured = tool_calls(tools, LLAMA3_JSON, {}, required=True)
    matcher = ByteMatcher(structured)
    assert matcher.accepts('{"name": "a", "parameters": {"x": [[1], 2]}}')
    assert matcher.accepts('{"name": "b", "parameters": {"x": [[true]], "all": false}}')
    assert not matcher.accepts('{"name": "b", "parameters": {"x": [[1]]}}')
    python = ByteMatcher(tool_calls(tools, PYTHONIC, {}, required=True))
    assert python.accepts("[a(x=[[1], 2], all=3)]")
    assert not python.accepts("[b(x=[[1]])]")
    xml = ByteMatcher(tool_calls(tools, QWEN3_CODER, MARKERS, required=True), MARKERS)
    call = (
        "<tool_call>\n<function=a>\n<parameter=x>\n[[1]]\n</parameter>\n</function>\n</tool_call>"
    )
    assert xml.accepts(call)
    assert not xml.accepts(call.replace("=a>", "=b>"))


def xml_value(schema: dict[str, Any], value: str) -> bool:
    tool = Tool(name="f", parameters={"properties": {"v": schema}, "required": ["v"]})
    matcher = ByteMatcher(tool_calls([tool], QWEN3_CODER, MARKERS, required=True), MARKERS)
    return matcher.accepts(
        f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


def test_xml_strings_are_plain_and_other_values_are_json() -> None:
    assert xml_value({"type": "string"}, 'x "y" </x> {\n')
    assert xml_value({"type": "string"}, "")
    assert xml_value({"enum": ["red", "blue"]}, "red")
    assert not xml_value({"enum": ["red", "blue"]}, "green")
    assert xml_value({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "abc")
    assert not xml_value({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "abcd")
    assert not xml_value({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "a1")
    assert xml_value({"type": "string", "pattern": "b/c"}, "ab/cd")
    assert xml_value({"type": ["integer", "null"]}, "null")
    assert not xml_value({"type": ["integer", "null"]}, "none")
    assert xml_value({"type": "array", "items": {"type": "string"}}, '["a"]')
    assert xml_value({}, "anything at all")


PATTERNS = (
    *("^[a-z]+$", "^a|b$", "(^a|b)c", "a|^b", r"a\$", r"^\^a", "[$^]$", "b/c", "", "^$", r"\d{2}"),
    *("(?:^|x)a(?:$|b)", "^(?:a|b)*$", "[^a]$"),
)
TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "xb",
    "bx",
    "ac",
    "bc",
    "xbc",
    "a$",
    "xa$y",
    "^a",
    "b/c",
    "12",
    "xa",
    "$",
)
TAGGED = {
    "glm45": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>v</arg_key><arg_value>{}</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=v>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "gemma4": '<|tool_call>call:f{{v:<|"|>{}<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("length", [{}, {"minLength": 1, "maxLength": 2}], ids=["any", "short"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", TAGGED)
def test_a_pattern_is_searched_for_in_a_plain_text(
    case: str, pattern: str, length: dict[str, int], as_tokens: bool
) -> None:
    form = form_of(PLAIN, case).calls
    assert form is not None
    markers = {text: 400 + index for index, text in enumerate(form.markers)} if as_tokens else {}
    schema = {"type": "string", "pattern": pattern, **length}
    # Beside another parameter, and through a reference.
    parameters = {
        "properties": {"o": {"$ref": "#/$defs/p"}, "v": {"$ref": "#/$defs/p"}},
        "required": ["v"],
        "$defs": {"p": schema},
    }
    tools = [Tool(name="f", parameters=parameters, strict=True), CLOCK]
    matcher = ByteMatcher(tool_calls(tools, form.spelling, markers, required=True), markers)
    for text in TEXTS:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(text)
        assert matcher.accepts(TAGGED[case].format(text)) is is_valid, text


@pytest.mark.parametrize("case", [*TAGGED][:3])
def test_a_text_with_a_pattern_or_null_is_held_to_both(case: str) -> None:
    schema = {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}, {"enum": ["x", 1]}]}
    tool = Tool(name="f", parameters={"properties": {"v": schema}, "required": ["v"]}, strict=True)
    form = form_of(PLAIN, case).calls
    assert form is not None
    matcher = ByteMatcher(tool_calls([tool], form.spelling, MARKERS, required=True), MARKERS)
    found = {
        text: matcher.accepts(TAGGED[case].format(text)) for text in ("ab", "null", "x", "1", "b")
    }
    assert found == {"ab": True, "null": True, "x": True, "1": True, "b": False}


@pytest.mark.parametrize(
    ("spelling", "answer"),
    [
        (PYTHONIC, '[f(a="x", b=[1, true])]'),
        (
            BY_NAME["gemma4"].spelling,
            '<|tool_call>call:f{a:<|"|>x<|"|>,b:[1,true]}<tool_call|>',
        ),
        (GLM47, "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"),
    ],
)
def test_arguments_that_no_schema_describes_are_any(spelling: CallSpelling, answer: str) -> None:
    markers = MARKERS | {text: 450 + index for index, text in enumerate(BY_NAME["gemma4"].markers)}
    tool = Tool(name="f", parameters={"type": "object"})
    assert ByteMatcher(tool_calls([tool], spelling, markers, required=True), markers).accepts(
        answer
    )


CUSTOM = "<tool_call>\n<function=f>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>"


def test_a_custom_tool_is_held_to_its_regex_in_every_style() -> None:
    tool = Tool(name="f", custom=True, regex='a"b\n[0-9]/', field="tools.0.custom.format")
    xml = ByteMatcher(tool_calls([tool], QWEN3_CODER, MARKERS, required=True), MARKERS)
    assert xml.accepts(CUSTOM.format('a"b\n1/'))
    assert not xml.accepts(CUSTOM.format('a"b 1/'))
    as_json = ByteMatcher(tool_calls([tool], LLAMA3_JSON, {}, required=True))
    assert as_json.accepts('{"name": "f", "parameters": {"input": "a\\"b\\n1/"}}')
    assert not as_json.accepts('{"name": "f", "parameters": {"input": "a\\"b\\nx/"}}')
    python = ByteMatcher(tool_calls([tool], PYTHONIC, {}, required=True))
    assert python.accepts('[f(input="a\\"b\\n1/")]')


def test_a_custom_tool_is_held_to_its_lark_grammar_where_its_input_is_plain() -> None:
    lark = 'start: "begin\\n" line+ "end"\nline: /[a-z<]+/ "\\n"'
    tool = Tool(name="f", custom=True, lark=lark, field="tools.0.custom.format")
    matcher = ByteMatcher(tool_calls([tool], QWEN3_CODER, MARKERS, required=True), MARKERS)
    assert matcher.accepts(CUSTOM.format("begin\nab\n<c\nend"))
    assert not matcher.accepts(CUSTOM.format("begin\nend"))
    with pytest.raises(InvalidRequestError, match=r"tools\.0\.custom\.format: cannot be enforced"):
        tool_calls([tool], HERMES, MARKERS, required=True)


def test_strict_refuses_what_plain_text_cannot_be_held_to() -> None:
    parameters = {"properties": {"x/y": {"type": "string", "format": "date"}}}
    tool = Tool(name="f", parameters=parameters, strict=True, field="tools.0")
    with pytest.raises(InvalidRequestError, match=r"tools\.0: at /properties/x~1y/format: "):
        tool_calls([tool], QWEN3_CODER, MARKERS, required=True)
    tool_calls([tool], HERMES, MARKERS, required=True)
    tool_calls([replace(tool, strict=False)], QWEN3_CODER, MARKERS, required=True)


def test_a_custom_tool_without_a_grammar_takes_any_text() -> None:
    tool = Tool(name="f", custom=True)
    matcher = ByteMatcher(tool_calls([tool], HERMES, MARKERS, required=True), MARKERS)
    call = '<tool_call>\n{"name": "f", "arguments": {"input": "any \\n{\\"é"}}\n</tool_call>'
    assert matcher.accepts(call)


def test_the_tool_that_is_wrong_is_named(bench: GrammarBench) -> None:
    parameters = {"properties": {"a": {"items": {"uniqueItems": True}}}}
    tools = [
        Tool(name="a", parameters={"properties": {}}, strict=True, field="tools.0"),
        Tool(name="b", parameters=parameters, strict=True, field="tools.1.function.parameters"),
    ]
    place = r"tools\.1\.function\.parameters: at /properties/a/items/uniqueItems: "
    for spelling in (HERMES, QWEN3_CODER, PYTHONIC):
        with pytest.raises(InvalidRequestError, match=place):
            bench.compile(tool_calls(tools, spelling, {}, required=True))


def test_a_tool_that_is_not_strict_ignores_what_cannot_be_enforced(bench: GrammarBench) -> None:
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = Tool(name="a", parameters=parameters)
    compiled = bench.compile(tool_calls([tool], HERMES, {}, required=True))
    assert compiled.ignored_keywords == ("uniqueItems",)


def test_no_tools_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no tool"):
        tool_calls([], HERMES, MARKERS, required=True)


def test_random_calls_have_valid_arguments(bench: GrammarBench) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = Tool(name="weather", parameters=parameters, strict=True)
    structured = tool_calls([tool], HERMES, {}, required=True, parallel=False)
    for seed in range(5):
        matcher = bench.compile(structured).matcher()
        *_, (taken, _) = bench.walk(matcher, random.Random(seed))
        body = bench.bytes_of(taken).decode()
        call = json.loads(body.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call["name"] == "weather"
        jsonschema.validate(call["arguments"], parameters)


@pytest.mark.parametrize("name", ["from", "class", "user-id", "$filter", "user name", "ö.x"])
def test_a_forced_python_call_is_read_whatever_its_parameters_are_called(name: str) -> None:
    tool = Tool(name="f", parameters={"properties": {name: {}}, "required": [name]})
    answer = f"[f({name}=[1, true])]"
    assert ByteMatcher(tool_calls([tool], PYTHONIC, {}, required=True)).accepts(answer)
    assert parse(PLAIN, "pythonic", answer).objects == [("f", {name: [1, True]})]


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "boolean"}, {"True", "False"}),
        ({"const": True}, {"True"}),
        ({"enum": [False]}, {"False"}),
        ({"anyOf": [{"const": False}, {"type": "boolean"}]}, {"True", "False"}),
        ({"$ref": "#/$defs/yes"}, {"True"}),
    ],
)
def test_python_booleans_are_held_to_the_values_of_the_schema(
    schema: dict[str, Any], allowed: set[str]
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"yes": {"const": True}}}
    structured = tool_calls([Tool(name="f", parameters=parameters)], PYTHONIC, {}, required=True)
    for word in ("True", "False"):
        assert ByteMatcher(structured).accepts(f"[f(a={word})]") is (word in allowed)


@pytest.mark.parametrize("name", ["a=b", "it's", "f(x)", "a,b", " a", "", "a\n"])
def test_a_parameter_whose_name_cannot_be_read_is_refused(name: str) -> None:
    tool = Tool(name="f", parameters={"properties": {name: {}}})
    with pytest.raises(InvalidRequestError, match=r"(?s)^tools: at /properties/.* rename it\.$"):
        tool_calls([tool], PYTHONIC, {}, required=True)
