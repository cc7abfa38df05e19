"""Answers that begin with reasoning: the grammar holds for what follows it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from support.grammars import GrammarBench
from support.parsed_answers import QWEN, form_of

from minisgl.grammar.reasoning import CROSSED, GatedMatcher, ReasoningGate, reasoning_gate
from minisgl.matcher import Matcher
from minisgl.request import StructuredOutput

CHOICE = StructuredOutput(choice=["fox", "dog"])


@pytest.fixture(scope="module")
def by_token(bench: GrammarBench) -> ReasoningGate:
    """A block that the prompt opens; the vocabulary's marker stands for the closing one."""
    [close] = bench.encode("<think>")
    return ReasoningGate("<think>", (close,), is_open=True)


@pytest.fixture(scope="module")
def by_text(bench: GrammarBench) -> ReasoningGate:
    marker = "</end>"
    return ReasoningGate(marker, tuple(bench.encode(marker)), is_open=True)


def gated(
    bench: GrammarBench, gate: ReasoningGate, structured: StructuredOutput = CHOICE
) -> GatedMatcher:
    matcher = bench.compile(structured).matcher(gate)
    assert isinstance(matcher, GatedMatcher)
    return matcher


def after(bench: GrammarBench, matcher: GatedMatcher, text: str) -> set[int]:
    """What is allowed once the tokens of `text` have been accepted, one by one."""
    for token_id in bench.encode(text):
        assert token_id in bench.allowed(matcher)
        matcher.accept([token_id])
    return bench.allowed(matcher)


def first_tokens(bench: GrammarBench) -> set[int]:
    """Of CHOICE alone."""
    return bench.allowed(bench.compile(CHOICE).matcher())


def line_breaks(bench: GrammarBench, *texts: str) -> set[int]:
    words = {bench.tokenizer.token_bytes(id).decode("utf-8", "replace"): id for id in range(450)}
    return {words[text] for text in texts if text in words}


