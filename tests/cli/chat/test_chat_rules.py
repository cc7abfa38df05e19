"""`/json` and `/tools`: on scripted models with the fake UI, and on an engine with toy tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answering_runner import AnsweringRunner
from support.engine_loop import ScriptedRunner, engine_on
from support.fake_chat_ui import FakeChatUI
from support.harmony_chat import gpt_oss
from support.parsed_answers import TAGS
from support.toy_tokenizers import with_tokens

from minisgl.client.errors import ServerError
from minisgl.engine import AsyncEngine
from minisgl.errors import InvalidRequestError, MinisglError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.request import FinishReason
from minisgl.text.tokenizer import Tokenizer
from minisgl_cli.chat.commands import Session
from minisgl_cli.chat.conversation import Conversation
from minisgl_cli.chat.engine_model import EngineModel
from minisgl_cli.chat.json_format import JsonIndenter
from minisgl_cli.chat.model import AnswerRules, CallPiece, Message, ReplyDelta
from minisgl_cli.chat.repl import CUT_CALL, Repl

WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = [CallPiece(0, "call_1", "weather"), CallPiece(0, arguments='{"city": "Rome"}')]
TWO_CALLS = [*CALL, CallPiece(1, "call_2", "weather", "{}")]

Reply = str | list[CallPiece] | MinisglError


@dataclass
class ScriptedModel:
    replies: list[Reply]
    finish: FinishReason = FinishReason.STOP
    asked: list[list[Message]] = field(default_factory=list)
    rules: list[AnswerRules] = field(default_factory=list)
    name: str = "scripted"
    facts: Sequence[str] = ()
    max_seq_len: None = None
    sampling_defaults: None = None

    def check(self, sampling: Mapping[str, Any]) -> None:
        pass

    async def check_rules(self, rules: AnswerRules) -> None:
        if rules.schema == {"type": 5}:
            raise InvalidRequestError("schema", "type must be a text.")

    def status(self) -> Sequence[tuple[str, str]]:
        return ()

    async def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], rules: AnswerRules
    ) -> AsyncGenerator[ReplyDelta, None]:
        self.asked.append(list(messages))
        self.rules.append(rules)
        reply = self.replies.pop(0)
        if isinstance(reply, MinisglError):
            raise reply
        if isinstance(reply, str):
            for char in reply:
                yield ReplyDelta(char)
        else:
            yield ReplyDelta(calls=reply)
        yield ReplyDelta(num_tokens=3, finish_reason=self.finish)

    @property
    def roles(self) -> list[str]:
        """The first letters of the roles in each request."""
        return ["".join(message["role"][0] for message in messages) for messages in self.asked]


@dataclass
class Chat:
    ui: FakeChatUI
    session: Session
    num_failed: int


async def chat(model: Any, *lines: str) -> Chat:
    ui = FakeChatUI(list(lines))
    session = Session(model, ui, Conversation())
    return Chat(ui, session, await Repl(session).run())


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    return file


# -- /json ----------------------------------------------------------------------------------------


async def test_answers_follow_a_schema_until_it_is_off_and_are_laid_out(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array"}')
    model = ScriptedModel(['{"a":[1,{}]}', "[2]", "plain"])
    done = await chat(model, '/json {"x": 1}', "one", f"/json {file}", "two", "/json off", "three")
    assert [rules.schema for rules in model.rules] == [{"x": 1}, {"type": "array"}, None]
    assert done.ui.coded == '{\n  "a": [\n    1,\n    {}\n  ]\n}[\n  2\n]'
    assert done.ui.written == "plain\n"
    # The model gets its answer back as it wrote it.
    assert model.asked[1][1]["content"] == '{"a":[1,{}]}'
    assert done.num_failed == 0


async def test_json_alone_says_what_answers_are() -> None:
    done = await chat(ScriptedModel([]), "/json", "/json {}", "/json")
    assert [said.split(";")[0] for said in done.ui.said] == [
        "Answers are text",
        "Answers follow a schema",
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("{", "The schema is no JSON: "),
        ('{"type": 5}', "schema: type must be a text."),
        ("/none/schema", "/none/schema cannot be read: No such file or directory."),
        ("LIST", " is no JSON schema, which is an object."),
    ],
)
async def test_what_is_no_schema_is_refused_in_one_line(tools: Path, typed: str, said: str) -> None:
    done = await chat(ScriptedModel([]), "/json {}", f"/json {typed.replace('LIST', str(tools))}")
    assert said in done.ui.said[0] and "\n" not in done.ui.said[0]
    assert done.session.rules == AnswerRules(schema={}) and done.num_failed == 1


def values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(values(), st.lists(st.integers(0, 200)), st.booleans())
def test_the_layout_is_that_of_json_dumps_however_the_text_is_split(
    value: Any, cuts: list[int], is_compact: bool
) -> None:
    text = json.dumps(value, separators=(",", ":") if is_compact else None)
    places = [0, *sorted(cuts), len(text)]
    layout = JsonIndenter()
    parts = [layout.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    expected = json.dumps(value, indent=2) if text[0] in "{[" else text
    assert "".join(parts) == expected


def test_text_that_is_no_json_keeps_its_layout() -> None:
    layout = JsonIndenter()
    assert (
        layout.feed(" \n") + layout.feed("As you ") + layout.feed("wish: {}") == "As you wish: {}"
    )


# -- /tools ---------------------------------------------------------------------------------------


async def test_a_person_types_the_results_of_calls(tools: Path) -> None:
    model = ScriptedModel([TWO_CALLS, CALL, "Mild.", "Welcome."])
    done = await chat(
        model, f"/tools {tools}", "Weather?", "18", "", '"""\n20\n21"""', "22", "Thanks."
    )
    assert model.roles == ["u", "uatt", "uattat", "uattatau"]
    assert all(rules.tools == tuple(TOOLS) for rules in model.rules)
    results = [message for message in model.asked[-1] if message["role"] == "tool"]
    assert [result["content"] for result in results] == ["18", "20\n21", "22"]
    assert [result["tool_call_id"] for result in results] == ["call_1", "call_2", "call_1"]
    assert model.asked[1][1]["tool_calls"][0] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    shown = 'weather({"city": "Rome"})'
    assert done.ui.coded == f"{shown}\nweather({{}}){shown}"
    assert done.ui.noted.count("Type the result of weather.") == 4  # Enter alone is no result
    assert done.num_failed == 0
    assert [answer.num_tokens is not None for answer in done.session.answers] == [True] * 4


async def test_tools_off_ends_the_offer(tools: Path) -> None:
    model = ScriptedModel(["a"])
    done = await chat(model, f"/tools {tools}", "/tools", "/tools off", "/tools", "hi")
    assert [said.split(";")[0] for said in done.ui.said] == ["Tools: weather", "Tools: none"]
    assert model.rules == [AnswerRules()]


async def test_retry_and_undo_drop_calls_without_results(tools: Path) -> None:
    model = ScriptedModel(["Hello.", CALL, CALL, "Yes."])
    done = await chat(model, f"/tools {tools}", "hi", "Weather?", "/retry", "/undo", "Rain?")
    assert model.roles == ["u", "uau", "uau", "uau"]
    assert done.session.conversation.turns[1].question == "Rain?"


async def test_results_are_kept_for_a_retry_after_a_failure(tools: Path) -> None:
    model = ScriptedModel([CALL, ServerError("Down."), "Mild."])
    done = await chat(model, f"/tools {tools}", "Weather?", "18", "/retry")
    assert model.roles == ["u", "uat", "uat"] and done.num_failed == 1
    assert done.session.conversation.turns[0].answer == "Mild."


async def test_a_call_that_was_cut_is_left_out(tools: Path) -> None:
    done = await chat(ScriptedModel([CALL], FinishReason.LENGTH), f"/tools {tools}", "Weather?")
    assert done.ui.said == [CUT_CALL] and done.num_failed == 1
    assert done.ui.coded == 'weather({"city": "Rome"}'
    conversation = done.session.conversation
    assert conversation.question == "Weather?" and not conversation.open_calls


async def test_calls_survive_saving_and_loading(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    model = ScriptedModel([CALL, "Mild.", TWO_CALLS])
    saved = await chat(model, f"/tools {tools}", "Rome?", "18", "Both?", "19", f"/save {file}")
    again = ScriptedModel(["Warm."])
    loaded = await chat(again, f"/load {file}", "20")
    assert again.roles == ["uatauatt"]
    last = {"role": "tool", "tool_call_id": "call_2", "content": "20"}
    assert again.asked[0] == [*saved.session.conversation.said, last]
    assert loaded.session.conversation.turns[1].answer == "Warm."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "has no tools: it needs a list of"),
        (5, "has no tools: it needs a list of"),
        ([{"type": "function"}], "tool 1 is not"),
        ([*TOOLS, {"type": "web_search"}], "tool 2 is not"),
        ([{"type": "function", "function": {"name": "f", "parameters": 5}}], "tool 1 is not"),
        (TOOLS * 2, "has two tools with the name weather."),
    ],
)
async def test_a_file_without_tools_is_refused_in_one_line(
    tmp_path: Path, content: Any, said: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    done = await chat(ScriptedModel([]), f"/tools {file}")
    assert said in done.ui.said[0] and "\n" not in done.ui.said[0]
    assert done.session.rules == AnswerRules() and done.num_failed == 1


async def test_a_schema_and_tools_exclude_each_other(tools: Path) -> None:
    done = await chat(ScriptedModel([]), "/json {}", f"/tools {tools}")
    assert done.ui.said == ["Tools cannot be offered while answers follow a schema: /json off"]
    done = await chat(ScriptedModel([]), f"/tools {tools}", "/json {}")
    assert done.ui.said == ["Answers cannot follow a schema while tools are offered: /tools off"]


# -- on an engine ---------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}: "
    "{{ call.function.arguments.values() | join }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
TOY = with_tokens(*TAGS, special=("<|im_start|>", "<|im_end|>"), chat_template=TEMPLATE)
ANSWERS = (
    '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
    "</tool_call>",
    "It is mild.",
)


async def test_an_engine_calls_tools_in_the_format_of_its_template(tools: Path) -> None:
    runner = AnsweringRunner(ANSWERS, TOY)
    async with AsyncEngine(runner.loaded()) as engine:
        done = await chat(EngineModel(engine, TOY), f"/tools {tools}", "Weather?", "18")
    second = runner.prompts[1]
    assert done.ui.said == []
    assert done.ui.thought == "Hm."
    assert done.ui.coded == 'weather({"city": "Rome"})'
    assert done.ui.written.strip() == "It is mild."
    assert '"name": "weather"' in second and "weather: Rome<|im_end|>" in second
    assert "tool\n18<|im_end|>" in second


@pytest.mark.parametrize("arguments", ['{"city": "Rome', '{"city": Rome}', "[1]"])
async def test_a_call_whose_arguments_are_no_object_asks_for_no_result(
    tools: Path, arguments: str
) -> None:
    written = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
    runner = AnsweringRunner([written, "Hello."], TOY)
    async with AsyncEngine(runner.loaded()) as engine:
        done = await chat(EngineModel(engine, TOY), f"/tools {tools}", "Weather?", "Hi.")
    assert done.ui.written.strip() == "Hello." and "tool\n" not in runner.prompts[1]


async def test_an_engine_thinks_before_an_answer_that_follows_a_schema() -> None:
    runner = AnsweringRunner(['<think>\nHm, {.\n</think>\n\n{"a": [1]}', "Hello."], TOY)
    async with AsyncEngine(runner.loaded()) as engine:
        done = await chat(
            EngineModel(engine, TOY), '/json {"type": "object"}', "A?", "/json off", "B?"
        )
    assert done.ui.said == [] and done.num_failed == 0
    assert done.ui.thought == "Hm, {."
    assert done.ui.coded == '{\n  "a": [\n    1\n  ]\n}'
    assert done.ui.written.strip() == "Hello."


FINAL = "<|channel|>final<|message|>"
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


async def test_an_engine_answers_in_messages_with_headers(tools: Path) -> None:
    """Without rules, with a schema and with tools: what is shown has none of the headers."""
    call = '<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{"city": "Rome"}'
    answers = ["Hello.", '{"a": [1]}', call, "It is mild."]
    texts = [f"{HARMONY_THOUGHT}{'' if text is call else FINAL}{text}" for text in answers]
    tokenizer = gpt_oss()
    runner = AnsweringRunner(texts, tokenizer)
    async with AsyncEngine(runner.loaded()) as engine:
        model = EngineModel(engine, tokenizer)
        done = await chat(
            model,
            "A?",
            '/json {"type": "object"}',
            "B?",
            "/json off",
            f"/tools {tools}",
            "C?",
            "18",
        )
    assert done.ui.said == [] and done.num_failed == 0
    assert done.ui.thought == "Hm." * 4
    assert done.ui.coded == '{\n  "a": [\n    1\n  ]\n}weather({"city": "Rome"})'
    assert done.ui.written.replace("\n", "") == "Hello.It is mild."
    first, *_, last = runner.prompts
    assert first.endswith("<|start|>user<|message|>A?<|end|><|start|>assistant")
    assert f"<|start|>assistant{FINAL}Hello.<|end|>" in last
    assert last.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Rome"}<|call|><|start|>functions.weather to=assistant<|channel|>commentary'
        '<|message|>"18"<|end|><|start|>assistant'
    )


async def test_an_engine_whose_template_has_no_tools_says_so(tools: Path) -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER, chat_template="{{ messages[-1].content }}")
    async with engine_on(ScriptedRunner(1), tokenizer=tokenizer) as engine:
        done = await chat(EngineModel(engine, tokenizer), f"/tools {tools}")
    assert "cannot be offered tools: its chat template" in done.ui.said[0]


async def test_an_engine_refuses_a_schema_at_once() -> None:
    async with engine_on(ScriptedRunner(1), tokenizer=True) as engine:
        assert engine.tokenizer is not None
        done = await chat(EngineModel(engine, engine.tokenizer), '/json {"type": "nothing"}')
    assert len(done.ui.said) == 1 and done.ui.said[0].startswith("schema: ")
    assert "\n" not in done.ui.said[0]
