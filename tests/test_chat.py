"""`minisgl chat`: the tokens of a conversation, the loop on a fake engine, a real terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config import Capacity, EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ContextLengthError, InvalidRequestError
from minisgl.models.hub import DEMO_NOTE
from minisgl.request import FinishReason, OutputDelta, SamplingParams
from minisgl_cli.answer import Answer
from minisgl_cli.conversation import Conversation, keep_seen
from minisgl_cli.repl import Repl
from minisgl_cli.terminal import Pipe, printable

# -- a tokenizer that a person can follow ---------------------------------------------------------

PIECES = ("<user>", "<model>", "<end>", "<stop>", "ab", "abc", "cd", *"abcdefgh !")
END, STOP = PIECES.index("<end>"), PIECES.index("<stop>")


def encode(text: str) -> list[int]:
    """The longest piece that fits, again and again."""
    ids = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        ids.append(PIECES.index(piece))
        text = text.removeprefix(piece)
    return ids


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids)


def spelled(text: str) -> list[int]:
    """Letter by letter, as a model may generate what the tokenizer would not."""
    return [PIECES.index(letter) for letter in text]


@dataclass
class ToyTokenizer:
    trims: bool = False  # answers, as some templates do

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = ""
        for message in messages:
            content = message["content"]
            if message["role"] == "user":
                if "!" in content:
                    raise InvalidRequestError("messages", "the template does not shout.")
                text += f"<user>{content}<end>"
            else:
                text += f"<model>{content.strip() if self.trims else content}<end>"
        return encode(text + "<model>")

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id].encode()


# -- the conversation's tokens --------------------------------------------------------------------


def second_prompt(answer_ids: list[int], answer: str, *, trims: bool = False) -> list[int]:
    conversation = Conversation(ToyTokenizer(trims))
    conversation.answer(conversation.ask("ab"), answer_ids, answer)
    return conversation.ask("cd")


def test_an_answer_in_the_tokenizers_own_tokens_is_part_of_the_next_prompt() -> None:
    prompt = second_prompt([*encode("abc d"), END], "abc d")
    assert prompt == encode("<user>ab<end><model>abc d<end><user>cd<end><model>")


def test_an_answer_in_other_tokens_keeps_them() -> None:
    prompt = second_prompt([*spelled("abcabc"), END], "abcabc")
    first = encode("<user>ab<end><model>")
    assert prompt == [*first, *spelled("abcabc"), END, *encode("<user>cd<end><model>")]


def test_the_template_ends_the_answer_its_own_way() -> None:
    prompt = second_prompt([*spelled("abc"), STOP], "abc")
    first = encode("<user>ab<end><model>")
    assert prompt == [*first, *spelled("abc"), *encode("<end><user>cd<end><model>")]


def test_an_answer_that_the_template_changes_is_the_templates() -> None:
    prompt = second_prompt([*spelled(" abc "), END], " abc ", trims=True)
    assert prompt == encode("<user>ab<end><model>abc<end><user>cd<end><model>")


@given(st.lists(st.sampled_from(range(len(PIECES)))), st.booleans(), st.integers(0, 3))
def test_the_prompt_always_reads_as_the_template_has_it(
    generated: list[int], trims: bool, num_held_back: int
) -> None:
    """Whatever the model generated, special tokens in wrong places included."""
    tokenizer = ToyTokenizer(trims)
    answer = decode(generated[: max(0, len(generated) - num_held_back)])
    conversation = Conversation(tokenizer)
    conversation.answer(conversation.ask("ab"), generated, answer)
    prompt = conversation.ask("cd")
    assert decode(prompt) == decode(tokenizer.chat(conversation.messages))


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
def test_seen_tokens_are_kept_as_far_as_both_read_the_same(
    seen: list[bytes], templated: list[bytes], prompt: list[bytes]
) -> None:
    """Tokens are given as their bytes here."""
    vocabulary = sorted({*seen, *templated})
    ids = [[vocabulary.index(token) for token in tokens] for tokens in (seen, templated)]
    kept = keep_seen(*ids, token_bytes=vocabulary.__getitem__)
    assert [vocabulary[token_id] for token_id in kept] == prompt


def test_a_question_taken_back_and_a_reset_leave_nothing() -> None:
    conversation = Conversation(ToyTokenizer())
    conversation.answer(conversation.ask("ab"), spelled("abc"), "abc")
    conversation.ask("cd")
    conversation.take_back()
    assert [message["content"] for message in conversation.messages] == ["ab", "abc"]
    conversation.reset()
    assert conversation.ask("cd") == encode("<user>cd<end><model>")


# -- one answer -----------------------------------------------------------------------------------


def delta(text: str, *, cached: int = 0, reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(encode(text), text, 0, cached, finish_reason=reason)


def test_the_summary_tells_how_much_and_how_fast() -> None:
    answer = Answer(num_prompt_tokens=8, asked_at=10.0)
    answer.add(delta("a", cached=6), 10.25)
    for step in range(4):
        answer.add(delta("b", cached=6), 10.35 + 0.1 * step)
    answer.add(delta("", cached=6, reason=FinishReason.STOP), 20.0)
    assert answer.text == "abbbb"
    assert answer.summary() == ("5 tokens · TTFT 250 ms · 10.0 tok/s · 6 of 8 prompt tokens cached")


def test_the_summary_of_one_token_has_no_rate() -> None:
    answer = Answer(num_prompt_tokens=8, asked_at=10.0)
    answer.add(delta("a"), 10.25)
    assert answer.summary() == "1 token · TTFT 250 ms · 0 of 8 prompt tokens cached · stopped"


def test_a_model_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2J\tb\x07\n\x9bé") == "a[2J\tb\né"


# -- the loop, on a fake engine -------------------------------------------------------------------


class FakeDefaults:
    def sampling(self) -> SamplingParams:
        return SamplingParams()


@dataclass
class FakeEngine:
    """Answers every prompt with the next of `answers`, letter by letter; Ctrl-C comes at a `^`."""

    answers: list[str]
    max_seq_len: int = 1000
    prompts: list[list[int]] = field(default_factory=list)
    num_aborted: int = 0

    tokenizer = ToyTokenizer()
    defaults = FakeDefaults()

    @property
    def capacity(self) -> Capacity:
        return Capacity(num_pages=2, page_size=1, num_slots=1, max_seq_len=self.max_seq_len)

    def submit(self, prompt: list[int], params: SamplingParams) -> FakeStream:
        room = self.max_seq_len - len(prompt)
        if room < 1:
            raise ContextLengthError(len(prompt), None, self.max_seq_len)
        self.prompts.append(prompt)
        letters = self.answers.pop(0)[:room]
        reason = FinishReason.LENGTH if len(letters) == room else FinishReason.STOP
        return FakeStream(self, letters, reason)


@dataclass
class FakeStream:
    engine: FakeEngine
    letters: str
    reason: FinishReason

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        for letter in self.letters:
            if letter == "^":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            yield delta(letter, cached=3)
        yield delta("", cached=3, reason=self.reason)

    def abort(self) -> None:
        self.engine.num_aborted += 1


@dataclass
class FakeFace(Pipe):
    """A person who enters `lines` and leaves."""

    lines: list[str]
    written: str = ""
    said: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)

    async def read(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def write(self, text: str) -> None:
        self.written += text

    def end_answer(self) -> None:
        self.written += "\n"

    def say(self, line: str) -> None:
        self.said.append(line)

    def note(self, line: str) -> None:
        self.noted.append(line)


async def converse(engine: FakeEngine, *lines: str) -> FakeFace:
    face = FakeFace(list(lines))
    fake: Any = engine
    await Repl(fake, engine.tokenizer, face).run()
    return face


async def test_answers_are_streamed_and_become_part_of_the_conversation() -> None:
    engine = FakeEngine(["abc", "cd"])
    face = await converse(engine, "ab", "", "  ", "h")
    assert face.written == "abc\ncd\n"
    assert engine.prompts[1][: len(engine.prompts[0]) + 3] == engine.prompts[0] + spelled("abc")
    assert decode(engine.prompts[1]) == "<user>ab<end><model>abc<end><user>h<end><model>"
    assert [note.startswith(("3 tokens", "2 tokens")) for note in face.noted] == [True, True]
    assert face.said == []


async def test_reset_starts_a_new_conversation() -> None:
    engine = FakeEngine(["abc", "cd"])
    await converse(engine, "ab", "/reset", "h")
    assert decode(engine.prompts[1]) == "<user>h<end><model>"


async def test_exit_leaves_at_once() -> None:
    engine = FakeEngine([])
    await converse(engine, "/exit", "ab")
    assert engine.prompts == []


async def test_help_lists_every_command() -> None:
    face = await converse(FakeEngine([]), "/help")
    assert [line.split()[0] for line in face.said] == ["/help", "/reset", "/exit", "Ctrl-C"]


@pytest.mark.parametrize(
    ("command", "hint"),
    [("/rest", "Did you mean /reset?"), ("/xyz a b", "no command /xyz. /help"), ("/", "/help")],
)
async def test_an_unknown_command_is_a_hint(command: str, hint: str) -> None:
    face = await converse(FakeEngine(["a"]), command, "ab")
    assert hint in face.said[0]
    assert face.written == "a\n"


async def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    engine = FakeEngine(["abc^defgh", "a"])
    before = signal.getsignal(signal.SIGINT)
    face = await converse(engine, "ab", "h")
    assert face.written == "abc\na\n"
    assert engine.num_aborted == 2  # harmless for the one that had ended
    assert face.noted[0].endswith("stopped")
    assert decode(engine.prompts[1]) == "<user>ab<end><model>abc<end><user>h<end><model>"
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_question_stopped_before_its_first_token_is_forgotten() -> None:
    engine = FakeEngine(["^abc", "a"])
    face = await converse(engine, "ab", "h")
    assert face.written == "a\n"
    assert face.said == ["Stopped; the question is forgotten."]
    assert decode(engine.prompts[1]) == "<user>h<end><model>"


async def test_a_full_context_is_a_sentence_and_the_loop_goes_on() -> None:
    engine = FakeEngine(["abcdefgh", "cd"], max_seq_len=12)
    face = await converse(engine, "ab", "cd", "/reset", "ab")
    assert face.written == "abcdefgh\ncd\n"
    assert face.said == [
        "The context of 12 tokens is full. /reset starts a new conversation.",
        "The conversation with this question has 17 tokens, which is more than the context of 12 "
        "holds. /reset starts a new conversation.",
    ]


async def test_a_question_that_the_template_refuses_is_a_sentence() -> None:
    engine = FakeEngine(["a"])
    face = await converse(engine, "ab!", "ab")
    assert face.said == ["messages: the template does not shout."]
    assert decode(engine.prompts[0]) == "<user>ab<end><model>"


# -- the real thing, with the bundled model -------------------------------------------------------

# With one token a page, the cache's share can be told to the token.
COMMAND = ["-m", "minisgl", "chat", "--device", "cpu", "--page-size", "1"]
CTRL_C, CTRL_D = "\x03", "\x04"


async def test_a_later_turn_computes_only_what_is_new() -> None:
    """What the model says at such a temperature is seldom cut as the tokenizer would cut it."""
    params = SamplingParams(temperature=2.0, max_tokens=60)
    async with await AsyncEngine.start(EngineConfig(device="cpu", page_size=1)) as engine:
        assert engine.tokenizer is not None
        conversation = Conversation(engine.tokenizer)
        num_seen = 0
        for turn in range(4):
            prompt = conversation.ask("Tell me more.")
            answer = Answer(num_prompt_tokens=len(prompt), asked_at=0.0)
            async for delta in engine.submit(prompt, dataclasses.replace(params, seed=turn)):
                answer.add(delta, 0.0)
            # The last token of an answer has no keys and values yet.
            assert answer.num_cached_tokens == max(0, num_seen - 1)
            assert num_seen - 1 < len(prompt) < num_seen + 30
            conversation.answer(prompt, answer.token_ids, answer.text)
            num_seen = len(prompt) + len(answer.token_ids)


@pytest.fixture
def terminal() -> Iterator[pexpect.spawn]:
    """`minisgl chat` at its first prompt, in a terminal that does not tell where its cursor is."""
    child = pexpect.spawn(
        sys.executable,
        COMMAND,
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        encoding="utf-8",
        codec_errors="replace",
        dimensions=(50, 200),
        timeout=120,
    )
    child.expect_exact(DEMO_NOTE)
    child.expect("Ctrl-D leaves")
    at_prompt(child)
    yield child
    child.close(force=True)


def at_prompt(terminal: pexpect.spawn) -> None:
    """Bracketed paste is on and the prompt is drawn: prompt_toolkit has the keys."""
    terminal.expect(r"\x1b\[\?2004h[\s\S]*?>")


def left(terminal: pexpect.spawn) -> int | None:
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus


def stop_an_answer(terminal: pexpect.spawn) -> tuple[int, int]:
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


def test_a_conversation_in_a_terminal(terminal: pexpect.spawn) -> None:
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

    terminal.send("/exit\r")
    assert left(terminal) == 0


def test_the_second_ctrl_c_at_the_prompt_leaves(terminal: pexpect.spawn) -> None:
    terminal.send("half a question" + CTRL_C)
    terminal.expect("Ctrl-C once more")
    at_prompt(terminal)
    terminal.send(CTRL_C)
    assert left(terminal) == 0


def test_ctrl_d_leaves(terminal: pexpect.spawn) -> None:
    terminal.send(CTRL_D)
    assert left(terminal) == 0


def test_in_a_pipe_there_are_only_answers() -> None:
    result = subprocess.run(
        [sys.executable, *COMMAND, "--max-seq-len-override", "96"],
        input="Hello!\n/reset\nHello again!\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TTFT" not in result.stdout + result.stderr
    assert result.stdout == "Hello! How can I help you?\n" * 2
