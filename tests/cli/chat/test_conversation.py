"""What a conversation has after answers, questions without one, and those taken back."""

from __future__ import annotations

from minisgl_cli.chat.conversation import Conversation


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
