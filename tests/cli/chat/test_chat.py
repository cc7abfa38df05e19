"""`minisgl chat`: the loop on a fake engine, and the bundled model in a real terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.fake_chat_ui import FakeChatUI
from support.forked_programs import Terminal, minisgl
from support.held_answers import held_main
from support.screens import at_prompt, left
from support.toy_chat_engine import FakeEngine, ToyTokenizer, decode

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import InvalidRequestError
from minisgl.models.hub import DEMO_FOLDER, DEMO_NOTE
from minisgl.printable import printable
from minisgl.request import FinishReason, OutputDelta
from minisgl.runner.facts import device_name
from minisgl.text.tokenizer import Tokenizer
from minisgl_cli.chat.commands import Session
from minisgl_cli.chat.conversation import Conversation
from minisgl_cli.chat.engine_model import EngineModel
from minisgl_cli.chat.model import ReplyDelta
from minisgl_cli.chat.repl import COMMANDS, MAKE_ROOM, Repl
from minisgl_cli.chat.reply_record import ReplyRecord, stats_rows


def answered(*deltas: tuple[float, ReplyDelta]) -> ReplyRecord:
    answer = ReplyRecord(asked_at=10.0)
    for now, delta in deltas:
        answer.add(delta, now)
    return answer


def test_the_summary_reports_counts_and_speed() -> None:
    answer = answered(
        *((10.25 + 0.1 * step, ReplyDelta("a", "", step + 1, 8, 6)) for step in range(5)),
        (20.0, ReplyDelta("", "", 5, 8, 6, FinishReason.STOP)),
    )
    assert answer.text == "aaaaa"
    assert answer.summary() == ("5 tokens · TTFT 250 ms · 10.0 tok/s · 6 of 8 prompt tokens cached")


def test_summary_and_statistics_tell_which_drafts_were_accepted() -> None:
    drafts: Any = {"num_drafted_tokens": 9, "num_accepted_tokens": 4}
    first = answered((10.25, ReplyDelta("a", "", 1)), (10.75, ReplyDelta("b", "", 6, **drafts)))
    assert first.summary() == (
        "6 tokens · TTFT 250 ms · 10.0 tok/s · 4 of 9 drafts accepted · stopped"
    )
    none = answered((10.25, ReplyDelta("a", num_drafted_tokens=0, num_accepted_tokens=0)))
    assert "draft" not in none.summary()
    assert ("drafts accepted", "8 of 18 (44%)") in stats_rows([first, none, first])
    assert "drafts accepted" not in dict(stats_rows([none]))


def test_the_summary_of_one_token_has_no_rate() -> None:
    answer = answered((10.25, ReplyDelta("a", "", 1, 8, 0)))
    assert answer.summary() == "1 token · TTFT 250 ms · 0 of 8 prompt tokens cached · stopped"


def test_the_summary_reports_the_counts_of_a_server() -> None:
    texts = [(10.25, ReplyDelta(thinking="a")), (10.75, ReplyDelta("b"))]
    ended = (20.0, ReplyDelta(finish_reason=FinishReason.LENGTH))
    assert answered(*texts, ended).summary() == "TTFT 250 ms · cut at the limit"
    counted = (20.0, ReplyDelta(num_tokens=6, num_prompt_tokens=1))
    assert answered(*texts, ended, counted).summary() == (
        "6 tokens · TTFT 250 ms · 10.0 tok/s · 1 prompt token · cut at the limit"
    )


def test_interrupted_thinking_is_closed_for_the_template() -> None:
    assert answered((11.0, ReplyDelta("<think>\nHm"))).message == "<think>\nHm\n</think>\n\n"
    assert answered((11.0, ReplyDelta("<think>Hm</think>Yes"))).message == "<think>Hm</think>Yes"


def test_control_characters_of_a_model_are_not_printed() -> None:
    assert printable("a\x1b[2J\tb\x07\n\x9bé\ud800") == "a[2J\tb\né"


async def converse(engine: FakeEngine, *lines: str, **sampling: Any) -> FakeChatUI:
    ui = FakeChatUI(list(lines))
    fake: Any = engine
    model = EngineModel(fake, engine.tokenizer)
    await Repl(Session(model, ui, Conversation(), sampling)).run()
    return ui


async def test_answers_are_streamed_and_become_part_of_the_conversation() -> None:
    engine = FakeEngine(["abc", "cd"])
    ui = await converse(engine, "ab", "", "  ", "h")
    assert ui.written == "abc\ncd\n"
    assert decode(engine.prompts[1]) == "<user>ab<end><model>abc<end><user>h<end><model>"
    assert [note.startswith(("3 tokens", "2 tokens")) for note in ui.noted] == [True, True]
    assert ui.said == []


async def test_the_first_adapter_answers_until_another_one_is_chosen() -> None:
    engine = FakeEngine(["a"] * 3, adapters={"sql": "S", "poems": "P"})
    ui = await converse(engine, "ab", "/lora poems", "ab", "/lora off", "ab", "/lora")
    assert engine.extras == [("S",), ("P",), ()]
    assert ui.said == ["toy answers; /lora takes sql, poems or off."]
    assert (await converse(FakeEngine([]), "/lora")).said == ["toy answers; no adapter is there."]


async def test_reset_starts_a_new_conversation() -> None:
    engine = FakeEngine(["abc", "cd"])
    await converse(engine, "ab", "/reset", "h")
    assert decode(engine.prompts[1]) == "<user>h<end><model>"


async def test_exit_leaves_at_once() -> None:
    engine = FakeEngine([])
    await converse(engine, "/exit", "ab")
    assert engine.prompts == []


async def test_help_lists_every_command() -> None:
    ui = await converse(FakeEngine([]), "/help")
    assert [line.split()[0] for line in ui.said if line] == list(COMMANDS)


@pytest.mark.parametrize(
    ("command", "hint"),
    [("/rest", "Did you mean /reset?"), ("/xyz a b", "no command /xyz. /help"), ("/", "/help")],
)
async def test_an_unknown_command_gives_a_hint(command: str, hint: str) -> None:
    ui = await converse(FakeEngine(["a"]), command, "ab")
    assert hint in ui.said[0]
    assert ui.written == "a\n"


async def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    engine = FakeEngine(["abc^defgh", "a"])
    before = signal.getsignal(signal.SIGINT)
    ui = await converse(engine, "ab", "h")
    assert ui.written == "abc\na\n"
    assert engine.num_aborted == 2  # harmless for the one that had ended
    assert ui.noted[0].endswith("stopped")
    assert decode(engine.prompts[1]) == "<user>ab<end><model>abc<end><user>h<end><model>"
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_question_stopped_before_its_first_token_is_not_kept() -> None:
    engine = FakeEngine(["^abc", "a"])
    ui = await converse(engine, "ab", "h")
    assert ui.written == "a\n"
    assert ui.said == ["Stopped before an answer came."]
    assert ui.noted[0] == "/retry asks again."
    assert decode(engine.prompts[1]) == "<user>h<end><model>"


async def test_a_full_context_is_reported_and_the_loop_continues() -> None:
    engine = FakeEngine(["abcdefgh", "cd"], max_seq_len=12)
    ui = await converse(engine, "ab", "cd", "/reset", "ab")
    assert ui.written == "abcdefgh\ncd\n"
    assert ui.said == [
        f"The context of 12 tokens is full. {MAKE_ROOM}",
        "The conversation with this question has 15 tokens; the context of 12 has no room for an "
        f"answer. {MAKE_ROOM}",
    ]


async def test_undo_frees_context_for_a_question_that_did_not_fit() -> None:
    engine = FakeEngine(["abcdefgh", "cd"], max_seq_len=12)
    ui = await converse(engine, "ab", "cd", "/undo", "/retry")
    assert ui.written == "abcdefgh\ncd\n"
    assert decode(engine.prompts[1]) == "<user>cd<end><model>"


async def test_an_answer_whose_retry_is_stopped_is_restored() -> None:
    engine = FakeEngine(["abcabc", "^", "a"])
    await converse(engine, "ab", "/retry", "h")
    assert engine.prompts[1] == engine.prompts[0]
    assert decode(engine.prompts[2]) == "<user>ab<end><model>abcabc<end><user>h<end><model>"


async def test_ctrl_c_works_while_a_long_conversation_is_tokenized() -> None:
    told = threading.Event()

    class Slow(ToyTokenizer):
        def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
            os.kill(os.getpid(), signal.SIGINT)
            told.wait()
            return super().chat(messages)

    class UI(FakeChatUI):
        def say(self, line: str) -> None:
            super().say(line)
            told.set()

    fake: Any = FakeEngine(["a"], tokenizer=Slow())
    ui = UI(["ab"])
    await Repl(Session(EngineModel(fake, fake.tokenizer), ui, Conversation())).run()
    assert ui.said == ["Stopped before an answer came."]
    assert fake.prompts == []


async def test_max_tokens_beyond_the_context_means_the_remaining_context() -> None:
    engine = FakeEngine(["abc", "abc", "abcdefgh"], max_seq_len=40)
    ui = await converse(engine, "ab", max_tokens=36)
    ui = await converse(engine, "ab", max_tokens=37, min_tokens=37)
    assert ui.said == []
    assert [params.max_tokens for params in engine.params] == [36, None]


async def test_a_template_error_is_reported_in_one_sentence() -> None:
    engine = FakeEngine(["a"])
    ui = await converse(engine, "ab!", "ab")
    assert ui.said == ["messages: the template does not shout."]
    assert decode(engine.prompts[0]) == "<user>ab<end><model>"


async def test_a_second_ctrl_c_is_reported_to_the_ui() -> None:
    ui = await converse(FakeEngine(["abc^", "a"]), "ab", "h")
    assert ui.interrupted == [False, True, False]


async def test_a_ctrl_c_at_the_very_end_of_an_answer_is_not_lost() -> None:
    class UI(FakeChatUI):
        @contextmanager
        def answering(self) -> Iterator[None]:
            with super().answering():
                yield
            os.kill(os.getpid(), signal.SIGINT)

    fake: Any = FakeEngine(["ab"])
    ui = UI(["ab"])
    await Repl(Session(EngineModel(fake, ToyTokenizer()), ui, Conversation())).run()
    assert (ui.written, ui.interrupted) == ("ab\n", [False, True])


async def test_thinking_is_shown_separately_and_kept_as_generated() -> None:
    fake: Any = FakeEngine([])
    text = "<think>\nab\n</think>\n\ncd"
    fake.deltas = [OutputDelta([0], text, 1, 0, finish_reason=FinishReason.STOP)]
    ui = FakeChatUI(["ab"])
    conversation = Conversation()
    await Repl(Session(EngineModel(fake, ToyTokenizer()), ui, conversation)).run()
    assert (ui.thought, ui.written) == ("ab", "cd\n")
    assert conversation.messages[-1]["content"] == text


async def test_thinking_opened_by_the_template_is_recognized() -> None:
    class Opening(ToyTokenizer):
        def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
            return [*super().chat(messages), -1, -2]

        def token_bytes(self, token_id: int) -> bytes:
            return {-1: b"<think>", -2: b"\n"}.get(token_id) or super().token_bytes(token_id)

    fake: Any = FakeEngine([], tokenizer=Opening())
    fake.deltas = [OutputDelta([0], "ab</think>", 1, 0), OutputDelta([0], "cd", 2, 0)]
    ui = FakeChatUI(["ab"])
    await Repl(Session(EngineModel(fake, fake.tokenizer), ui, Conversation())).run()
    assert (ui.thought, ui.written) == ("ab", "cd\n")


# -- the real thing, with the bundled model -------------------------------------------------------

# With one token a page, the cache's share can be told to the token.
OPTIONS = ["chat", "--device", "cpu", "--page-size", "1"]
COMMAND = ["-m", "minisgl", *OPTIONS]
CTRL_C = "\x03"


async def test_a_later_turn_reuses_the_cached_prefix() -> None:
    async with await AsyncEngine.start(EngineConfig(device="cpu", page_size=1)) as engine:
        assert engine.tokenizer is not None
        conversation = Conversation()
        model = EngineModel(engine, engine.tokenizer)
        num_before = 0  # tokens of the last prompt
        for _ in range(4):
            conversation.ask("Tell me more.")
            answer = ReplyRecord(asked_at=0.0)
            sampling = {"temperature": 0, "max_tokens": 60}
            async for delta in model.reply(conversation.messages, sampling):
                answer.add(delta, 0.0)
            num_prompt, num_cached = answer.num_prompt_tokens, answer.num_cached_tokens
            assert num_prompt is not None and num_cached is not None
            assert num_before <= num_cached < num_prompt
            conversation.answer(answer.message)
            num_before = num_prompt


async def test_an_engine_model_checks_token_ids_and_reports_its_usage() -> None:
    async with await AsyncEngine.start(EngineConfig(device="cpu", page_size=16)) as engine:
        assert engine.tokenizer is not None
        model = EngineModel(engine, engine.tokenizer)
        vocab_size = engine.model.vocab_size
        model.check({"stop_token_ids": [vocab_size - 1], "logit_bias": {0: 1}})
        for wrong in ({"stop_token_ids": [vocab_size]}, {"logit_bias": {vocab_size: 1}}):
            with pytest.raises(InvalidRequestError, match=f"allowed: 0 to {vocab_size - 1}"):
                model.check(wrong)
        num_pages = engine.capacity.num_pages - 1
        assert model.status()[0] == ("KV cache", f"0 of {num_pages:,} pages used")
        question = [{"role": "user", "content": "Tell me more. " * 20}]
        for _ in range(2):
            deltas = [delta async for delta in model.reply(question, {"max_tokens": 1})]
            num_cached, num_prompt = deltas[-1].num_cached_tokens, deltas[-1].num_prompt_tokens
        assert num_cached and num_prompt
        (_, pages), (_, hits) = model.status()
        # The last page of a prompt is full only by chance.
        assert pages == f"{num_prompt // 16} of {num_pages:,} pages used"
        assert hits == f"{num_cached / num_prompt / 2:.0%} of prompt tokens since the start"


@pytest.mark.parametrize(("number", "name"), [(1, "CPU, 1 thread"), (2, "CPU, 2 threads")])
def test_the_banner_shows_the_number_of_cpu_threads(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    assert device_name("cpu") == name


def terminal_of(state: Path, **environment: str) -> dict[str, str]:
    """The environment of `minisgl chat` in a terminal that does not tell where its cursor is."""
    own = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)}
    return {**os.environ, **own, **environment}


DIMENSIONS = (50, 200)


def started(state: Path) -> pexpect.spawn:
    """`minisgl chat` in a terminal, as a user starts it."""
    return pexpect.spawn(
        sys.executable,
        [*COMMAND],
        env=terminal_of(state),
        encoding="utf-8",
        codec_errors="replace",
        dimensions=DIMENSIONS,
        timeout=None,
    )


def forked(state: Path, *arguments: str, **environment: str) -> Terminal:
    """`minisgl chat` in a terminal, whose long answers do not end before Ctrl-C."""
    environment = terminal_of(state, **environment)
    return Terminal(held_main, *OPTIONS, *arguments, environment=environment, dimensions=DIMENSIONS)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """`minisgl chat` at its first prompt."""
    child = forked(tmp_path)
    child.expect_exact(DEMO_NOTE)
    child.expect("Ctrl-D leaves")
    at_prompt(child)
    yield child
    child.close(force=True)


def stop_an_answer(terminal: Terminal) -> tuple[int, int]:
    """How many tokens of the prompt were cached, and how many it has."""
    terminal.send("Count from 1 to 99.\r")
    # The prompt has given the terminal back and the answer has begun.
    terminal.expect(r"\x1b\[\?2004l(?=[\s\S]{20})")
    terminal.send(CTRL_C)
    terminal.expect(r"(\d+) of (\d+) prompt tokens cached")
    assert "98, 99." not in terminal.before
    num_cached, num_prompt = (int(group) for group in terminal.match.groups())
    at_prompt(terminal)
    return num_cached, num_prompt


def test_a_conversation_works_in_a_real_terminal(terminal: Terminal) -> None:
    _, num_prompt = stop_an_answer(terminal)
    num_cached, num_second_prompt = stop_an_answer(terminal)
    assert num_second_prompt > num_cached >= num_prompt

    terminal.send("/rest\r")
    terminal.expect("Did you mean /reset")
    at_prompt(terminal)
    terminal.send("/reset\r")
    terminal.expect("A new conversation")
    at_prompt(terminal)
    assert stop_an_answer(terminal)[1] < num_second_prompt

    terminal.send("Hello!\r")
    terminal.expect("How can I help you")
    at_prompt(terminal)
    terminal.send("/retry\r")
    terminal.expect("How can I help you")
    at_prompt(terminal)
    terminal.send("/stats\r")
    terminal.expect(r"turns +2\r\n")
    terminal.expect(r"context +\d+ of 2,048 tokens \(\d+%\)\r\n")
    terminal.expect(r"generated +\d+ tokens in 3 answers\r\n")
    terminal.expect(r"KV cache +\d+ of [\d,]+ pages used\r\n")
    at_prompt(terminal)
    terminal.send("/undo\r")
    terminal.expect("Took back “Hello!”; 1 turn left")
    at_prompt(terminal)

    terminal.send("/exit\r")
    assert left(terminal) == 0


def test_enter_typed_between_two_prompts_ends_a_line(terminal: Terminal, tmp_path: Path) -> None:
    """Between two prompts the terminal must not translate Enter to Ctrl-J."""
    file = tmp_path / "long.json"
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    file.write_text(json.dumps(turn * 100_000))
    terminal.send(f"/load {file}\r")
    terminal.expect(r"\x1b\[\?2004l")  # the prompt has given the terminal back
    terminal.send("/set top_k 7\r")
    terminal.expect_exact("top_k is 7.")
    at_prompt(terminal)
    terminal.send("/exit\r")
    assert left(terminal) == 0


def test_what_is_typed_while_the_model_loads_is_sent_when_it_has_loaded(tmp_path: Path) -> None:
    child = started(tmp_path)
    try:
        child.expect_exact("Loading")
        child.send("Hello!\r/stats\r")
        child.expect("Ctrl-D leaves")  # the model has loaded
        child.expect("How can I help you")
        child.expect(r"turns +1\r\n")
        at_prompt(child)
        child.send("/exit\r")
        assert left(child) == 0
    finally:
        child.close(force=True)


def test_a_terminal_of_few_characters_shows_the_others_as_question_marks(tmp_path: Path) -> None:
    child = forked(tmp_path, PYTHONIOENCODING="ascii")
    try:
        at_prompt(child)
        child.send("Hello! “é”\r")
        child.expect(r"\d+ tokens? ")
        at_prompt(child)
        child.send("/system “é”…\r")
        child.expect("The system prompt is set")
        at_prompt(child)
        child.send("/set top_k ”\r")
        child.expect("top_k")
        at_prompt(child)
        child.send("/exit\r")
        assert left(child) == 0
    finally:
        child.close(force=True)


def test_an_answer_that_is_cut_in_a_pipe_is_exit_code_1() -> None:
    result = minisgl(*OPTIONS, "--max-tokens", "2", input="Hello!\n")
    assert result.returncode == 1, result.stderr
    assert "cut at the limit" in result.stderr
    assert "Hello!".startswith(result.stdout.strip()[:6])


def test_a_question_of_the_command_line_is_answered_once() -> None:
    """It is never a command, and nothing is read."""
    result = minisgl(*OPTIONS, "--temperature", "0", "/help", input="Count from 1 to 99.\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1 and "/retry" not in result.stdout


def test_an_adapter_answers_the_question_of_the_command_line(tmp_path: Path) -> None:
    adapted = save_demo_adapter(tmp_path / "adapter", seed=0)
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    prompt = tokenizer.chat([{"role": "user", "content": "Hello!"}])
    own, wanted = [tokenizer.decode(greedy_tokens(each, prompt, 8)) for each in (None, adapted)]
    assert own.startswith("Hello!") and not wanted.startswith("Hello!")
    options = ("--device", "cpu", "--dtype", "float32", "--temperature", "0", "--max-tokens", "8")
    lora = ("--lora", f"a={tmp_path / 'adapter'}")
    result = minisgl("chat", *options, *lora, "Hello!")
    assert result.stdout == f"{wanted}\n"
    again = minisgl("chat", *options, "--lora", f"a={tmp_path}", "Hello!")
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert "adapter_config.json" in again.stderr


def test_a_question_of_the_command_line_is_answered_in_a_terminal(tmp_path: Path) -> None:
    child = forked(tmp_path, "Hello!")
    child.expect("How can I help you")
    child.expect(r"\d+ tokens ")
    assert left(child) == 0
    assert "Ctrl-D leaves" not in child.before


def test_ctrl_c_ends_the_only_answer(tmp_path: Path) -> None:
    child = forked(tmp_path, "Count from 1 to 99.")
    child.expect("1, 2, 3")
    child.send(CTRL_C)
    assert left(child) == 130


def test_a_pipe_gets_only_the_answers() -> None:
    asked = "Hello!\n/reset\nHello again!\n"
    result = minisgl(*OPTIONS, "--max-seq-len-override", "96", input=asked)
    assert result.returncode == 0
    assert "TTFT" not in result.stdout + result.stderr
    assert result.stdout == "Hello! How can I help you?\n" * 2
