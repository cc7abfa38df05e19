"""The commands of the REPL, on a model with scripted answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_chat_ui import FakeChatUI

from minisgl.client.errors import ServerError
from minisgl.client.models import ServedModel
from minisgl.errors import InvalidRequestError, MinisglError
from minisgl.request import FinishReason, SamplingParams
from minisgl_cli.chat import conversation_file
from minisgl_cli.chat.answer_rules import name_of, read_schema, read_tools
from minisgl_cli.chat.commands import TABLE, Session
from minisgl_cli.chat.conversation import Conversation, Turn
from minisgl_cli.chat.model import AnswerRules, ContextFullError, Message, ReplyDelta
from minisgl_cli.chat.parameters import NAMES
from minisgl_cli.chat.repl import MAKE_ROOM, Repl
from minisgl_cli.chat.server_model import ServerModel

CTRL_C = "^"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(2992)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


DOWN = ServerError("The server is down.")


@dataclass
class FakeModel:
    """Gives one of `replies` after the other: a text, an error, or Ctrl-C before anything comes."""

    replies: list[str | MinisglError] = field(default_factory=list)
    facts: Sequence[str] = ()
    max_seq_len: int | None = 1000
    sees: bool | None = True
    sampling_defaults: SamplingParams | None = field(
        default_factory=lambda: SamplingParams(temperature=0.75)
    )
    asked: list[list[Message]] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    rules: list[AnswerRules] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # the adapters
    adapters: Sequence[str] = ("sql", "poems")
    adapter: str = ""

    @property
    def name(self) -> str:
        return self.adapter or "fake"

    def check(self, sampling: Mapping[str, Any]) -> None:
        SamplingParams(**sampling)

    async def check_rules(self, rules: AnswerRules) -> None:
        if rules.schema == {"type": 5}:
            raise InvalidRequestError("schema", "type must be a text.")

    def status(self) -> Sequence[tuple[str, str]]:
        return [("KV cache", "3 of 4 pages used")]

    async def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], rules: AnswerRules
    ) -> AsyncGenerator[ReplyDelta, None]:
        self.rules.append(rules)
        self.answered.append(self.adapter)
        self.asked.append(list(messages))
        self.sampling.append(dict(sampling))
        reply = self.replies.pop(0)
        if isinstance(reply, MinisglError):
            raise reply
        if reply == CTRL_C:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        yield ReplyDelta(reply, "", len(reply), 10, 4, FinishReason.STOP)

    @property
    def questions(self) -> list[list[str]]:
        """The contents of each request."""
        return [[message["content"] for message in messages] for messages in self.asked]


@dataclass
class Chat:
    model: Any
    ui: FakeChatUI
    session: Session
    num_failed: int

    @property
    def said(self) -> list[str]:
        return self.ui.said

    @property
    def noted(self) -> list[str]:
        return self.ui.noted


async def chat(*lines: str, model: Any = None, system: str = "", **sampling: Any) -> Chat:
    model = model or FakeModel(["one", "two", "three"])
    ui = FakeChatUI(list(lines))
    session = Session(model, ui, Conversation(system), sampling)
    return Chat(model, ui, session, await Repl(session).run())


async def refused(*lines: str, model: Any = None) -> str:
    """The reply to the last line, which changes no state."""
    before = await chat(*lines[:-1], model=model and model())
    after = await chat(*lines, model=model and model())
    assert after.session.conversation == before.session.conversation
    assert after.session.sampling == before.session.sampling
    assert after.num_failed == before.num_failed + 1
    (said,) = after.said[len(before.said) :]
    assert "\n" not in said
    return said


# -- the system prompt ----------------------------------------------------------------------------


async def test_a_system_prompt_is_set_shown_and_cleared() -> None:
    done = await chat(
        *("/system", "hi", "/system Be brief.", "/system", "more", '/system ""', "/system", "last")
    )
    assert done.said == ["There is no system prompt.", "Be brief.", "There is no system prompt."]
    assert done.model.questions == [
        ["hi"],
        ["Be brief.", "hi", "one", "more"],
        ["hi", "one", "more", "two", "last"],
    ]
    assert done.num_failed == 0


async def test_a_system_prompt_may_have_several_lines() -> None:
    done = await chat('/system """Be brief.\n  Be kind.\n"""', "hi")
    assert done.model.questions == [["Be brief.\n  Be kind.", "hi"]]


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("temperature 0", "temperature", 0),
        ("temperature=0.5", "temperature", 0.5),
        ("top_k = 5", "top_k", 5),
        ("seed -1", "seed", -1),
        ("ignore_eos true", "ignore_eos", True),
        ("skip_special_tokens off", "skip_special_tokens", False),
        ("stop The end", "stop", ["The end"]),
        ("stop 5", "stop", ["5"]),
        ("stop =", "stop", ["="]),
        ('stop "\\n"', "stop", ["\n"]),
        ('stop ["a", "b"]', "stop", ["a", "b"]),
        ("stop_token_ids [1, 2]", "stop_token_ids", [1, 2]),
        ("stop_token_ids 7", "stop_token_ids", [7]),
        ("allowed_token_ids 7", "allowed_token_ids", [7]),
        ("bad_words 5", "bad_words", ["5"]),
        ('logit_bias {"7": -5}', "logit_bias", {7: -5}),
    ],
)
async def test_a_parameter_applies_from_the_next_answer_on(
    typed: str, name: str, value: object
) -> None:
    done = await chat("hi", f"/set {typed}", "more")
    assert done.model.sampling == [{}, {name: value}]
    assert done.noted[1].startswith(f"{name} is ")
    assert done.said == []


@pytest.mark.parametrize("word", ["default", "null"])
async def test_a_parameter_can_be_reset_to_the_models_default(word: str) -> None:
    done = await chat("/set temperature 0", f"/set temperature {word}", "hi")
    assert done.noted[:2] == ["temperature is 0.", "temperature is 0.75, the model's own."]
    assert done.model.sampling == [{}]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "/set takes a name and a value, such as /set temperature 0.5."),
        ("temperature", "/set takes a name and a value, such as /set temperature 0.5."),
        ("temperature 3", "temperature: must be from 0 to 2, not 3."),
        ("temperature hot", "temperature: must be a number, not 'hot'."),
        ("temperature NaN", "temperature: must be a number, not 'NaN'."),
        ("temperature true", "temperature: must be a number, not True."),
        ("top_k 1.5", "top_k: must be an integer, not 1.5."),
        ("max_tokens 0", "max_tokens: must be at least 1"),
        ("ignore_eos maybe", "ignore_eos: must be true or false, not 'maybe'."),
        ("ignore_eos 1", "ignore_eos: must be true or false, not '1'."),
        ('stop [""]', "stop: must be non-empty strings."),
        ("stop [1]", "stop: must be non-empty strings."),
        ("stop_token_ids x", "stop_token_ids: must be a list such as [1, 2], not 'x'."),
        ("stop_token_ids [-1]", "stop_token_ids: entry 0 must be from 0 to 2147483647, not -1."),
        ("logit_bias 5", 'logit_bias: must be an object such as {"7": -5}, not 5.'),
        ('logit_bias {"x": 1}', "logit_bias: each key must be an integer, not 'x'."),
        ('logit_bias {"1": 101}', "logit_bias: the bias of token 1 must be from -100 to 100, not"),
        (f'logit_bias {{"{"1" * 5000}": 1}}', "logit_bias: each key must be an integer, not '111"),
        (
            "temprature 1",
            "temprature: is no parameter of a chat. Did you mean temperature? /params lists them.",
        ),
        ("logprobs 1", "logprobs: is no parameter of a chat."),
        ("n 2", "n: is no parameter of a chat. /params lists them."),
        ("xyz default", "xyz: is no parameter of a chat."),
    ],
)
async def test_an_invalid_parameter_is_refused_at_once(typed: str, said: str) -> None:
    assert (await refused("/set top_p 0.5", f"/set {typed}")).startswith(said)


@pytest.mark.parametrize(
    "typed",
    [
        *(f"{name} {value}" for name in NAMES for value in ("9" * 4000, "[" * 900 + "]" * 900)),
        *(f"ignore_eos {'x' * 999}", f"{'x' * 999} 1"),
    ],
)
async def test_replies_to_any_input_are_short(typed: str) -> None:
    done = await chat(f"/set {typed}")
    assert max(map(len, done.said + done.noted)) < 160


async def test_contradicting_parameters_are_refused() -> None:
    said = await refused("/set max_tokens 5", "/set min_tokens 6")
    assert said == "min_tokens: 6 is more than max_tokens 5."


async def test_active_parameters_are_listed_with_their_source() -> None:
    done = await chat("/set top_p 0.5", f'/set stop ["{"x" * 99}"]', "/params", max_tokens=9)
    rows = [line.split() for line in done.said]
    assert [row[0] for row in rows] == list(NAMES)
    assert ["temperature", "0.75", "default"] in rows and ["top_p", "0.5", "chosen"] in rows
    assert ["max_tokens", "9", "chosen"] in rows and ["seed", "null", "default"] in rows
    assert len({line.rindex(" ") for line in done.said}) == 1  # the last column
    assert max(map(len, done.said)) < 80


async def test_with_a_server_only_the_chosen_parameters_are_listed() -> None:
    served = ServerModel("http://host/v1", "", ServedModel("served"))
    done = await chat(
        *("/params", "/set temperature 0", "/set top_a 0.2", "/set format json", "/params"),
        *("/set temperature default", "/set top_a null"),
        model=served,
    )
    assert done.said == [
        "None is chosen: all are the server's own.",
        "temperature  0     chosen",
        "top_a        0.2   chosen",
        "format       json  chosen",
        "All the others are the server's own.",
    ]
    assert done.noted == [
        "temperature is 0.",
        "top_a is 0.2; minisgl does not know it and sends it as it is. Did you mean top_p?",
        "format is json; minisgl does not know it and sends it as it is.",
        "temperature is the server's own.",
        "top_a is the server's own.",
    ]
    assert done.session.sampling == {"format": "json"}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("temperature 3", "temperature: must be from 0 to 2, not 3."),
        ("messages []", "messages: is no parameter of a chat."),
        ("stream false", "stream: is no parameter of a chat."),
        ("n 2", "n: is no parameter of a chat."),
    ],
)
async def test_with_a_server_invalid_parameters_are_refused_too(typed: str, said: str) -> None:
    served = ServerModel("http://host/v1", "", ServedModel("served"))
    assert (await refused(f"/set {typed}", model=lambda: served)).startswith(said)


# -- adapters -------------------------------------------------------------------------------------


async def test_an_adapter_answers_from_the_next_question_on() -> None:
    model = FakeModel(["one", "two"], adapter="sql")
    done = await chat("/lora", "hi", "/lora poems", "and", '/lora "off"', "/lora", model=model)
    assert done.said == [
        "sql answers; /lora takes sql, poems or off.",
        "fake answers; /lora takes sql, poems or off.",
    ]
    assert [line for line in done.noted if "answers" in line] == [
        "poems answers from now on.",
        "fake answers from now on.",
    ]
    assert model.answered == ["sql", "poems"]
    assert model.questions == [["hi"], ["hi", "one", "and"]]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("sqll", "There is no adapter sqll. Did you mean sql? /lora lists them."),
        ("fake", "There is no adapter fake. /lora lists them."),
        ("a\n b", "There is no adapter a b. /lora lists them."),
        ("x" * 999, f"There is no adapter {'x' * 49}…. /lora lists them."),
    ],
)
async def test_an_unknown_adapter_is_refused(typed: str, said: str) -> None:
    assert await refused(f"/lora {typed}") == said


# -- questions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("/etc/hosts is a file", "/etc/hosts is a file"),
        ('"""/help"""', "/help"),
        ('"""\n/help\nme\n"""', "/help\nme"),
        ("  hi\t", "hi"),
    ],
)
async def test_a_question_may_begin_with_a_slash(typed: str, asked: str) -> None:
    assert (await chat(typed)).model.questions == [[asked]]


@pytest.mark.parametrize("typed", ["", " \t", '""" """', '""""""'])
async def test_empty_input_is_no_question(typed: str) -> None:
    done = await chat(typed)
    assert done.model.asked == [] and done.said == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("/clear", "/reset"), ("/bye", "/exit"), ("/?", "/help"), ("/regen", "/retry")],
)
async def test_the_names_of_other_programs_lead_to_ours(typed: str, meant: str) -> None:
    assert f"Did you mean {meant}? " in await refused(typed)


async def test_an_unknown_command_explains_how_to_ask_it_as_a_question() -> None:
    assert await refused("/tmp is full") == (
        'There is no command /tmp. /help lists the commands; between """ and """ it is a question.'
    )
    assert len(await refused("/" + "x" * 999)) < 160


@pytest.mark.parametrize("typed", ['"""hi', '/system """Be brief.'])
async def test_quotes_left_open_in_a_pipe_are_refused(typed: str) -> None:
    assert await refused("hi", typed) == 'What begins with """ has to end with """.'


async def test_an_answer_that_breaks_off_is_kept_and_counts_as_a_failure() -> None:
    class Breaking(FakeModel):
        async def reply(self, *_: Any) -> AsyncGenerator[ReplyDelta, None]:
            yield ReplyDelta("a")
            raise DOWN

    done = await chat("hi", model=Breaking())
    assert done.said == ["The server is down."]
    assert done.session.conversation.turns == [Turn("hi", "a")]
    assert done.num_failed == 1


async def test_an_empty_answer_counts_as_a_failure() -> None:
    class Empty(FakeModel):
        async def reply(self, *_: Any) -> AsyncGenerator[ReplyDelta, None]:
            yield ReplyDelta(finish_reason=FinishReason.STOP)

    done = await chat("hi", model=Empty())
    assert done.said == ["The model answers nothing."]
    assert done.num_failed == 1


# -- retry and undo -------------------------------------------------------------------------------


async def test_retry_asks_the_last_question_again() -> None:
    done = await chat("hi", "more", "/retry", "last", model=FakeModel(["a", "b", "c", "d"]))
    assert done.model.questions[2:] == [["hi", "a", "more"], ["hi", "a", "more", "c", "last"]]
    assert done.ui.written == "a\nb\nc\nd\n"


@pytest.mark.parametrize(
    ("nothing", "why"), [(DOWN, "The server is down."), (CTRL_C, "Stopped before an answer came.")]
)
async def test_the_answer_is_restored_if_a_retry_gives_none(
    nothing: str | MinisglError, why: str
) -> None:
    done = await chat("hi", "/retry", "more", model=FakeModel(["a", nothing, "b"]))
    assert done.said == [why, "The answer before is kept."]
    assert done.model.questions == [["hi"], ["hi"], ["hi", "a", "more"]]
    assert done.num_failed == 1


async def test_a_question_that_failed_can_be_asked_again() -> None:
    done = await chat("hi", "more", "/retry", "/retry", model=FakeModel(["a", DOWN, DOWN, "b"]))
    assert done.said == ["The server is down."] * 2
    assert done.noted[1:3] == ["/retry asks again."] * 2
    assert done.model.questions[1:] == [["hi", "a", "more"]] * 3
    assert [turn.answer for turn in done.session.conversation.turns] == ["a", "b"]


async def test_a_new_question_replaces_one_that_failed() -> None:
    done = await chat("hi", "more", "/retry", model=FakeModel([DOWN, "a", "b"]))
    assert done.model.questions == [["hi"], ["more"], ["more"]]


@pytest.mark.parametrize("lines", [(), ("hi", "/reset"), ("hi", "/undo")])
async def test_without_a_question_there_is_nothing_to_retry_or_undo(lines: tuple[str, ...]) -> None:
    assert await refused(*lines, "/retry") == "There is no question to ask again."
    assert await refused(*lines, "/undo") == "There is no question to take back."


async def test_reset_drops_the_failed_question_and_keeps_the_parameters() -> None:
    done = await chat(
        *("/set top_k 5", "hi", "/reset", "/retry", "/stats", "more"),
        model=FakeModel([DOWN, "a"]),
        system="Be kind.",
    )
    assert done.said[1] == "There is no question to ask again."
    assert done.model.questions[1] == ["Be kind.", "more"]
    assert done.model.sampling[1] == {"top_k": 5}


async def test_undo_removes_a_question_and_its_answer() -> None:
    done = await chat("hi", "m" * 99 + "\nmore", "/undo", "last")
    assert done.noted[2] == f"Took back “{'m' * 49}…”; 1 turn left."
    assert done.model.questions[2] == ["hi", "one", "last"]


async def test_a_full_context_names_the_commands_that_help() -> None:
    full = ContextFullError("Too much.")
    done = await chat("hi", "more", "/retry", model=FakeModel(["a", full, full]))
    assert done.said == [f"Too much. {MAKE_ROOM}"] * 2
    assert all(word in TABLE for word in MAKE_ROOM.split() if word.startswith("/"))
    assert done.session.conversation.question == "more"
    done = await chat("hi", model=FakeModel([full]))
    assert done.said == ["Too much. A shorter question may fit."]


# -- stats ----------------------------------------------------------------------------------------


async def test_the_stats_are_those_of_the_conversation() -> None:
    done = await chat("/stats", "hi", "more", "/retry", "/undo", "/stats", "/reset", "/stats")
    nothing = ["turns     0", "KV cache  3 of 4 pages used"]
    lines = done.said[2:-2]
    assert done.said[:2] == done.said[-2:] == nothing
    assert lines[:3] == [
        "turns           1",
        "context         13 of 1,000 tokens (1%)",
        "generated       11 tokens in 3 answers",
    ]
    assert lines[3].startswith("mean TTFT       ") and lines[3].endswith(" ms")
    assert lines[4:] == [
        "prompts cached  12 of 30 tokens (40%)",
        "KV cache        3 of 4 pages used",
    ]


async def test_without_usage_of_a_server_the_stats_are_short() -> None:
    class Silent(FakeModel):
        async def reply(self, *_: Any) -> AsyncGenerator[ReplyDelta, None]:
            yield ReplyDelta("a")

    done = await chat("hi", "/stats", model=Silent())
    assert [line.split("  ")[0] for line in done.said] == ["turns", "mean TTFT", "KV cache"]


async def test_answers_without_usage_are_left_out_of_the_sums() -> None:
    class Mixed(FakeModel):
        async def reply(self, *_: Any) -> AsyncGenerator[ReplyDelta, None]:
            yield ReplyDelta("a")
            if self.replies.pop():
                yield ReplyDelta(num_tokens=5, finish_reason=FinishReason.STOP)

    done = await chat("hi", "more", "/stats", model=Mixed(["", "counted"]))
    assert "generated   5 tokens in 1 answer" in done.said


# -- files ----------------------------------------------------------------------------------------


async def test_a_saved_conversation_can_be_loaded_and_continued(tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    await chat("/set top_k 5", "hi", f'/save "{file}"', system="Be kind, é.")
    assert json.loads(file.read_text()) == {
        "saved_by": "minisgl chat",
        "model": "fake",
        "system": "Be kind, é.",
        "sampling": {"top_k": 5},
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "one"},
        ],
    }
    assert "é" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [file.name]

    other = FakeModel(["two"], adapter="another")
    done = await chat("dropped?", f"/load {file}", "more", model=FakeModel(["x", "two"]))
    assert done.model.questions[1] == ["Be kind, é.", "hi", "one", "more"]
    assert done.model.sampling[1] == {"top_k": 5}
    assert done.noted[1:4] == ["1 turn loaded.", "> hi", "one"]
    done = await chat(f"/load {file}", model=other)
    assert done.noted[0] == "1 turn loaded, saved with fake."


async def test_a_loaded_conversation_has_its_own_stats(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    done = await chat("hi", f"/save {file}", f"/load {file}", "/stats")
    assert [line.split("  ")[0] for line in done.said] == ["turns", "KV cache"]


async def test_saving_again_overwrites_the_file_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "chat.json", tmp_path / "link"
    link.symlink_to(file)
    await chat(f"/save {file}")
    file.chmod(0o640)
    done = await chat("hi", f"/save {link}")
    assert len(conversation_file.read(str(file)).turns) == 1
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert done.noted[-1] == f"1 turn saved to {file}."


async def test_a_tilde_means_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    await chat("/save ~/chat.json")
    assert (tmp_path / "chat.json").is_file()


@pytest.mark.parametrize("content", ["", "a text", "[]", '{"messages": []}', '{"saved_by": 1}'])
async def test_files_that_are_no_conversations_are_not_overwritten(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    said = await refused(f"/save {file}")
    assert said == f"{file} is there and is no conversation that /save wrote: it stays."
    assert file.read_text() == content
    assert os.listdir(tmp_path) == [file.name]


async def test_an_unwritable_path_is_reported_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.mkfifo(tmp_path / "pipe")
    missing = tmp_path / "none" / "chat.json"
    for target, said in {
        "": "/save takes the name of a file, such as /save chat.json.",
        '""': "/save takes the name of a file, such as /save chat.json.",
        str(tmp_path): f"{tmp_path} is a folder.",
        str(missing): f"{missing} cannot be written: No such file or directory.",
        f"{file}/chat.json": f"{file}/chat.json cannot be written: Not a directory.",
        f"{tmp_path}/pipe": f"{tmp_path}/pipe is there and is no conversation that /save wrote: "
        "it stays.",
        f"{tmp_path}/{'x' * 300}": f"{tmp_path}/{'x' * 300} cannot be written: File name too long.",
        "a\0b": "'a\\x00b' is not the name of a file.",
    }.items():
        assert await refused(f"/save {target}") == said


async def test_a_file_name_of_several_lines_is_refused(tmp_path: Path) -> None:
    said = await refused(f"/save {tmp_path}/chat.json\nAnd a question?")
    assert said.endswith(" is not the name of a file.")
    assert os.listdir(tmp_path) == []


async def test_a_failed_write_leaves_the_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.json"
    await chat("hi", f"/save {file}")
    before = file.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert await refused(f"/save {file}") == f"{file} cannot be written: No space left on device."
    assert file.read_text() == before
    assert os.listdir(tmp_path) == [file.name]


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        ([USER, ASSISTANT], ["Mine.", "hi", "hello"]),
        ([SYSTEM, USER, ASSISTANT], ["Be kind.", "hi", "hello"]),
        ({"messages": [SYSTEM]}, ["Be kind."]),
        (
            {"messages": [USER, {**ASSISTANT, "refusal": None}], "top_p": 9},
            ["Mine.", "hi", "hello"],
        ),
        ({"messages": [], "system": ""}, []),
    ],
)
async def test_a_list_of_openai_messages_can_be_loaded(
    tmp_path: Path, content: object, asked: list[str]
) -> None:
    """Settings that are absent from a file keep their values."""
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(content))
    done = await chat(f"/load {file}", "more", system="Mine.", top_k=5)
    assert done.said == []
    assert done.model.questions == [[*asked, "more"]]
    assert done.model.sampling == [{"top_k": 5}]


async def test_a_loaded_conversation_that_ends_with_a_question_can_be_retried(
    tmp_path: Path,
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([USER, ASSISTANT, {"role": "user", "content": "And then?"}]))
    done = await chat(f"/load {file}", "/retry")
    assert done.noted[:5] == [
        *("1 turn loaded.", "> hi", "hello", "> And then?", "Not answered yet: /retry asks it."),
    ]
    assert done.model.questions == [["hi", "hello", "And then?"]]


async def test_a_failed_question_is_saved_and_can_be_retried(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    done = await chat("hi", "more", f"/save {file}", model=FakeModel(["a", DOWN]))
    assert done.noted[-1] == f"1 turn and a question without an answer saved to {file}."
    done = await chat(f"/load {file}", "/retry")
    assert done.model.questions == [["hi", "a", "more"]]


async def test_the_end_of_a_long_loaded_answer_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    long = {"role": "assistant", "content": f"{'a' * 10**6}The end."}
    file.write_text(json.dumps([{**USER, "content": "a" * 10**6}, long]))
    done = await chat(f"/load {file}", "more")
    assert done.noted[2].startswith("…a") and done.noted[2].endswith("aThe end.")
    assert max(map(len, done.noted)) < 3000
    assert done.model.questions[0][1] == long["content"]


async def test_the_last_loaded_answer_is_shown_without_its_thinking(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    file.write_text(json.dumps([USER, thought]))
    done = await chat(f"/load {file}", "more")
    assert done.noted[2] == "Yes."
    assert done.model.questions[0][1] == thought["content"]


async def test_invalid_parameters_of_a_file_are_skipped_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    sampling = {"temperature": 9, "top_a": 1, "ignore_eos": 1, "top_k": 5, "seed": None}
    file.write_text(json.dumps({"messages": [USER, ASSISTANT], "sampling": sampling}))
    done = await chat("/set min_p 0.5", f"/load {file}", "more")
    assert [said[:50] for said in done.said] == [
        "Left out of the file's parameters: temperature: mu",
        "Left out of the file's parameters: top_a: is no pa",
        "Left out of the file's parameters: ignore_eos: mus",
    ]
    assert done.model.sampling == [{"top_k": 5}]
    assert done.num_failed == 0


TURNS = (
    "after a system message, if any, user and assistant must take turns, the user first, and each "
    "tool call needs its result."
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", " is no JSON: "),
        ("[" * 10**5, " is no JSON: "),
        (b'["\xff"]', " is not in UTF-8; save it in UTF-8."),
        ('["\\ud800"]', " is no JSON: "),
        ("5", " is no conversation: allowed are a list of messages, or an object with one"),
        ('{"messages": 5}', " is no conversation: "),
        ("{}", " is no conversation: "),
        ('{"messages": [], "system": 5}', ": system must be a text."),
        ('{"messages": [], "sampling": 5}', ": sampling must be an object."),
        ('{"messages": [], "model": 5}', ": model must be a text."),
        ("[5]", ": message 1 is no object with a role and a content."),
        (
            [USER, {"role": "function", "content": ""}],
            ": message 2 has the role 'function'; allowed: system, user, assistant or tool.",
        ),
        ([{"role": ["user"]}], ": message 1 has the role ['user']; allowed: system"),
        ([USER, {"role": "assistant"}], ": message 2 has a content that is no text."),
        ([{"role": "user", "content": [{"type": "text"}]}], ": message 1 has parts other than"),
        ([{"role": "user", "content": [image("https://a/b")]}], ": message 1 has parts other"),
        ([USER, {"role": "assistant", "content": []}], ": message 2 has a content that is no text"),
        ([USER, USER], f": {TURNS}"),
        ([ASSISTANT], f": {TURNS}"),
        ([USER, ASSISTANT, SYSTEM], f": {TURNS}"),
    ],
)
async def test_loading_a_file_that_is_no_conversation_is_refused(
    tmp_path: Path, content: Any, said: str
) -> None:
    file = tmp_path / "file"
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert (await refused("hi", f"/load {file}")).startswith(f"{file}{said}")


async def test_loading_an_unreadable_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, large = tmp_path / "none", tmp_path / "large"
    assert await refused(f"/load {missing}") == (
        f"{missing} cannot be read: No such file or directory."
    )
    assert await refused(f"/load {tmp_path}") == f"{tmp_path} is not a file."
    assert await refused("/load") == "/load takes the name of a file, such as /load chat.json."
    monkeypatch.setattr(conversation_file, "MAX_BYTES", 9)
    large.write_text(" " * 10)
    assert await refused(f"/load {large}") == f"{large} is larger than any conversation."


@given(
    st.text(),
    st.lists(
        st.builds(
            Turn,
            st.text(),
            st.text(),
            images=st.lists(st.text().map("data:image/".__add__)).map(tuple),
        )
    ),
    st.dictionaries(st.text(), st.none() | st.floats(-1, 1) | st.text() | st.lists(st.text())),
    st.none() | st.text(),
    st.text(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_conversation_survives_saving_and_loading(
    tmp_path: Path,
    system: str,
    turns: list[Turn],
    sampling: dict[str, Any],
    question: str | None,
    model: str,
) -> None:
    path = str(tmp_path / "chat.json")
    conversation_file.write(path, Conversation(system, turns, question), sampling, model)
    assert conversation_file.read(path) == conversation_file.SavedConversation(
        turns, question, system, sampling, model
    )


async def test_an_image_goes_with_the_next_message_and_stays_with_it(tmp_path: Path) -> None:
    file, saved = tmp_path / "a cat.png", tmp_path / "chat.json"
    file.write_bytes(PNG)
    lines = (f'/image "{file}"', f"/image {file}", "/image off", f"/image {file}", "What is it?")
    done = await chat(*lines, "And now?", f"/save {saved}")
    told = [line for line in done.noted if line.startswith("a cat.png")]
    assert told[0] == "a cat.png (3 kB): your next message has 1 image; /image off: none."
    assert [line.split()[8] for line in told] == ["1", "2", "1"]
    url = f"data:image/png;base64,{b64encode(PNG).decode()}"
    content = [image(url), {"type": "text", "text": "What is it?"}]
    assert done.model.questions == [[content], [content, "one", "And now?"]]
    again = await chat(f"/load {saved}", "/undo", "/retry", model=FakeModel(["more"]))
    assert again.model.questions == [[content]]
    assert conversation_file.read(str(saved)).turns[0].images == (url,)
    failed = await chat(f"/image {file}", "hi", "/retry", model=FakeModel([DOWN, "one"]))
    assert failed.model.questions[0] == failed.model.questions[1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.png", None, "{} cannot be read: No such file or directory."),
        ("text.png", b"a text", "{} is not an image; allowed: PNG, JPEG"),
        ("empty.png", b"", "{} has no bytes; allowed: PNG, JPEG"),
    ],
)
async def test_what_is_no_image_is_refused(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert (await refused("hi", f"/image {file}")).startswith(said.format(file))


async def test_a_model_that_takes_text_only_says_so(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(PNG)
    blind = FakeModel(["one"], sees=False)
    assert (await chat(f"/image {file}", model=blind)).said == ["fake takes text only."]
    assert (await chat("/image")).said == [
        "/image takes the name of a file, such as /image photo.jpg."
    ]
    unknown = await chat(f"/image {file}", "hi", model=FakeModel(["one"], sees=None))
    assert len(unknown.model.questions[0][0]) == 2
    for kinds, sees in ((["text"], False), (["text", "image"], True), (None, None)):
        assert ServerModel("http://a", "", ServedModel("b", input_modalities=kinds)).sees is sees


async def test_files_are_read_past_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    await chat("a question", f"/save {file}")
    plain = conversation_file.read(str(file))
    file.write_text("\ufeff" + file.read_text())
    assert conversation_file.read(str(file)) == plain and plain.turns
    file.write_text('\ufeff{"type": "object"}')
    assert read_schema(str(file)) == {"type": "object"}
    tool = {"type": "function", "function": {"name": "weather"}}
    file.write_text("\ufeff" + json.dumps([tool]))
    assert [name_of(each) for each in read_tools(str(file))] == ["weather"]


async def test_a_lone_surrogate_is_saved_as_a_replacement_character(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    await chat("half \ud800", f"/save {file}")
    assert conversation_file.read(str(file)).turns[0].question == "half ?"


# -- all of them ----------------------------------------------------------------------------------


async def test_help_fits_a_narrow_terminal() -> None:
    done = await chat("/help")
    assert max(map(len, done.said)) < 80
    columns = {line.index(TABLE[line.split()[0]].does) for line in done.said if line}
    assert len(columns) == 1


def test_the_help_of_each_command_is_short_and_plain() -> None:
    for command in TABLE.values():
        assert command.does.isascii() and command.does[0].islower()
        assert not command.does.endswith(".") and len(command.does.split()) < 12


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if not row.takes])
async def test_a_command_without_arguments_refuses_any(name: str) -> None:
    assert await refused(f"{name} x") == f"{name} takes no argument."


async def test_parameters_refused_by_the_model_are_refused_at_once() -> None:
    class Small(FakeModel):
        def check(self, sampling: Mapping[str, Any]) -> None:
            if sampling.get("stop_token_ids"):
                raise InvalidRequestError("stop_token_ids", "token ids are from 0 to 9.")

    said = await refused("/set stop_token_ids [10]", model=Small)
    assert said == "stop_token_ids: token ids are from 0 to 9."
