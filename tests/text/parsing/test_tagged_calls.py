"""Calls with tags around names and values: what is unambiguous is read, the rest is content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parsed_answers import GLM, PLAIN, QWEN, fed_in_runs, form_of, parse, parsed
from support.toy_tokenizers import with_tokens

from minisgl.text.parsing import formats
from minisgl.text.parsing.formats import BY_NAME

STRING = {"type": "string"}
TYPES: dict[str, Any] = {
    "city": STRING,
    "name": STRING,
    "days": {"type": "integer"},
    "flag": {"type": "boolean"},
    "things": {"type": "array"},
}
TOOLS = {"f": {"type": "object", "properties": TYPES}, "g": {}}
SEED = with_tokens(*BY_NAME["seed_oss"].markers)
MINIMAX = with_tokens(*BY_NAME["minimax_m2"].markers)
DEEPSEEK = with_tokens(*BY_NAME["deepseek_v32"].markers)
# A format, a vocabulary with its tags as tokens where models have them, and how calls are written.
FORMATS = {
    "qwen3_coder": (QWEN, "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
    "seed_oss": (SEED, "<parameter={}>{}</parameter>\n", "</function>\n</seed:tool_call>"),
    "minimax_m2": (
        MINIMAX,
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "deepseek_v32": (
        DEEPSEEK,
        '<｜DSML｜parameter name="{}" string="{string}">{}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "glm45": (GLM, "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "glm47": (GLM, "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
}


def begin(name: str) -> str:
    """What a call of `f` begins with."""
    [form] = [form for form in formats.CALL_FORMATS if form.name == name]
    return form.spelling.begin + form.spelling.head + "f" + form.spelling.middle


def argument(name: str, key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return FORMATS[name][1].format(key, text, string=json.dumps(isinstance(value, str)))


def call(name: str, *arguments: str) -> str:
    return begin(name) + "".join(arguments) + FORMATS[name][2]


def read(name: str, answer: str, *, tools: Mapping[str, Any] | None = TOOLS, **options: Any) -> Any:
    """The arguments of the calls, and the content; in all splits, with and without tokens."""
    whole, text = (
        parse(tokenizer, name, answer, tools=tools, **options)
        for tokenizer in (FORMATS[name][0], PLAIN)
    )
    assert whole == text
    return [arguments for _, arguments in whole.calls], whole.content


GOOD = {name: argument(name, "days", 3) for name in FORMATS}


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "value",
    [
        *("", "5", " a\n", 'true "b" \\', "a </arg_value> b", "a </tool_call> b", "</tool_call>"),
        *("a </parameter> b</function>c</invoke>d", "</seed:tool_call> </minimax:tool_call>!"),
        *("x </tool_call>\n<tool_call>y", "</arg_value>", "<arg_key>city</arg_key>", "</arg_key>"),
        *("</｜DSML｜parameter>.</｜DSML｜function_calls>.", "<tool_call>", "<parameter=q>"),
    ],
)
def test_a_text_may_have_any_tags_in_it(name: str, value: str) -> None:
    for arguments, rest in (
        ({"city": value, "things": [value], "days": 3}, ""),
        ({"days": 3, "name": value}, "\n" + call(name, GOOD[name])),
    ):
        written = [argument(name, key, each) for key, each in arguments.items()]
        got, content = read(name, call(name, *written) + rest)
        assert json.loads(got[0]) == arguments and not content


PIECES = st.sampled_from(
    ["</arg_value>", "</tool_call>", "<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
     "</parameter>", "</function>", "</invoke>", "<parameter=", "\n", " ", "a", "é", '"', "\\"]
)  # fmt: skip
# Behind a closing there is a word, so that nothing in a value looks like the end of a call.
VALUES = st.lists(PIECES, max_size=8).map(lambda pieces: "".join(f"{each}x" for each in pieces))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), values=st.dictionaries(st.sampled_from([*TYPES]), VALUES))
def test_what_is_written_is_read_in_any_pieces(
    name: str, data: st.DataObject, values: dict[str, str]
) -> None:
    tools = {"f": {"properties": dict.fromkeys(TYPES, STRING)}}
    answer = call(name, *(argument(name, key, value) for key, value in values.items()))
    for tokenizer in (FORMATS[name][0], PLAIN):
        form = form_of(tokenizer, name)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
        got = parsed(fed_in_runs(tokenizer, form, ids, cuts, tools=tools))
        assert got.objects == [("f", values)] and not got.content


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("key", "value"), [("flag", True), ("days", 7), ("things", ["</a>"])])
def test_a_value_that_is_no_string_ends_where_it_is_whole(name: str, key: str, value: Any) -> None:
    closing = FORMATS[name][1].rpartition("{}")[2].strip()
    for written, odd in ((closing, ""), ("odd", "odd")):
        answer = call(name, argument(name, key, value), written, argument(name, "name", "x"))
        got, content = read(name, answer)
        assert (json.loads(got[0]), content) == ({key: value, "name": "x"}, odd)


@pytest.mark.parametrize("name", FORMATS)
def test_what_ends_a_call_does_not_end_a_string_in_json(name: str) -> None:
    end = FORMATS[name][1].rpartition("{}")[2].strip() + FORMATS[name][2]
    things = [f'\\"{end}', end, '"' + end.replace("\n", "")]
    answer = call(name, argument(name, "things", things), argument(name, "city", "x"))
    got, content = read(name, answer)
    assert (json.loads(got[0]), content) == ({"things": things, "city": "x"}, "")


def test_a_quote_that_stays_open_ends_with_its_line() -> None:
    name = "qwen3_coder"
    got, content = read(name, call(name, argument(name, "things", '["x]'), GOOD[name]))
    assert (json.loads(got[0]), content) == ({"things": '["x]', "days": 3}, "")


@pytest.mark.parametrize("name", FORMATS)
def test_python_values_may_have_tokens_in_them(name: str) -> None:
    tag = FORMATS[name][2].rpartition("\n")[2]
    written = argument(name, "things", [0]).replace("[0]", f"['{tag} x', None]")
    got, content = read(name, call(name, written, GOOD[name]))
    assert (json.loads(got[0]), content) == ({"things": [f"{tag} x", None], "days": 3}, "")


# -- tags that are written wrongly -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "arguments", "content"),
    [
        ("<parameter=city\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter==city>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter=city=>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter = city >\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter:city>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter city>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ('<parameter="city">\nUlm\n</parameter>', {"city": "Ulm"}, ""),
        ('<parameter name="city">\nUlm\n</parameter>', {"city": "Ulm"}, ""),
        ("<parameter=name='city'>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ("<parameter=name=city>\nUlm\n</parameter>", {"city": "Ulm"}, ""),
        ('<parameter=city type="string">\nUlm\n</parameter>', {"city": "Ulm"}, ""),
        ("<parameter=name>\nUlm\n</parameter>", {"name": "Ulm"}, ""),
        ("<parameter=city>\nUlm", {"city": "Ulm"}, ""),
        ("<parameter=city>\nUlm\n</parameter>\n<parameter=city>\nBonn\n</parameter>",
         {"city": "Ulm"}, "<parameter=city>\nBonn\n</parameter>"),
        *(
            (text, {}, text)
            for text in (
                *("<parameter=>\nUlm\n</parameter>", "<parameter>\nUlm\n</parameter>"),
                *("<parameter=city Ulm</parameter>", "<parameter=city=Ulm>\n</parameter>"),
                *("<parameter", "<parameter=", "<param=city>\nUlm\n</param>", "odd"),
            )
        ),
    ],
)  # fmt: skip
def test_a_malformed_parameter_does_not_take_others_with_it(
    written: str, arguments: dict[str, Any], content: str
) -> None:
    name = "qwen3_coder"
    for answer, expected in (
        (call(name, written + "\n", GOOD[name]), {**arguments, "days": 3}),
        (call(name, GOOD[name], written + "\n"), {"days": 3, **arguments}),
    ):
        got, rest = read(name, answer + "\n" + call(name))
        assert ([*map(json.loads, got)], rest) == ([expected, {}], content)


@pytest.mark.parametrize(
    "tag",
    ["<function=f\n", '<function="f">\n', '<function name="f">\n', "<function f>\n"],
)
def test_a_malformed_function_is_read_where_its_name_is_certain(tag: str) -> None:
    answer = call("qwen3_coder", GOOD["qwen3_coder"]).replace("<function=f>\n", tag)
    assert read("qwen3_coder", answer) == (['{"days": 3}'], "")


@pytest.mark.parametrize("name", ["glm45", "glm47"])
@pytest.mark.parametrize(
    ("written", "arguments", "content"),
    [
        ("<arg_key>city<arg_value>Ulm</arg_value>\n", {"city": "Ulm"}, ""),
        ("<arg_key>city</arg_key>\nUlm</arg_value>\n", {"city": "Ulm"}, ""),
        ("\ncity</arg_key>\n<arg_value>Ulm</arg_value>\n", {"city": "Ulm"}, ""),
        ("<arg_key><arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n", {"city": "Ulm"}, ""),
        ("<arg_key>city</arg_key></arg_key>\n<arg_value>Ulm</arg_value>\n", {"city": "Ulm"}, ""),
        ("<arg_key>flag</arg_key>\n<arg_value><arg_value>true</arg_value>\n", {"flag": True}, ""),
        *(
            (text, {}, text.strip())
            for text in (
                *("<arg_key>city</arg_key>\n", "<arg_value>Ulm</arg_value>\n", "</arg_key>"),
                "<arg_key></arg_key>\n<arg_value>Ulm</arg_value>\n",
            )
        ),
        (
            "<arg_key>city</arg_key>\n<arg_value>a</arg_value>\n" * 2,
            {"city": "a"},
            "<arg_key>city</arg_key>\n<arg_value>a</arg_value>",
        ),
    ],
)
def test_missing_and_doubled_tags_of_glm_lose_nothing(
    written: str, arguments: dict[str, Any], content: str, name: str
) -> None:
    line = "" if name == "glm47" else "\n"
    if not written.startswith("\n"):  # which is between the name and the first key
        written, content = written.replace("\n", line), content.replace("\n", line)
    for answer, expected in (
        (call(name, written, GOOD[name]), {**arguments, "days": 3}),
        (call(name, GOOD[name], written), {"days": 3, **arguments}),
    ):
        got, rest = read(name, answer + line + call(name))
        assert ([*map(json.loads, got)], rest) == ([expected, {}], content)


@pytest.mark.parametrize("name", FORMATS)
def test_closings_may_be_missing(name: str) -> None:
    city, closing = argument(name, "city", "Ulm"), FORMATS[name][1].rpartition("{}")[2]
    unclosed = city.removesuffix(closing) + ("" if name == "glm47" else "\n")
    whole = '{"city": "Ulm", "days": 3}'
    assert read(name, call(name, unclosed, GOOD[name])) == ([whole], "")
    assert read(name, begin(name) + city + GOOD[name]) == ([whole], "")
    assert read(name, begin(name) + city + GOOD[name].removesuffix(closing)) == ([whole], "")
    # An answer that is cut is not completed, and none of its tags are content.
    for end in range(len(GOOD[name])):
        answer = begin(name) + city + GOOD[name][:end]
        got = parse(PLAIN, name, answer, tools=TOOLS, natural=False)
        [(_, arguments)] = got.calls
        assert arguments.startswith('{"city": "Ulm"') and "}" not in arguments and not got.content


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minimax_m2", "deepseek_v32"])
def test_one_tag_may_be_around_several_calls(name: str) -> None:
    end = FORMATS[name][2].partition("\n")[0] + "\n"
    spelling = next(form.spelling for form in formats.CALL_FORMATS if form.name == name)
    first = f"{begin(name)}{GOOD[name]}{end}"
    second = f"{spelling.head}g{spelling.middle}{end}"
    answer = f"I look.\n{first}{second}{spelling.end}"
    assert read(name, answer) == (['{"days": 3}', "{}"], "I look.")
    bare = answer.replace(spelling.begin, "").removesuffix(spelling.end)
    assert read(name, bare) == (['{"days": 3}', "{}"], "I look.")


def test_deepseek_says_whether_a_value_is_a_string() -> None:
    values = [("a", "true"), ("b", "false"), ("city", "false"), ("days", "true")]
    written = [
        f'<｜DSML｜parameter name="{key}" string="{is_string}">5</｜DSML｜parameter>\n'
        for key, is_string in values
    ]
    answer = call("deepseek_v32", *written, '<｜DSML｜parameter name="c">5</｜DSML｜parameter>\n')
    arguments = '{"a": "5", "b": 5, "city": "5", "days": 5, "c": 5}'
    assert read("deepseek_v32", answer) == ([arguments], "")


KIMI = (
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "<|x|>"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.g-h.i:11<|tool_call_argument_begin|> {} <|tool_call_end|>"
)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("name", "answer", "content", "calls"),
    [
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", "",
         [("f", '{"a": "<|x|>"}'), ("g-h.i", "{}")]),
        ("kimi_k2", "I look.<|tool_call_begin|>f<|tool_call_argument_begin|>{}", "I look.",
         [("f", "{}")]),
        *(("kimi_k2", text, text, []) for text in (
            "<|tool_calls_section_begin|>no", "<|tool_call_begin|>functions.f:0",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>no")),
        ("lfm2", """Hm.<|tool_call_start|>[f(a='x', b="y"), g(c=[1, None])]<|tool_call_end|>""",
         "Hm.", [("f", '{"a": "x", "b": "y"}'), ("g", '{"c": [1, null]}')]),
        ("lfm2", "<|tool_call_start|>[f(a='1\n 2\\n', b='''\n\\'''')]<|tool_call_end|>", "",
         [("f", '{"a": "1\\n 2\\n", "b": "\\n\'"}')]),
        ("lfm2", '<|tool_call_start|> [ {"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>', "",
         [("f", '{"a": 1}')]),
        ("lfm2", '<|tool_call_start|>{"name": "f", "arguments": {}}<|tool_call_end|>', "",
         [("f", "{}")]),
        ("lfm2", "<|tool_call_start|>[f(x)]", "<|tool_call_start|>[f(x)]", []),
        ("lfm2", "[f(a=1)]", "[f(a=1)]", []),
    ],
)  # fmt: skip
def test_calls_of_kimi_and_lfm2(
    name: str, answer: str, content: str, calls: list[tuple[str, str]], tokens: bool
) -> None:
    [form] = [form for form in formats.CALL_FORMATS if form.name == name]
    tokenizer = with_tokens(*form.markers) if tokens else PLAIN
    got = parse(tokenizer, name, answer, tools={"f": {}})
    assert (got.content, got.calls) == (content, calls)
