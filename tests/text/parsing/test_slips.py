"""Slips that models make in every format: what is unambiguous is read, in pieces as in one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.parsed_answers import PLAIN, form_of, parse, replay
from support.toy_tokenizers import with_tokens

from minisgl.events import CallEnd
from minisgl.text.parsing import formats

TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "f": {"properties": {"a": TEXT, "b": TEXT, "n": {"type": "integer"}}},
    "g": {},
}
X = {"a": "x"}
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_FENCE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
LFM2 = "<|tool_call_start|>{}<|tool_call_end|>"
GEMMA = "<|tool_call>call:f{{{}}}<tool_call|>"
# By their formats.
BROKEN_JSON = {
    "kimi_k2": KIMI.format(KIMI_CALL),
    "deepseek_v31": DEEPSEEK.format(DEEPSEEK_CALL),
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}\n</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {}',
    "harmony": "<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
}
DOUBLED = {
    "hermes": '<tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call><tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value></tool_call>",
    "kimi_k2": KIMI.format("<|tool_call_begin|>" + KIMI_CALL.format('{"a": "x"}')),
    "deepseek_v31": DEEPSEEK.format("<｜tool▁call▁begin｜>" + DEEPSEEK_CALL.format('{"a": "x"}')),
    "gemma4": "<|tool_call>" + GEMMA.format('a:<|"|>x<|"|>'),
    "lfm2": "<|tool_call_start|>" + LFM2.format('[f(a="x")]'),
}


def read(name: str, answer: str) -> tuple[list[Any], str]:
    """The arguments of the calls, and the content; with and without tokens for markers."""
    [form] = [form for form in formats.CALL_FORMATS if form.name == name]
    whole, text = (
        parse(tokenizer, name, answer, tools=TOOLS)
        for tokenizer in (with_tokens(*form.markers), PLAIN)
    )
    assert whole == text
    return [json.loads(arguments) for _, arguments in whole.calls], whole.content


@pytest.mark.parametrize("name", BROKEN_JSON)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "x", "n": 1', {"a": "x", "n": 1}),
        ('{"a": [{"b": "}"}', {"a": [{"b": "}"}]}),
        ("{", {}),
        ('{"a": "x\n\ty \\n", "n": 1\n}', {"a": "x\n\ty \n", "n": 1}),
    ],
)
def test_missing_brackets_are_closed_and_control_characters_in_strings_escaped(
    name: str, written: str, arguments: object
) -> None:
    assert read(name, BROKEN_JSON[name].format(written)) == ([arguments], "")


@pytest.mark.parametrize("name", BROKEN_JSON)
@pytest.mark.parametrize("written", ['{"a": "x', '{"a": 1,', '{"a":', '{"a": tru}', '{"a": [1}'])
def test_a_call_whose_arguments_are_no_object_is_told_from_others(name: str, written: str) -> None:
    [form] = [form for form in formats.CALL_FORMATS if form.name == name]
    answer = BROKEN_JSON[name].format(written)
    for tokenizer in (with_tokens(*form.markers), PLAIN):
        ids = tokenizer.encode(answer, add_special_tokens=False)
        events = replay(tokenizer, form_of(tokenizer, name), ids, tools=TOOLS)
        assert CallEnd(0, is_object=False) in events


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"[TOOL_CALLS]g[ARGS]{}'),
        ("functionary_v3_2", 'f\n{"a": "x">>>g\n{}'),
        ("deepseek_v3", DEEPSEEK.format(2 * (DEEPSEEK_FENCE + '{"a": "x"\n```'))),
    ],
)
def test_what_no_json_has_ends_arguments_without_a_bracket(name: str, answer: str) -> None:
    told = {"mistral": "[TOOL_CALLS]g", "functionary_v3_2": ">>>g", "deepseek_v3": "```"}[name]
    second = X if name == "deepseek_v3" else {}
    assert read(name, answer) == ([X, second], "")
    spoken = answer.replace('"x"', json.dumps(f"x {told}"))
    calls, content = read(name, spoken)
    assert calls[0] == {"a": f"x {told}"} and not content


@pytest.mark.parametrize("name", DOUBLED)
def test_an_opening_that_is_written_twice_is_no_text(name: str) -> None:
    assert read(name, DOUBLED[name]) == ([X], "")
    told = DOUBLED[name][: DOUBLED[name].index(">") + 1] * 2 + " are tags."
    assert read(name, told) == ([], told)


def test_json_of_hermes_within_the_tags_of_qwen3_coder_is_a_call() -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    own = DOUBLED["qwen3_coder"].removeprefix("<tool_call>\n")
    assert read("qwen3_coder", f"Yes.\n{written}\n{own}\n{written}") == ([X, X, X], "Yes.")
    told = '<tool_call>\n{"a": "x"}\n</tool_call> is no call.'
    assert read("qwen3_coder", told) == ([], told)


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31"])
@pytest.mark.parametrize(("written", "arguments"), [("", {}), (json.dumps('{"a": "x"}'), X)])
def test_arguments_between_markers_may_be_missing_or_in_a_string(
    name: str, written: str, arguments: object
) -> None:
    assert read(name, BROKEN_JSON[name].format(written)) == ([arguments], "")


def test_what_follows_the_arguments_in_a_message_of_harmony_is_content() -> None:
    written = BROKEN_JSON["harmony"].format('{"a": "x"}}\n or "y"?')
    assert read("harmony", written) == ([X], 'or "y"?')


@pytest.mark.parametrize(
    ("written", "calls", "content"),
    [
        ('f(a="x")', [X], ""),
        ('f(a="x"), g()', [X, {}], ""),
        ('f(a="x")\ng(b=1)', [X, {"b": 1}], ""),
        ('f(a="x"), g(y)', [X], "g(y)<|tool_call_end|>"),
    ],
)
def test_calls_of_lfm2_may_have_no_brackets(written: str, calls: list[Any], content: str) -> None:
    got, text = read("lfm2", LFM2.format(written))
    assert got == calls and text.lstrip(", ") == content


@pytest.mark.parametrize(
    ("written", "first"),
    [
        *((f'a:<|"|>x<|"|>{separator}', X) for separator in (",", ";", " ", "\n", "; ", "")),
        *((f"n:1{separator}", {"n": 1}) for separator in (",", ";", "; ")),
    ],
)
def test_another_separator_of_gemma_loses_no_argument(written: str, first: dict[str, Any]) -> None:
    got, content = read("gemma4", GEMMA.format(f'{written}b:<|"|>y<|"|>'))
    assert (got, content) == ([{**first, "b": "y"}], "")


PLAIN_PARAMETER = '<parameter name="{}" string="true">{}</parameter>\n'
DSML_PARAMETER = '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n'


@pytest.mark.parametrize("first", [PLAIN_PARAMETER, DSML_PARAMETER])
@pytest.mark.parametrize("second", [PLAIN_PARAMETER, DSML_PARAMETER])
def test_parameters_of_deepseek_may_have_the_tags_of_xml(first: str, second: str) -> None:
    values = {"a": "x </parameter> y", "b": "</｜DSML｜parameter>."}
    written = first.format("a", values["a"]) + second.format("b", values["b"])
    call = f'<｜DSML｜invoke name="f">\n{written}</｜DSML｜invoke>\n'
    answer = f"<｜DSML｜function_calls>\n{call}{call}</｜DSML｜function_calls>"
    assert read("deepseek_v32", answer) == ([values, values], "")
