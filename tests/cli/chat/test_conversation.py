"""The tokens of a conversation: answers are reused as generated where the template allows it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy_chat_engine import (
    END,
    PIECES,
    STOP,
    FakeEngine,
    ToyTokenizer,
    decode,
    encode,
    spelled,
)

from minisgl.request import FinishReason, OutputDelta
from minisgl_cli.chat.conversation import Conversation
from minisgl_cli.chat.engine_model import EngineModel
from minisgl_cli.chat.prompt_reuse import keep_seen
from minisgl_cli.chat.reply_record import ReplyRecord


class Said:
    """A model that has been asked "ab" and has answered with some tokens."""

    def __init__(self, tokenizer: ToyTokenizer, token_ids: list[int], text: str) -> None:
        self.conversation = Conversation()
        engine: Any = FakeEngine([], tokenizer=tokenizer)
        engine.deltas = [OutputDelta(token_ids, text, 0, 0, finish_reason=FinishReason.STOP)]
        self.model = EngineModel(engine, tokenizer)

        async def ask() -> None:
            self.conversation.ask("ab")
            answer = ReplyRecord(asked_at=0.0)
            async for delta in self.model.reply(self.conversation.messages, {}):
                answer.add(delta, 0.0)
            self.conversation.answer(answer.message)

        asyncio.run(ask())

    def prompt(self, question: str) -> list[int]:
        self.conversation.ask(question)
        return asyncio.run(self.model.prompt(self.conversation.messages))


def second_prompt(answer_ids: list[int], answer: str, *, trims: bool = False) -> list[int]:
    return Said(ToyTokenizer(trims), answer_ids, answer).prompt("cd")


def test_an_answer_in_canonical_tokens_is_part_of_the_next_prompt() -> None:
    prompt = second_prompt([*encode("abc d"), END], "abc d")
    assert prompt == encode("<user>ab<end><model>abc d<end><user>cd<end><model>")


def test_an_answer_in_other_tokens_is_reused_as_generated() -> None:
    prompt = second_prompt([*spelled("abcabc"), END], "abcabc")
    first = encode("<user>ab<end><model>")
    assert prompt == [*first, *spelled("abcabc"), END, *encode("<user>cd<end><model>")]


def test_the_end_of_an_answer_is_that_of_the_template() -> None:
    prompt = second_prompt([*spelled("abc"), STOP], "abc")
    first = encode("<user>ab<end><model>")
    assert prompt == [*first, *spelled("abc"), *encode("<end><user>cd<end><model>")]


def test_an_answer_that_the_template_changes_is_tokenized_again() -> None:
    prompt = second_prompt([*spelled(" abc "), END], " abc ", trims=True)
    assert prompt == encode("<user>ab<end><model>abc<end><user>cd<end><model>")


@given(st.lists(st.sampled_from(range(len(PIECES)))), st.booleans(), st.integers(0, 3))
def test_the_prompt_always_decodes_to_the_rendered_template(
    generated: list[int], trims: bool, num_held_back: int
) -> None:
    """Holds for any generated tokens, also special ones in wrong places."""
    tokenizer = ToyTokenizer(trims)
    answer = decode(generated[: max(0, len(generated) - num_held_back)])
    said = Said(tokenizer, generated, answer)
    prompt = said.prompt("cd")
    assert decode(prompt) == decode(tokenizer.chat(said.conversation.messages))


@pytest.mark.parametrize(
    ("seen", "templated", "prompt"),
    [
        ([], [b"ab"], [b"ab"]),
        ([b"ab"], [], []),
        ([b"ab"], [b"ab"], [b"ab"]),
        ([b"a", b"b"], [b"ab", b"cd"], [b"a", b"b", b"cd"]),
        ([b"abc", b"d"], [b"ab", b"cd"], [b"abc", b"d"]),
        ([b"a", b"b", b"c"], [b"ab", b"d"], [b"a", b"b", b"d"]),
        ([b"a", b"b", b"c"], [b"a", b"c"], [b"a", b"c"]),
        ([b"a", b"b", b"c"], [b"ab"], [b"a", b"b"]),
        # Ids beyond the tokenizer's vocabulary have no text.
        ([b"a", b"", b"b"], [b"ab", b"c"], [b"a", b"", b"b", b"c"]),
        # A character in several tokens is cut at its ends only.
        ([b"a", b"\xe2\x82", b"\xac"], ["a€".encode(), b"!"], [b"a", b"\xe2\x82", b"\xac", b"!"]),
        ([b"a", b"\xe2\x82"], ["a€".encode()], ["a€".encode()]),
        # What is no character at all was shown, and comes back, as U+FFFD.
        ([b"a", b"\x88", b"b"], ["a\ufffdb".encode(), b"c"], [b"a", b"\x88", b"b", b"c"]),
        ([b"\xe2", b"b"], ["\ufffdb".encode(), b"c"], [b"\xe2", b"b", b"c"]),
    ],
)
def test_seen_tokens_are_reused_up_to_the_first_difference_in_text(
    seen: list[bytes], templated: list[bytes], prompt: list[bytes]
) -> None:
    """Tokens are given as their bytes here."""
    vocabulary = sorted({*seen, *templated})
    ids = [[vocabulary.index(token) for token in tokens] for tokens in (seen, templated)]
    kept = keep_seen(*ids, token_bytes=vocabulary.__getitem__)
    assert [vocabulary[token_id] for token_id in kept] == prompt


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


def test_an_unanswered_question_is_kept_for_retry_only() -> None:
    conversation = Conversation("Be kind.")
    assert not conversation.ask_again()
    conversation.ask("ab")
    conversation.answer("abc")
    conversation.ask("cd")
    assert not conversation.give_up()
    assert [turn.question for turn in conversation.turns] == ["ab"]
    assert conversation.undo() is not None and conversation.undo() is None
    assert conversation.ask_again()
    assert contents(conversation) == ["Be kind.", "cd"]
    conversation.answer("d")
    assert contents(conversation) == ["Be kind.", "cd", "d"]
    conversation.ask("ef")
    conversation.reset()
    assert not conversation.ask_again()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_a_retried_answer_is_restored_if_the_retry_fails() -> None:
    conversation = Conversation()
    conversation.ask("ab")
    conversation.answer("abc", 7)
    before = list(conversation.turns)
    assert conversation.ask_again()
    assert contents(conversation) == ["ab"]
    assert conversation.give_up()
    assert conversation.turns == before and contents(conversation) == ["ab", "abc"]
    assert conversation.ask_again()
    conversation.answer("cd")
    assert contents(conversation) == ["ab", "cd"]
