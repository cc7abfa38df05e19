"""Answers in the harmony format: messages with headers."""

from __future__ import annotations

import pytest
from support.parsed_answers import (
    HARMONY,
    PLAIN,
    Parsed,
    fed_in_runs,
    form_of,
    parse,
    parsed,
    replay,
    splits,
)
from support.toy_tokenizers import with_tokens

from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from minisgl.text.parsing import formats, harmony
from minisgl.text.parsing.selection import choose_format
from minisgl.text.tokenizer import Tokenizer

ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"{ANALYSIS}Hm, 2 < 3.{NEXT}"
# Headers of a call, as models and the template write them.
HEADERS = [
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|> json<|message|>",
    "<|channel|>commentary to=functions.f json<|message|>",
    "<|channel|>commentary to=functions.f code<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "<|channel|>analysis to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    " to=functions.f<|channel|>analysis<|message|>",
    " to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|message|>",
]


def read(answer: str, *, tokenizer: Tokenizer = HARMONY, **options: object) -> Parsed:
    options = {"reasoning_parser": "think", **options}
    return parse(tokenizer, "harmony", answer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", [HARMONY, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        (f"{FINAL}Yes.", "", "Yes."),
        (f"{THOUGHT}{FINAL}Yes.", "Hm, 2 < 3.", "Yes."),
        (f"{THOUGHT}{FINAL}Yes.<|return|>", "Hm, 2 < 3.", "Yes."),
        (f"{THOUGHT}{FINAL}Yes.<|end|>", "Hm, 2 < 3.", "Yes."),
        # As far as it has come.
        (f"{ANALYSIS}Hm,", "Hm,", ""),
        (f"{THOUGHT}", "Hm, 2 < 3.", ""),
        (f"{THOUGHT}<|channel|>fin", "Hm, 2 < 3.", ""),
        (f"{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>js", "Hm, 2 < 3.", ""),
        (f"{THOUGHT} to=func", "Hm, 2 < 3.", ""),
        (f"{THOUGHT}{FINAL}", "Hm, 2 < 3.", ""),
        (" to", "", " to"),
        ("", "", ""),
        # Several messages of a kind.
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\n\nb", "c"),
        (f"{THOUGHT}{COMMENTARY}First I look.{NEXT}{FINAL}Yes.", "Hm, 2 < 3.",
         "First I look.\n\nYes."),
        (f"{COMMENTARY}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "b", "a\n\nc"),
        (f"{FINAL}a{NEXT}{FINAL}", "", "a"),
        # Line breaks around a text are markup.
        (f"{ANALYSIS}\na\n{NEXT}{FINAL}\nb\n\nc\n", "a", "b\n\nc\n"),
        # Headers that are not as they should be.
        (f"<|start|>assistant{FINAL}Yes.", "", "Yes."),
        (f"{ANALYSIS}a<|start|>assistant{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a<|end|>{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a<|end|>\n<|start|>assistant{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a<|end|>b", "a", "b"),
        ("<|channel|> final <|message|>b", "", "b"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>other<|message|>b", "", "b"),
        ("<|message|>b", "", "b"),
        ("<|channel|>final<|end|><|start|>assistant<|message|>b", "", "b"),
        ("<|start|>No header, {NEXT}".replace("{NEXT}", NEXT) + f"{FINAL}b", "",
         "No header,\n\nb"),
        # A model that writes no headers.
        ("Yes, to=functions.f is how.", "", "Yes, to=functions.f is how."),
        ("Yes.\n", "", "Yes.\n"),
        (f"Yes.<|end|>{FINAL}No.", "", "Yes.\n\nNo."),
        # Tools that no request offers: what goes to them is not for the user.
        (f"{ANALYSIS[:19]} to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "{}", ""),
        (f" to=container.exec<|channel|>commentary<|message|>ls{NEXT}{FINAL}b", "ls", "b"),
        ("<|channel|>commentary to=assistant<|message|>b", "", "b"),
        ("<|channel|>final to=user<|message|>b", "", "b"),
    ],
)  # fmt: skip
def test_channels_tell_reasoning_from_content(
    tokenizer: Tokenizer, answer: str, reasoning: str, content: str
) -> None:
    assert read(answer, tokenizer=tokenizer) == Parsed(reasoning, content)


@pytest.mark.parametrize("header", HEADERS)
def test_the_recipient_of_a_call_is_in_the_role_or_in_the_channel(header: str) -> None:
    arguments = '{"a": "<|x|> }", "b": [1.50, {"c": null}]}'
    want = Parsed("Hm, 2 < 3.", "", [("f", arguments)], 1)
    assert read(f"{THOUGHT}{header}{arguments}<|call|>") == want
    assert read(f"{THOUGHT}{header}{arguments}") == want  # the token ends the answer
    assert read(f"{THOUGHT}{header} {arguments}\n<|end|>") == want
    want.reasoning = ""
    assert read(f"{header}{arguments}<|call|>") == want  # without a thought


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("answer", "natural", "want"),
    [
        (f"{COMMENTARY}First I look.{NEXT}{CALL}{{}}", True,
         Parsed("", "First I look.", [("f", "{}")], 1)),
        (f"{COMMENTARY}First I look.\n{NEXT}{CALL}{{}}", True,
         Parsed("", "First I look.", [("f", "{}")], 1)),
        (CALL, True, Parsed("", "", [("f", "{}")], 1)),
        (CALL, False, Parsed("", "", [("f", "")], 1)),
        (f"{CALL}<|call|>", True, Parsed("", "", [("f", "{}")], 1)),
        (f'{CALL}{{"a": "b', False, Parsed("", "", [("f", '{"a": "b')], 1)),
        (f"{CALL}null", True, Parsed("", "", [("f", "{}")], 1)),
        (f'{CALL}"{{\\"a\\": 1}}"', True, Parsed("", "", [("f", '{"a": 1}')], 1)),
        (f"{CALL}print(1) \n", True, Parsed("", "", [("f", "print(1)")], 1)),
        (f"{CALL}{{}} and more<|call|>", True, Parsed("", "and more", [("f", "{}")], 1)),
        # A model that goes on after a call, and one that has forgotten to end it.
        (f"{CALL}{{}}<|call|><|start|>assistant{CALL}[]<|call|>", True,
         Parsed("", "", [("f", "{}"), ("f", "[]")], 2)),
        (f"{CALL}{{}}<|start|>assistant{FINAL}a", True, Parsed("", "a", [("f", "{}")], 1)),
        # Names.
        (f"{CALL.replace('functions.f', 'functions.a.b-c_d')}{{}}", True,
         Parsed("", "", [("a.b-c_d", "{}")], 1)),
        (f"{CALL.replace('functions.f', 'g')}{{}}", True, Parsed("", "", [("g", "{}")], 1)),
        (f"{CALL.replace('functions.f', 'h')}{{}}", True, Parsed("{}", "", [])),
    ],
)  # fmt: skip
def test_calls(answer: str, natural: bool, want: Parsed) -> None:
    assert read(answer, natural=natural, tools={"g": {}}) == want


def test_events_come_as_early_as_they_are_certain() -> None:
    form = form_of(HARMONY, "harmony", "think")
    parser = form.parser(tools={})
    assert parser is not None
    texts = [ANALYSIS, "Hm", NEXT, COMMENTARY, "I look", NEXT, CALL, '{"a', '": 1}', "<|call|>"]
    seen = []
    for text in texts:
        events = []
        for token_id in HARMONY.encode(text):
            marker = token_id in parser.marker_ids
            events += parser.feed([(token_id, "" if marker else HARMONY.token_text(token_id))])
        seen.append(events[:1])
    assert seen == [
        [],
        [ReasoningText("H")],
        [],
        [],
        [ContentText("I")],
        [],
        [CallStart(0, "f")],
        [CallArguments(0, "{")],
        [CallArguments(0, '"')],
        [CallEnd(0)],
    ]


def test_text_that_spells_a_marker_is_text() -> None:
    """In reasoning, in content and in arguments: such text has other tokens."""

    def spelled(text: str) -> list[int]:
        return [byte for char in text for byte in HARMONY.encode(char)]

    markup = f"<|end|><|start|>assistant{FINAL}<|call|>"
    form = form_of(HARMONY, "harmony", "think")
    ids = [*HARMONY.encode(ANALYSIS), *spelled(markup), *HARMONY.encode(NEXT + COMMENTARY)]
    ids += [*spelled(markup), *HARMONY.encode(NEXT + CALL + '{"a": "'), *spelled(markup)]
    ids += HARMONY.encode('"}')
    whole = replay(HARMONY, form, ids)
    assert parsed(whole) == Parsed(markup, markup, [("f", f'{{"a": "{markup}"}}')], 1)
    for cuts in splits(len(ids)):
        assert fed_in_runs(HARMONY, form, ids, cuts) == whole


def test_without_parsers_the_text_of_each_message_is_content() -> None:
    answer = f"{THOUGHT}{CALL}{{}}"
    form = form_of(HARMONY, "harmony", "none")
    whole = parsed(replay(HARMONY, form, HARMONY.encode(answer)))
    assert whole == Parsed("", "Hm, 2 < 3.", [("f", "{}")], 1)
    parser = form_of(HARMONY, "harmony", "think").parser(parse_calls=False)
    assert parser is not None
    events = fed_in_runs(
        HARMONY, form_of(HARMONY, "harmony", "think"), HARMONY.encode(answer), [], parse_calls=False
    )
    assert parsed(events) == Parsed("Hm, 2 < 3.", "{}")


@pytest.mark.parametrize(
    ("prompt", "in_reasoning", "in_text"),
    [
        ("<|start|>assistant", False, False),
        (f"<|start|>assistant{FINAL}Half an ans", False, True),
        (f"<|start|>assistant{ANALYSIS}Half a thou", True, False),
        (f"<|start|>assistant{ANALYSIS}Yes.<|end|><|start|>assistant{FINAL}", False, True),
        (f"<|start|>assistant{FINAL}Yes.<|end|><|start|>user<|message|>a<|end|><|start|>assistant",
         False, False),
        (f"<|start|>user<|message|>What is {FINAL}?", False, False),
        ("", False, False),
    ],
)  # fmt: skip
def test_a_prompt_may_end_inside_of_a_message(
    prompt: str, in_reasoning: bool, in_text: bool
) -> None:
    form, ids = form_of(HARMONY, "harmony", "think"), HARMONY.encode(prompt)
    assert form.opens_reasoning(HARMONY, ids) is in_reasoning
    assert form.opens_text(HARMONY, ids) is in_text
    ids = HARMONY.encode(f" b{NEXT}{FINAL}c<|return|>")
    events = fed_in_runs(HARMONY, form, ids, [], in_reasoning=in_reasoning, in_text=in_text)
    if in_reasoning:
        assert events == [ReasoningText(" b"), ContentText("c")]
    elif in_text:
        assert events == [ContentText(" b\n\nc")]


def test_the_vocabulary_has_the_markers_and_the_template_the_channel() -> None:
    template = "{{ tools }}{{ '<|start|>assistant<|channel|>final<|message|>' + content }}"
    tokenizer = with_tokens(special=harmony.MARKERS, chat_template=template)
    for form in (choose_format(tokenizer), form_of(HARMONY, "harmony", "think")):
        assert (form.calls, form.reasoning) == (formats.HARMONY, formats.ANALYSIS)
        assert form.messages is formats.HARMONY_MESSAGES
        assert form.marker_ids.keys() == form.special == {*harmony.MARKERS}
    unparsed = choose_format(tokenizer, tool_parser="none", reasoning_parser="none")
    assert (unparsed.calls, unparsed.reasoning) == (None, None)
    assert unparsed.messages is formats.HARMONY_MESSAGES and unparsed.parser() is not None
    assert choose_format(tokenizer, tool_parser="hermes").messages is None
