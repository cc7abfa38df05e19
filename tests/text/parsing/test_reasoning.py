"""Reasoning blocks, alone and with calls."""

from __future__ import annotations

import pytest
from support.parsed_answers import MISTRAL, PLAIN, QWEN, Parsed, form_of, parse, parsed, replay

from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from minisgl.text.parsing.emitter import MAX_HELD_CHARS
from minisgl.text.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "in_reasoning", "reasoning", "content"),
    [
        # The model opens the block.
        ("<think>\nWell.\n</think>\n\nYes.", False, "Well.", "Yes."),
        ("\n\n<think>Well.</think>Yes.\n", False, "Well.", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>  a\n\n  b  \n\n</think>\n\n  Yes.", False, "  a\n\n  b  ", "  Yes."),
        # The template has opened it.
        ("Well.\n</think>\n\nYes.", True, "Well.", "Yes."),
        ("\n</think>\n\nYes.", True, "", "Yes."),
        ("<think>\nWell.</think>Yes.", True, "Well.", "Yes."),
        ("Write <think> or </thin>.</think>Yes.", True, "Write <think> or </thin>.", "Yes."),
        # There is none, or it is switched off.
        ("Yes.\n", False, "", "Yes.\n"),
        ("  \n\nYes.", False, "", "  \n\nYes."),
        ("The tag <think> opens it.", False, "", "The tag <think> opens it."),
        ("Between <think> and </think>.", False, "", "Between <think> and </think>."),
        ("\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes.\n</think>\nNo.", False, "", "Yes.\n\nNo."),
        ("<thin", False, "", "<thin"),
        # It is not closed, or twice, or there are several.
        ("<think>\nWell,\n\n", False, "Well,\n\n", ""),
        ("Well, </thi", True, "Well, </thi", ""),
        ("a</think>\n</think>\n\nYes.", True, "a", "Yes."),
        # Behind the first, the marker is text.
        ("a</think>\n\nYes.</think> No.", True, "a", "Yes.</think> No."),
        (
            '<think>a</think>text.split("</think>")[-1]\n</think>\n',
            False,
            "a",
            'text.split("</think>")[-1]\n</think>\n',
        ),
        ("<think>a</think>\nb\n<think>\nc\n</think>\n\nd", False, "a\n\nc", "b\n\nd"),
        ("", True, "", ""),
    ],
)
def test_blocks_and_the_line_breaks_around_them(
    tokenizer: Tokenizer, answer: str, in_reasoning: bool, reasoning: str, content: str
) -> None:
    for tool_parser in ("none", "hermes"):
        got = parse(
            tokenizer, tool_parser, answer, reasoning_parser="think", in_reasoning=in_reasoning
        )
        assert got == Parsed(reasoning, content)


@pytest.mark.parametrize("tokenizer", [QWEN, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "num_calls"),
    [
        (f"<think>\na\n</think>\n\n{CALL}", "a", "", 1),
        (f"<think>\na\n</think>\n\nI look.\n{CALL}\n", "a", "I look.", 1),
        (f"<think>\na\n{CALL}", "a", "", 1),
        (f"<think>\na\n{CALL}</think>\nb", f"a\n{CALL}", "b", 0),
        (f"<think>\na\n{CALL}</think>\n{CALL}", f"a\n{CALL}", "", 1),
        (f"<think>{CALL}{CALL}</think>b<think>c{CALL}", f"{CALL}{CALL}", "b<think>c", 1),
        (f"<think>a{CALL}b\n{CALL}c", "a", "b\n\nc", 2),
        (f"<think>\na <tool_call> b\n{CALL}", "a <tool_call> b", "", 1),
        (f"{CALL}<think>a</think>{CALL}", "a", "", 2),
    ],
)
def test_a_call_ends_a_block_that_never_closes_and_is_thought_in_another(
    tokenizer: Tokenizer, answer: str, reasoning: str, content: str, num_calls: int
) -> None:
    got = parse(tokenizer, "hermes", answer, reasoning_parser="think")
    assert got == Parsed(reasoning, content, [("f", "{}")] * num_calls, num_calls)