def test_inside_everything_is_allowed_but_the_end_of_the_answer(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    matcher = gated(bench, by_token)
    allowed = after(bench, matcher, "The fox is {not} JSON\n")
    assert allowed >= {*range(bench.size)} - bench.eos
    assert not allowed & bench.eos
    assert not matcher.finished


def test_the_grammar_begins_after_the_marker_and_up_to_two_line_breaks(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    matcher = gated(bench, by_token)
    both = line_breaks(bench, "\n", "\n\n")
    assert after(bench, matcher, "hm<think>") == first_tokens(bench) | both
    one = matcher.copy()
    assert after(bench, one, "\n") == first_tokens(bench) | line_breaks(bench, "\n")
    assert after(bench, matcher, "\n\n") == first_tokens(bench)
    assert after(bench, matcher, "fox") == bench.eos
    assert matcher.finished


def test_a_marker_of_several_tokens_ends_the_reasoning_too(
    bench: GrammarBench, by_text: ReasoningGate
) -> None:
    matcher = gated(bench, by_text)
    assert not after(bench, matcher, "</en no </end") & bench.eos
    assert after(bench, matcher, ">") >= first_tokens(bench)
    after(bench, matcher, "dog")
    assert matcher.finished


def test_no_token_joins_a_marker_in_text_with_the_answer(bench: GrammarBench) -> None:
    """Such as the last letter of the marker and a word after it."""
    words = {id: bench.tokenizer.token_bytes(id) for id in range(bench.tokenizer.vocab_size)}
    joined = {id for id, text in words.items() if text.startswith(b"q") and text[1:].strip()}
    assert joined
    gate = ReasoningGate("=q", tuple(bench.encode("=")) + tuple(bench.encode("q")), is_open=True)
    matcher = gated(bench, gate)
    assert after(bench, matcher, "a") >= joined
    assert not after(bench, matcher, "=") & joined
    matcher.accept([min(joined)])
    assert matcher.error == CROSSED


def test_a_model_that_opens_the_block_itself_may_also_answer_at_once(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    [opening] = bench.encode("<s>")
    gate = replace(by_token, is_open=False, opening_ids=(opening,))
    at_once, thinking = gated(bench, gate), gated(bench, gate)
    assert bench.allowed(at_once) == first_tokens(bench) | {opening}
    after(bench, at_once, "fox")
    assert at_once.finished
    thinking.accept([opening])
    assert after(bench, thinking, "hm") >= {*range(bench.size)} - bench.eos
    assert after(bench, thinking, "<think>") >= first_tokens(bench)


@pytest.mark.parametrize("kind", ["by_token", "by_text"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_at_the_budget_the_marker_is_forced(
    bench: GrammarBench, kind: str, budget: int, request: pytest.FixtureRequest
) -> None:
    gate: ReasoningGate = replace(request.getfixturevalue(kind), budget=budget)
    matcher = gated(bench, gate)
    [word] = bench.encode("!")
    for _ in range(budget):
        assert word in bench.allowed(matcher)
        matcher.accept([word])
    for token_id in gate.closing_ids:
        assert bench.allowed(matcher) == {token_id}
        matcher.accept([token_id])
    assert bench.allowed(matcher) >= first_tokens(bench)


def test_with_a_budget_of_zero_no_block_is_opened(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    gate = replace(by_token, is_open=False, opening_ids=(bench.encode("<s>")[0],), budget=0)
    assert bench.allowed(gated(bench, gate)) == first_tokens(bench)


async def test_a_block_that_the_prompt_has_closed_is_not_opened_again() -> None:
    async def encode(text: str, **_: object) -> list[int]:
        return QWEN.encode(text, add_special_tokens=False)

    form = form_of(QWEN, "hermes", "think")
    for is_closed, opening in ((False, QWEN.encode("<think>")), (True, [])):
        gate = await reasoning_gate(form, encode, is_open=False, is_closed=is_closed)
        assert gate is not None and [*gate.opening_ids] == opening


def test_a_gate_without_an_opening_lets_the_grammar_decide(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    gate = replace(by_token, is_open=False)
    assert bench.allowed(gated(bench, gate)) == first_tokens(bench)


def test_a_budget_alone_constrains_nothing_else(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    compiled = asyncio.run(bench.grammars.unconstrained())
    matcher = compiled.matcher(replace(by_token, budget=2))
    everything = {*range(bench.size)}
    assert bench.allowed(matcher) >= everything
    matcher.accept(bench.encode("hm"))
    assert bench.allowed(matcher) == {*by_token.closing_ids}
    matcher.accept(by_token.closing_ids)
    assert bench.allowed(matcher) >= everything
    matcher.accept(bench.encode("any answer"))
    assert not matcher.finished
    with pytest.raises(ValueError, match="reasoning"):
        compiled.matcher()


def test_a_copy_goes_its_own_way(bench: GrammarBench, by_token: ReasoningGate) -> None:
    matcher = gated(bench, by_token)
    copied = matcher.copy()
    matcher.accept([*by_token.closing_ids, *bench.encode("fox")])
    assert matcher.finished
    assert not copied.finished
    assert bench.allowed(copied) >= {*by_token.closing_ids}


def test_an_answer_that_breaks_the_grammar_fails_the_matcher(
    bench: GrammarBench, by_token: ReasoningGate
) -> None:
    matcher = gated(bench, by_token)
    matcher.accept([*by_token.closing_ids, *bench.encode("lazy")])
    assert matcher.error is not None


def test_random_tokens_with_a_budget_end_in_an_answer(
    bench: GrammarBench, by_text: ReasoningGate
) -> None:
    for seed in range(5):
        matcher = gated(bench, replace(by_text, budget=10))
        *_, (taken, _) = bench.walk(matcher, random.Random(seed))
        assert bench.bytes_of(taken).split(b"</end>")[-1].strip() in (b"fox", b"dog")


@pytest.fixture
def with_header(bench: GrammarBench) -> ReasoningGate:
    """The answer may begin with the first tokens of the opening, which is `fo!`."""
    opening = [*bench.encode("f"), *bench.encode("o"), *bench.encode("!")]
    [close] = bench.encode("<think>")
    return ReasoningGate(
        "<think>",
        (close,),
        opening_ids=tuple(opening),
        following_ids=(*bench.encode("a"), *bench.encode("b")),
        barred_ids=tuple(bench.encode("<s>")),
    )


def test_an_opening_of_several_tokens_may_begin_as_the_answer_does(
    bench: GrammarBench, with_header: ReasoningGate
) -> None:
    f, o, mark = with_header.opening_ids
    plain, matcher = bench.compile(CHOICE).matcher(), gated(bench, with_header)
    assert bench.allowed(matcher) == bench.allowed(plain) | {f}
    for token_id, expected in ((f, o), (o, mark)):
        plain.accept([token_id])
        matcher.accept([token_id])
        assert bench.allowed(matcher) == bench.allowed(plain) | {expected}
    thinking, answering = matcher.copy(), matcher.copy()
    assert after(bench, answering, "x") == bench.eos
    assert answering.finished
    thinking.accept([mark])
    assert not thinking.may_end
    assert after(bench, thinking, "hm") >= {f, o, mark}
    assert bench.allowed(matcher) == bench.allowed(plain) | {mark}  # the copies are their own


def test_the_opening_is_not_hindered_by_an_answer_that_begins_in_another_way(
    bench: GrammarBench, with_header: ReasoningGate
) -> None:
    matcher = gated(bench, with_header, StructuredOutput(choice=["dog"]))
    f, o, mark = with_header.opening_ids
    assert f in bench.allowed(matcher)
    matcher.accept([f])
    assert bench.allowed(matcher) == {o}
    matcher.accept([o])
    assert bench.allowed(matcher) == {mark}
    refused = matcher.copy()
    refused.accept(bench.encode("d"))
    assert refused.error is not None
    matcher.accept([mark, *bench.encode("hm<think>ab")])
    assert after(bench, matcher, "dog") == bench.eos


def test_what_follows_the_closing_marker_is_forced_and_what_ends_reasoning_is_barred(
    bench: GrammarBench, with_header: ReasoningGate
) -> None:
    matcher = gated(bench, with_header)
    matcher.accept([*with_header.opening_ids, *bench.encode("hm")])
    assert not bench.allowed(matcher) & {*with_header.barred_ids, *bench.eos}
    matcher.accept(with_header.closing_ids)
    wrong = matcher.copy()
    wrong.accept(bench.encode("c"))
    assert wrong.error is not None
    for token_id in with_header.following_ids:
        assert bench.allowed(matcher) == {token_id} and not matcher.may_end
        matcher.accept([token_id])
    assert bench.allowed(matcher) == first_tokens(bench)  # no line breaks between
    assert after(bench, matcher, "dog") == bench.eos


def test_a_budget_of_nothing_bars_an_opening_of_several_tokens(
    bench: GrammarBench, with_header: ReasoningGate
) -> None:
    matcher = gated(bench, replace(with_header, budget=0))
    assert after(bench, matcher, "fo") == bench.allowed(after_fo(bench))
    assert with_header.opening_ids[-1] not in bench.allowed(matcher)
    assert after(bench, matcher, "x") == bench.eos


def after_fo(bench: GrammarBench) -> Matcher:
    plain = bench.compile(CHOICE).matcher()
    plain.accept([*bench.encode("f"), *bench.encode("o")])
    return plain
