"""The choice of parsers by template and vocabulary, and how a prompt leaves a block."""

from __future__ import annotations

import re

import pytest
from support.folders import ROOT
from support.parsed_answers import LLAMA, MISTRAL, OLD_MISTRAL, PLAIN, QWEN, form_of
from support.toy_tokenizers import spelled_backend, with_tokens, wrap

from minisgl.text.parsing import formats, json_formats
from minisgl.text.parsing.formats import BY_NAME
from minisgl.text.parsing.names import AUTO, NONE, TOOL_PARSERS
from minisgl.text.parsing.selection import AnswerFormat, choose_format
from minisgl.text.tokenizer import Tokenizer

CONTROL = ("<|im_start|>", "<|im_end|>")


def with_template(template: str | None, *tokens: str) -> Tokenizer:
    return with_tokens(*tokens, special=CONTROL, chat_template=template)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{% if tools %}<tools>{% endif %}<tool_call>", BY_NAME["hermes"], None),
        (
            "{{ tools }}<tool_call>{{ reasoning_content }}</think>",
            BY_NAME["hermes"],
            formats.THINK,
        ),
        ("{{ tools }}<tool_call><function=x><parameter=y>", BY_NAME["qwen3_coder"], None),
        ("{{ tools }}[TOOL_CALLS][ARGS]", json_formats.MISTRAL_LIST, None),
        ("{{ tools }}[TOOL_CALLS][THINK]", json_formats.MISTRAL_LIST, formats.MAGISTRAL),
        ('{{ tools }}{"name": name, "parameters": values}', BY_NAME["llama3_json"], None),
        ("{{ tools }}<|python_tag|>", BY_NAME["llama3_json"], None),
        ("{{ tools }}[func_name1(a=b)] parameters", BY_NAME["pythonic"], None),
        (
            'in a single JSON array: [{"name": "tool_call_name", "arguments": {}}]{{ tools }}',
            BY_NAME["xlam"],
            None,
        ),
        (
            '{{ tools }}<function=x>{"parameters": {}}</function><|python_tag|>',
            BY_NAME["functionary_v3_1"],
            None,
        ),
        ("{{ tools }}{{ '>>>all\\n' + content }}>>>", BY_NAME["functionary_v3_2"], None),
        (
            "{{ tools }}{{ tool['type'] + '<｜tool▁sep｜>' + name }}</think>",
            BY_NAME["deepseek_v3"],
            formats.THINK,
        ),
        ("{{ tools }}<|channel|>final<|message|>", formats.HARMONY, formats.ANALYSIS),
        (
            "{{ tools }}<｜tool▁call▁begin｜>{{ name + '<｜tool▁sep｜>' + arguments }}",
            BY_NAME["deepseek_v31"],
            None,
        ),
        (
            "{{ tools }}<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value></think>",
            BY_NAME["glm45"],
            formats.THINK,
        ),
        (
            "{{ tools }}<|tool_call>call:<|channel>thought",
            BY_NAME["gemma4"],
            formats.THOUGHT,
        ),
        (
            "{{ tools }}<tool_call>{{ n }}<arg_key></arg_key><arg_value>",
            BY_NAME["glm47"],
            None,
        ),
        (
            "{{ tools }}{{ '<seed:tool_call>' }}<function=x><parameter=y></parameter><seed:think>",
            BY_NAME["seed_oss"],
            formats.SEED_THINK,
        ),
        (
            "{{ tools }}{{ '<minimax:tool_call>' }}<invoke name='x'><think>",
            BY_NAME["minimax_m2"],
            formats.THINK,
        ),
        (
            "{% set dsml_token = '｜DSML｜' %}{{ tools }}<{{ dsml_token }}function_calls></think>",
            BY_NAME["deepseek_v32"],
            formats.THINK,
        ),
        ("{{ tools }}<|tool_calls_section_begin|>functions.", BY_NAME["kimi_k2"], None),
        (
            "{% if tools %}<|im_system|>tool_declare<|im_middle|>{% endif %}",
            BY_NAME["kimi_k2"],
            None,
        ),
        ("{{ tools }}{{ '<|tool_call_start|>[' }}", BY_NAME["lfm2"], None),
        ('{{ "List of tools: <|tool_list_start|>[" + tools }}', BY_NAME["lfm2"], None),
        # Templates that leave the tools out, and calls as well.
        (
            "{{ m['tool_calls'] }}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}",
            BY_NAME["deepseek_v3"],
            None,
        ),
        (
            "{{ m['tool_calls'] }}{{ '<｜tool▁call▁begin｜>' + f['name'] + '<｜tool▁sep｜>' }}",
            BY_NAME["deepseek_v31"],
            None,
        ),
        (
            'an AI assistant named SmolLM{% if m.role == "tool" %}<think></think>',
            BY_NAME["hermes"],
            formats.THINK,
        ),
        # Formats of other families, which are not read.
        ("{{ tools }}in <tool_call></tool_call>: <tool_calls>[{{ call }}]", None, None),
        ("{{ tools }}<｜DSML｜tool_calls><｜DSML｜invoke>", None, None),
        ('{{ tools }}{"tool_name": name, "parameters": values}', None, None),
        ("<tool_call> is not offered", None, None),
        ("{{ tools }} in words of its own", None, None),
        ("<think>\n", None, formats.THINK),
        (None, None, None),
    ],
)
def test_auto_goes_by_the_chat_template(
    template: str | None,
    calls: formats.CallFormat | None,
    reasoning: formats.ReasoningFormat | None,
) -> None:
    form = choose_format(with_template(template))
    assert (form.calls, form.reasoning) == (calls, reasoning)


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("<tool_call>", "hermes"),
        ("<arg_key>", "glm47"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call_start|>", "lfm2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<seed:tool_call>", "seed_oss"),
        ("｜DSML｜", "deepseek_v32"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ],
)
def test_where_a_template_has_nothing_to_do_with_tools_the_vocabulary_tells(
    token: str, name: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    calls = choose_format(with_template(template, token)).calls
    assert calls is not None and calls.name == name
    assert choose_format(with_template("{{ tools }} in words of its own", token)).calls is None


def test_mistral_writes_args_where_the_vocabulary_has_them() -> None:
    assert form_of(MISTRAL, "mistral").calls is BY_NAME["mistral"]
    assert form_of(OLD_MISTRAL, "mistral").calls is json_formats.MISTRAL_LIST


def test_named_parsers_do_not_need_a_template() -> None:
    form = form_of(with_template(None), "hermes", "think")
    assert (form.calls, form.reasoning, dict(form.marker_ids)) == (
        BY_NAME["hermes"],
        formats.THINK,
        {},
    )
    assert form_of(MISTRAL, "none", "think").reasoning is formats.MAGISTRAL
    assert str(form) == "tool calls hermes, reasoning think"
    assert str(form_of(QWEN, "none")) == "tool calls none, reasoning none"


def test_unknown_parsers_are_refused() -> None:
    for names in (("herms", "none"), ("none", "thinking")):
        with pytest.raises(ValueError, match="no such parsers"):
            form_of(QWEN, *names)


def test_markers_are_tokens_only_where_they_were_added_as_tokens() -> None:
    assert form_of(QWEN, "hermes", "think").marker_ids.keys() == {
        *("<tool_call>", "</tool_call>", "<think>", "</think>")
    }
    assert form_of(PLAIN, "hermes", "think").marker_ids == {}
    llama = form_of(LLAMA, "llama3_json")
    assert llama.marker_ids.keys() == llama.special == {"<|python_tag|>"}
    assert form_of(QWEN, "hermes").special == frozenset()


def test_there_is_no_parser_where_there_is_nothing_to_parse() -> None:
    assert AnswerFormat(None, None).parser() is None
    assert form_of(QWEN, "hermes").parser(parse_calls=False) is None
    assert form_of(QWEN, "hermes", "think").parser(parse_calls=False) is not None
    assert form_of(QWEN, "functionary_v3_2").parser(parse_calls=False) is not None


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("prompt", "opens", "closes"),
    [
        ("<|im_start|>assistant\n", False, False),
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("<|im_start|>assistant\n</think>", False, True),
        ("<|im_start|>assistant\n<think>\nHalf a thou", True, False),
        ("<|im_start|>assistant\n<think>a</think>Half an ans", False, True),
        # What a user or an earlier answer says does not count.
        ("<|im_start|>user\nWhat is <think>?<|im_end|><|im_start|>assistant\n", False, False),
        ("<|im_start|>user\n</think><|im_end|><|im_start|>assistant\n<think>", True, False),
        ("<|im_start|>user\n</think><|im_end|><|im_start|>assistant\n", False, False),
        # Nothing tells the generation prompt from what is before it: only the end counts.
        ("user: what is <think>?\nassistant:", False, False),
        ("user: what is </think>?\nassistant:", False, False),
        ("user: hello\nassistant: <think>\n", True, False),
        ("user: hello\nassistant: <think></think>\n", False, True),
        ("", False, False),
    ],
)
def test_a_prompt_opens_or_closes_reasoning_behind_its_last_control_token(
    tokenizer: Tokenizer, prompt: str, opens: bool, closes: bool
) -> None:
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    form = form_of(tokenizer, "hermes", "think")
    assert form.opens_reasoning(tokenizer, ids) is opens
    assert form.closes_reasoning(tokenizer, ids) is closes
    form = form_of(tokenizer, "hermes")
    assert not form.opens_reasoning(tokenizer, ids) and not form.closes_reasoning(tokenizer, ids)


def test_tokens_of_magistral_open_reasoning_though_they_are_control_tokens() -> None:
    form = form_of(MISTRAL, "mistral", "think")
    for prompt, opens in (("<s>a[THINK]", True), ("<s>[THINK]a[/THINK]", False)):
        assert form.opens_reasoning(MISTRAL, MISTRAL.encode(prompt)) is opens


def test_the_sign_may_be_in_any_of_several_templates() -> None:
    backend = wrap(spelled_backend())
    backend.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}<tool_call>"}
    assert choose_format(Tokenizer(backend, "toy")).calls is BY_NAME["hermes"]


def test_the_document_has_every_format_of_calls() -> None:
    text = (ROOT / "minisgl" / "server" / "README.md").read_text()
    table = text.partition("| `--tool-parser` | models")[2].partition("\n\n")[0]
    first = re.findall(r"^\| (`[\w`, ]+`) \|", table, re.MULTILINE)
    written = re.findall(r"\w+", " ".join(first))
    assert {*written, AUTO, NONE} == {*TOOL_PARSERS}
