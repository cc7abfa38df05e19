"""Laws of the answer parser: verbatim arguments, no influence of the pieces, linear time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parsed_answers import (
    DEEPSEEK,
    GEMMA,
    GLM,
    HARMONY,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN,
    Parsed,
    fed_in_runs,
    form_of,
    parsed,
    replay,
)

from minisgl.events import Event, joined
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.names import AUTO, TOOL_PARSERS
from minisgl.text.tokenizer import Tokenizer

# A model writes the spelling of a control token in several tokens, and a tokenizer reads it as one.
CONTROLS = {
    spelling
    for tokenizer in (DEEPSEEK, HARMONY, LLAMA, MISTRAL, PLAIN, QWEN)
    for spelling in tokenizer.control_tokens().values()
}
TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: not any(control in text for control in CONTROLS)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["</tool_call>", "{", "}", '"', "\\", "[ARGS]", "</think>"]) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-zA-Z_][\w-]{0,20}", fullmatch=True),
        st.dictionaries(TEXT, VALUES, max_size=4),
        st.booleans(),  # not only ASCII
        st.sampled_from([None, 1]),  # indent
    ),
    max_size=3,
)
Writer = Callable[[list[tuple[str, str]]], str]


def hermes(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama(calls: list[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def xlam(calls: list[tuple[str, str]]) -> str:
    written = (f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
    return f"[{', '.join(written)}]" if calls else ""


def functionary_v3_1(calls: list[tuple[str, str]]) -> str:
    return "".join(f"<function={name}>{arguments}</function>" for name, arguments in calls)


def functionary_v3_2(calls: list[tuple[str, str]]) -> str:
    first, *others = [f"{name}\n{arguments}" for name, arguments in calls] or ["all\n"]
    return first + "".join(f">>>{call}" for call in others)


def deepseek(calls: list[tuple[str, str]]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for name, text in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>" if calls else ""


def deepseek_v31(calls: list[tuple[str, str]]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        for name, text in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>" if calls else ""


def harmony(calls: list[tuple[str, str]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
        for name, text in calls
    )


def mistral(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


@pytest.mark.parametrize(
    ("tokenizer", "tool_parser", "write"),
    [
        (QWEN, "hermes", hermes),
        (PLAIN, "hermes", hermes),
        (LLAMA, "llama3_json", llama),
        (PLAIN, "xlam", xlam),
        (LLAMA, "functionary_v3_1", functionary_v3_1),
        (PLAIN, "functionary_v3_2", functionary_v3_2),
        (DEEPSEEK, "deepseek_v3", deepseek),
        (PLAIN, "deepseek_v3", deepseek),
        (DEEPSEEK, "deepseek_v31", deepseek_v31),
        (PLAIN, "deepseek_v31", deepseek_v31),
        (PLAIN, "mistral", mistral),
        (HARMONY, "harmony", harmony),
    ],
)
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, data=st.data())
def test_json_arguments_come_out_as_they_were_written_in_any_pieces(
    tokenizer: Tokenizer,
    tool_parser: str,
    write: Writer,
    calls: list[tuple[str, dict[str, object], bool, int | None]],
    data: st.DataObject,
) -> None:
    written = [
        (name, json.dumps(arguments, ensure_ascii=not plain, indent=indent))
        for name, arguments, plain, indent in calls
    ]
    form = form_of(tokenizer, tool_parser)
    ids = tokenizer.encode(write(written), add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    tools: Any = {name: {} for name, _ in written}
    events = fed_in_runs(tokenizer, form, ids, cuts, tools=tools)
    assert parsed(events) == Parsed("", "", written, len(written))
    assert replay(tokenizer, form, ids, tools=tools) == events


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), VALUES, max_size=4))
def test_tagged_and_python_arguments_become_the_same_json(arguments: dict[str, object]) -> None:
    properties = {key: {"type": type_of(value)} for key, value in arguments.items()}
    tools = {"f": {"properties": properties}}
    inside = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for key, value in arguments.items()
    )
    tagged = "\n".join(
        f"<arg_key>{key}</arg_key>\n"
        f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    source = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    keywords = {"in", "is", "if", "or", "as", "not", "and", "for", "def", "del", "try"}
    for tool_parser, answer in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"),
        ("glm45", f"<tool_call>f\n{tagged}\n</tool_call>"),
        ("pythonic", f"[f({source})]"),
    ):
        if tool_parser == "pythonic" and keywords & arguments.keys():
            continue  # cannot be written in Python
        form = form_of(PLAIN, tool_parser)
        got = parsed(replay(PLAIN, form, PLAIN.encode(answer), tools=tools))
        assert got.objects == [("f", arguments)]


def type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "null" if value is None else "object")


MARKUP = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "f>", "<parameter=", "a>",
     "</parameter>", "</function>", "\n", " ", "{", "}", '"', "name", ":", "arguments", ",", "[",
     "]", "f", "(", ")", "a=", "'", "\\", "1", "; ", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
     '{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}', "[f()]", "```json",
     "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁sep",
     "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", ">>>", "f\n", "all\n", ">>>f\n{",
     "[f(a=",
     '{"name": "f", "parameters": ', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
     "<tool_call>f", "</arg_", "<|tool_call>", "call:f{", "<tool_call|>",
     '<|"|>', "a:", "<|too", "<|start|>", "assistant", "<|channel|>", "analysis", "final",
     "commentary", " to=functions.f", " to=g", "<|constrain|>", "json", "<|message|>", "<|end|>",
     "<|call|>", "<|return|>", "<|chan", "<|channel|>final<|message|>", "<tool", "</th", "é", "👍",
     "\\ud800", "\\ud8", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "<invoke",
     ' name="f">', '<parameter name="a">', '" string="true">', "</invoke>", "</minimax:tool_call>",
     "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "<｜DSML｜parameter",
     "</｜DSML｜parameter>",
     "</｜DSML｜invoke>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "=a>",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call_start|>", "<|tool_calls_"]
)  # fmt: skip


@pytest.mark.parametrize("tool_parser", [name for name in TOOL_PARSERS if name != AUTO])
@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(MARKUP, max_size=20),
    natural=st.booleans(),
    in_reasoning=st.booleans(),
    data=st.data(),
)
def test_any_answer_gives_the_same_events_in_any_pieces(
    tool_parser: str, parts: list[str], natural: bool, in_reasoning: bool, data: st.DataObject
) -> None:
    answer = "".join(parts)
    tokenizer = data.draw(st.sampled_from([QWEN, PLAIN, MISTRAL, DEEPSEEK, GEMMA, GLM, HARMONY]))
    form = form_of(tokenizer, tool_parser, "think")
    ids = tokenizer.encode(answer, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    tools = data.draw(st.sampled_from([None, {"f": {}}]))
    options: Any = {"natural": natural, "in_reasoning": in_reasoning, "tools": tools}
    whole = replay(tokenizer, form, ids, **options)
    in_runs = fed_in_runs(tokenizer, form, ids, cuts, **options)
    assert in_runs == whole
    parsed(whole)  # calls in their order
    if tokenizer is PLAIN:  # also with the text cut anywhere, and as one piece
        for chunks in ([answer], list(answer)):
            parser = form.parser(in_reasoning=in_reasoning, tools=tools)
            assert parser is not None
            assert fed_as_text(parser, chunks, natural) == whole


def fed_as_text(parser: AnswerParser, chunks: list[str], natural: bool) -> list[Event]:
    events = [event for chunk in chunks for event in parser.feed([(-1, chunk)])]
    return joined([*events, *parser.finish(natural)])


def test_arguments_are_passed_on_with_the_token_that_they_come_with() -> None:
    form = form_of(QWEN, "hermes")
    parser = form.parser()
    assert parser is not None
    before, text = '<tool_call>\n{"name": "f", "arguments": ', '{"a": "x y z", "b": [1, 2]}'
    for token_id in QWEN.encode(before):
        parser.feed(
            [(token_id, "" if token_id in parser.marker_ids else QWEN.token_text(token_id))]
        )
    for token_id in QWEN.encode(text):
        piece = QWEN.token_text(token_id)
        [event] = parser.feed([(token_id, piece)])
        assert getattr(event, "text") == piece  # noqa: B009


SIZE = 4_000
LONG = [
    ("hermes", "a" * SIZE),
    ("hermes", "\n" * SIZE),
    ("hermes", "<tool_call>" * (SIZE // 10)),
    ("hermes", '<tool_call>{"name": "' + "a" * SIZE),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + '{"' * SIZE),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * SIZE),
    ("hermes", '<tool_call>{"arguments": {"a": "' + "b" * SIZE),
    ("hermes", '<tool_call>{"name": "f", "arguments": "' + '\\"' * SIZE),
    ("qwen3_coder", "<function=f><parameter=a>" + "</parameter> " * (SIZE // 10)),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter>" + " " * SIZE),
    ("qwen3_coder", "<function=f><parameter=b>" + "\n" * SIZE),
    ("llama3_json", '{"type": "' + "a" * SIZE),
    ("llama3_json", " " * SIZE),
    ("llama3_json", '{"parameters": {}, ' + '"id": 1, ' * (SIZE // 10)),
    ("llama3_json", "x" + '{"' * SIZE),
    ("llama3_json", "x" + '{"name": ' * (SIZE // 10)),
    ("llama3_json", "x" + '{"b": ' * (SIZE // 10)),
    ("llama3_json", "x" + '{"name": "b' * (SIZE // 10)),
    ("llama3_json", "x" + '{"name": "f", "parameters": {' * (SIZE // 20)),
    ("llama3_json", 'x {"name": "f", "parameters": {' + " " * SIZE),
    ("llama3_json", "x" + '{"name": "g", "parameters": {}} ' * (SIZE // 30)),
    ("pythonic", "x" + "[f(" * SIZE),
    ("pythonic", "x" + "[g(" * SIZE),
    ("pythonic", "x" + "[f(b)]" * (SIZE // 6)),
    ("pythonic", "[f(a=" + "(" * SIZE),
    ("pythonic", "[f(a='" + "\\'" * SIZE),
    ("pythonic", "[" + "f" * SIZE),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>" * (SIZE // 10)),
    ("deepseek_v3", "<｜tool▁call▁begin｜>" + "f" * SIZE),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>f" * (SIZE // 20)),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>f{}" + "<｜tool▁call▁e" * (SIZE // 10)),
    ("functionary_v3_1", "<function=" * (SIZE // 10)),
    ("functionary_v3_1", "<function=" + "f" * SIZE),
    ("functionary_v3_1", "<function=f>" * (SIZE // 10)),
    ("functionary_v3_1", "<function=f>{" * (SIZE // 10)),
    ("functionary_v3_2", ">>>" * SIZE),
    ("functionary_v3_2", "all\n" + ">>>f\n" * (SIZE // 5)),
    ("functionary_v3_2", "f\n" + " " * SIZE),
    ("functionary_v3_2", "f" * SIZE),
    ("xlam", "x" + "```" * (SIZE // 3)),
    ("xlam", "x" + "[" * SIZE),
    ("xlam", "x" + '[{"' * SIZE),
    ("xlam", "x" + '[{"b": ' * (SIZE // 10)),
    ("xlam", '[{"b": ' * (SIZE // 10)),
    ("xlam", "x" + '[{"name": "f", "arguments": {' * (SIZE // 20)),
    ("glm45", "<tool_call>" + "f" * SIZE),
    ("glm45", "<tool_call>f<arg_key>" + "</arg_k" * (SIZE // 6)),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_value> " * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>" + "</tool_call>a" * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>1</arg_value>" + " " * SIZE),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value>" * (SIZE // 50)),
    ("gemma4", '<|tool_call>call:f{a:<|"|>' + '<|"|>' * (SIZE // 5)),
    ("gemma4", '<|tool_call>call:f{a:<|"|>' + '<|"|>, ' * (SIZE // 7)),
    ("gemma4", '<|tool_call>call:f{a:<|"|>' + '<|"|>}]' * (SIZE // 7)),
    ("gemma4", "<|tool_call>call:f{a:" + "b, " * (SIZE // 3)),
    ("gemma4", "<|tool_call>call:f{a:" + "}b" * (SIZE // 2)),
    ("gemma4", "<|tool_call>call:f{" + "b, " * (SIZE // 3)),
    ("gemma4", "<|tool_call>call:f{" + "a:1," * (SIZE // 4)),
    ("gemma4", "<|tool_call>call:f{b:" + "[" * SIZE),
    ("gemma4", '<|tool_call>call:f{a:"' + "b\\," * (SIZE // 3)),
    ("gemma4", "<|tool_call>call:f{a:" + " " * SIZE),
    ("gemma4", "<|tool_call>call:f{a:" + ", " * (SIZE // 2)),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>" + "</arg_value> " * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_value>b" * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>" + "<arg_key>" * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>a" + "</arg_key>" * (SIZE // 10)),
    ("glm45", "<tool_call>f" + "<arg_key>a</arg_key>" * (SIZE // 20)),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "<tool_call>f" * (SIZE // 10)),
    ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>" + "</tool_call><tool_call>f" * 200),
    ("qwen3_coder", "<function=f>" + "<parameter=>x</parameter>" * (SIZE // 20)),
    ("qwen3_coder", "<function=f>" + "<parameter=a>x</parameter>" * (SIZE // 20)),
    ("qwen3_coder", "<function=f><parameter=n>" + "</parameter> " * (SIZE // 10)),
    ("qwen3_coder", "<function=f>" + "<parameter=" * (SIZE // 10)),
    ("qwen3_coder", "<function=f>" + "<parameter=<" * (SIZE // 10)),
    ("qwen3_coder", "<function=f><parameter=" + "<>" * SIZE),
    ("qwen3_coder", "<function=f>" + "odd " * SIZE),
    ("minimax_m2", '<minimax:tool_call><invoke name="f">' + "</invoke>" * (SIZE // 10)),
    ("minimax_m2", "<minimax:tool_call>" + '<invoke name="f">' * (SIZE // 15)),
    ("deepseek_v32", '<｜DSML｜invoke name="f">' + '<｜DSML｜parameter name="a' * (SIZE // 20)),
    ("seed_oss", "<seed:tool_call>" * (SIZE // 10)),
    ("kimi_k2", "<|tool_call_begin|>" + "f:" * SIZE),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>" * (SIZE // 40)),
    ("lfm2", "<|tool_call_start|>[" * (SIZE // 10)),
    ("lfm2", "<|tool_call_start|>[f(a='" + "\\n" * SIZE),
    ("harmony", "a" * SIZE),
    ("harmony", "<|channel|>" * (SIZE // 10)),
    ("harmony", "<|start|>" * (SIZE // 10)),
    ("harmony", "<|start|>" + " " * SIZE),
    ("harmony", "<|start|>" + "f " * SIZE),
    ("harmony", "<|start|> to=" + "f" * SIZE),
    ("harmony", "<|channel|>final<|message|>a<|end|>" * (SIZE // 30)),
    ("harmony", "<|channel|>analysis<|message|>" + "<|en" * (SIZE // 4)),
    ("harmony", " to=functions.f<|message|>" + "a" * SIZE),
    ("harmony", " to=functions.f<|message|>{" + " " * SIZE),
    ("harmony", " to=functions.f<|message|>{}" + "<|call" * (SIZE // 6)),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]" + "[AR" * SIZE),
    ("mistral", "[TOOL_CALLS]" + "[" * SIZE),
]


def steps_of(work: Callable[[], object]) -> int:
    """The number of function calls, those of the C code included, that `work` takes."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("tool_parser", "answer"), LONG, ids=range(len(LONG)))
@pytest.mark.parametrize("one_piece", [True, False])
def test_the_work_grows_no_faster_than_the_answer(
    tool_parser: str, answer: str, one_piece: bool
) -> None:
    form = form_of(PLAIN, tool_parser, "think")
    tools = {"f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}

    def work(text: str) -> Iterator[Event]:
        parser = form.parser(tools=tools)
        assert parser is not None
        chunks = [text] if one_piece else [text[i : i + 4] for i in range(0, len(text), 4)]
        return iter(fed_as_text(parser, chunks, True))

    half = steps_of(lambda: work(answer[: len(answer) // 2]))
    assert steps_of(lambda: work(answer)) < 2.2 * half + 1000