def test_calls_without_a_marker_are_found_after_reasoning() -> None:
    answer = '<think>a</think>\n{"name": "f", "parameters": {}}'
    got = parse(PLAIN, "llama3_json", answer, reasoning_parser="think")
    assert got == Parsed("a", "", [("f", "{}")], 1)
    got = parse(PLAIN, "pythonic", "a</think>[f()]", reasoning_parser="think", in_reasoning=True)
    assert got == Parsed("a", "", [("f", "{}")], 1)


def test_magistral_thinks_between_tokens_of_its_own() -> None:
    answer = "[THINK]Well.[/THINK]I look.[TOOL_CALLS]f[ARGS]{}"
    got = parse(MISTRAL, "mistral", answer, reasoning_parser="think")
    assert got == Parsed("Well.", "I look.", [("f", "{}")], 1)
    answer = "[THINK]Is it [TOOL_CALLS]f[ARGS]{}?[/THINK][TOOL_CALLS]g[ARGS]{}"
    got = parse(MISTRAL, "mistral", answer, reasoning_parser="think")
    assert got.calls == [("g", "{}")]


def test_events_come_in_the_order_in_which_the_model_writes() -> None:
    form = form_of(QWEN, "hermes", "think")
    ids = QWEN.encode(f"<think>a</think>b\n<think>c</think>{CALL}d")
    assert replay(QWEN, form, ids) == [
        ReasoningText("a"),
        ContentText("b"),
        ReasoningText("\n\nc"),
        CallStart(0, "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
        ContentText("\n\nd"),
    ]


def test_a_marker_that_is_a_token_is_never_found_by_its_text() -> None:
    """Text that quotes a marker is spelled with other tokens."""
    spelled = [byte for char in "</think>" for byte in QWEN.encode(char)]
    ids = [*QWEN.encode("<think>a "), *spelled, *QWEN.encode(" b</think>c")]
    form = form_of(QWEN, "hermes", "think")
    assert replay(QWEN, form, ids) == [ReasoningText("a </think> b"), ContentText("c")]


def test_what_may_be_thought_is_held_back_and_nothing_before_it() -> None:
    form = form_of(PLAIN, "hermes", "think")
    parser = form.parser(in_reasoning=True)
    assert parser is not None
    assert parser.feed([(-1, f"a{CALL}b")]) == [ReasoningText("a")]
    assert parser.feed([(-1, "c</think>d")]) == [ReasoningText(f"{CALL}bc"), ContentText("d")]


def test_reasoning_tokens_are_counted_with_their_markers() -> None:
    form = form_of(QWEN, "hermes", "think")
    for in_reasoning, answer, count in (
        (False, "<think>\nWell.\n</think>\n\nYes.", "<think>\nWell.\n</think>"),
        (True, "Well.\n</think>Yes.", "Well.\n</think>"),
        (True, "Well, and", "Well, and"),
        (True, f"Well.{CALL}", "Well."),
        (True, f"Well.{CALL}</think>Yes.", f"Well.{CALL}</think>"),
        (False, "Yes.", ""),
    ):
        parser = form.parser(in_reasoning=in_reasoning)
        assert parser is not None
        for token_id in QWEN.encode(answer):
            is_marker = token_id in parser.marker_ids
            parser.feed([(token_id, "" if is_marker else QWEN.token_text(token_id))])
        parser.finish(True)
        assert parser.num_reasoning_tokens == len(QWEN.encode(count))


def test_a_character_that_a_marker_breaks_off_comes_before_it() -> None:
    half = next(i for i in range(QWEN.vocab_size) if QWEN.token_bytes(i) == b"\xf0")
    ids = [*QWEN.encode("<think>a"), half, *QWEN.encode("</think>b"), half]
    form = form_of(QWEN, "hermes", "think")
    assert replay(QWEN, form, ids) == [ReasoningText("a\ufffd"), ContentText("b\ufffd")]


def test_endless_blanks_are_not_held_back() -> None:
    for spaces, tool_parser in ((" " * 5000, "hermes"), ("\n" * 5000, "llama3_json")):
        form = form_of(PLAIN, tool_parser, "think")
        parser = form.parser()
        assert parser is not None
        events = [event for blank in f"a{spaces}" for event in parser.feed([(-1, blank)])]
        assert parsed(events).content == f"a{spaces}"[:-MAX_HELD_CHARS]
        assert parsed([*events, *parser.finish(True)]).content == f"a{spaces}"
