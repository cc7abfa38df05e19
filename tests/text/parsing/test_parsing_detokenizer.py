"""The detokenizer of parsed answers: its text, its stop strings, its end."""

from __future__ import annotations

from typing import Any

import pytest
from support.parsed_answers import HARMONY, QWEN, form_of, parsed, replay

from minisgl.events import ContentText
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer

ARGUMENTS = '{"a": "END"}'
CALL = f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'


def detokenizer_with(**options: Any) -> ParsingDetokenizer:
    parser = form_of(QWEN, "hermes", "think").parser()
    assert parser is not None
    return ParsingDetokenizer(QWEN, parser, **options)


def run(answer: str, **options: Any) -> tuple[ParsingDetokenizer, str, int]:
    """Pushes an answer until it is stopped; returns its text and the number of tokens."""
    detokenizer = detokenizer_with(**options)
    text, num_tokens = "", 0
    for token_id in QWEN.encode(answer):
        text += detokenizer.push(token_id)
        num_tokens += 1
        if detokenizer.stopped is not None:
            assert detokenizer.push(token_id) == detokenizer.flush() == ""
            break
    else:
        text += detokenizer.flush()
    return detokenizer, text, num_tokens


def test_the_text_is_the_content() -> None:
    detokenizer, text, _ = run(f"<think>a</think>b{CALL}c")
    assert text == "b\n\nc"
    answer = parsed(detokenizer.take_events())
    assert (answer.reasoning, answer.content, answer.calls) == ("a", "b\n\nc", [("f", ARGUMENTS)])
    assert detokenizer.take_events() == []


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_match_content_only(include_stop: bool) -> None:
    answer = f"<think>END</think>b{CALL}cEND{CALL}d"
    detokenizer, text, num_tokens = run(answer, stop=("END",), include_stop=include_stop)
    assert detokenizer.stopped == "END"
    assert text == ("b\n\ncEND" if include_stop else "b\n\nc")
    assert num_tokens == len(QWEN.encode(f"<think>END</think>b{CALL}cEND"))
    got = parsed(detokenizer.take_events())
    assert (got.reasoning, got.content, got.calls) == ("END", text, [("f", ARGUMENTS)])


def test_no_stop_string_matches_across_a_call() -> None:
    detokenizer, text, _ = run(f"aEN{CALL}D", stop=("END",))
    assert (text, detokenizer.stopped) == ("aEN\n\nD", None)
    assert [
        event.text for event in detokenizer.take_events() if isinstance(event, ContentText)
    ] == ["a", "EN", "\n\nD"]


def test_no_stop_string_matches_what_only_sets_texts_apart() -> None:
    detokenizer, text, _ = run(f"a{CALL}bc{CALL}d", stop=("\n\n", "\nx", "cx"))
    assert (text, detokenizer.stopped) == ("a\n\nbc\n\nd", None)
    assert len(parsed(detokenizer.take_events()).calls) == 2
    detokenizer, text, _ = run(f"a{CALL}b\n\nc", stop=("\n\n",))
    assert (text, detokenizer.stopped) == ("a\n\nb", "\n\n")


def test_messages_of_an_answer_do_not_end_it_by_a_stop_string_between_them() -> None:
    note = "<|channel|>commentary<|message|>Let me think.<|end|><|start|>assistant"
    ids = HARMONY.encode(f"{note}<|channel|>final<|message|>It is 4.", add_special_tokens=False)
    events = replay(HARMONY, form_of(HARMONY, "harmony", "auto"), ids, stop=("\n\n",))
    assert events == [ContentText("Let me think.\n\nIt is 4.")]


def test_what_may_become_a_stop_string_is_content_at_the_end() -> None:
    detokenizer, text, _ = run("a EN", stop=("END",))
    assert (text, parsed(detokenizer.take_events()).content) == ("a EN", "a EN")


def test_min_tokens_counts_the_tokens_of_all_parts() -> None:
    answer = "<think>a</think>xEND yEND"
    num_before = len(QWEN.encode("<think>a</think>xEND"))
    for min_tokens, text in ((0, "x"), (num_before, "x"), (num_before + 1, "xEND y")):
        assert run(answer, stop=("END",), min_tokens=min_tokens)[1] == text
