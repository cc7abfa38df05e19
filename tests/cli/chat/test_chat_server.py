"""`minisgl chat --url`: what servers say and how they fail, and the terminal in front of one.

Nothing here loads a model, so that a start costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.fake_engine import FakeEngine
from support.http_server import serving
from support.screens import at_prompt, left
from support.serving import served

from minisgl.client.errors import ServerError
from minisgl.config import EngineConfig, refuse_engine_options
from minisgl.errors import ConfigError, MinisglError, UnsupportedModelError
from minisgl.request import FinishReason, SamplingParams
from minisgl_cli.chat.config import ChatConfig
from minisgl_cli.chat.model import ContextFullError, ReplyDelta
from minisgl_cli.chat.parameters import NAMES
from minisgl_cli.chat.reply_record import ReplyRecord
from minisgl_cli.chat.server_model import ServerModel

OK = b"HTTP/1.1 200 OK\r\n\r\n"
CTRL_C, CTRL_D, CTRL_J, CTRL_O = "\x03", "\x04", "\x0a", "\x0f"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(content: str | None = None, *, finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}
    return event(choices=[choice])


def called(index: int, call_id: str = "", name: str = "", arguments: str = "") -> Any:
    known = {"id": call_id, "type": "function"} if call_id else {}
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"index": index, **known, "function": function}


END = piece(finish="stop") + b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5})

# The bytes of an answer, by question.
ANSWERS = {
    "hi": OK + b": a comment\r\n\r\n" + piece("Hel", role="assistant") + piece("lo.") + END,
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (piece("a")[:9], piece("a")[9:]))
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(END), END),
    "think": OK
    + piece(reasoning_content="Well, ")
    + piece(reasoning="well.")
    + piece("**Yes** \x1b[31m, `this`.\n\n- a\n- b")
    + piece(finish="length")
    + USAGE
    + b"data:[DONE]\n\n",
    "inline": OK + piece("<think>\nSo ") + piece("so.\n</think>\n\nNo.") + END,
    "null": OK
    + event(choices=None, usage=None)
    + event(choices=[{"delta": None, "finish_reason": None}])
    + piece("a")
    + END,
    "stuck": OK + piece("A beginning"),
    "broken": OK + piece("A beginning"),
    "event": OK + piece("A") + event(error={"message": "The engine\nhas failed.", "code": 500}),
    "deep": OK + b'data: {"x":' + b"[" * 10**5 + b"\n\n",
    "deep failure": b"HTTP/1.1 500 Bad\r\n\r\n" + b'{"error":' * 10**5,
    "Latin": b'HTTP/1.1 500 Bad\r\n\r\n{"error": "caf\xe9"}',
    "nonsense": OK + b"data: {not JSON\n\n",
    "too long": b"HTTP/1.1 400 Bad\r\n\r\n"
    + json.dumps({"error": {"message": "Much.", "code": "context_length_exceeded"}}).encode(),
    "too long elsewhere": b"HTTP/1.1 400 Bad\r\n\r\n"
    + json.dumps({"message": "This model's maximum context length is 8 tokens"}).encode(),
    "wrong": b'HTTP/1.1 401 No\r\nContent-Length: 28\r\n\r\n{"error": "Wrong API key  "}',
    "page": b"HTTP/1.1 502 Bad Gateway\r\n\r\n<h1>Bad\nGateway</h1>",
    "silent": b"",
    "evil": OK + piece("\x1b[1mA") + event(error={"message": "\x1b[2Jno\r\x9b\u202e."}),
    "other": b"SSH-2.0-OpenSSH\r\n",
    "structured": OK + piece('{"name":"Ada","tags":["a') + piece(' b",1],"none":{}}') + END,
    "weather": OK
    + piece(reasoning_content="Look.")
    + piece(tool_calls=[called(0, "call_a", "weather", "")])
    + piece(tool_calls=[called(0, arguments='{"city": ')])
    + piece(tool_calls=[called(0, arguments='"Köln"}')])
    + piece(tool_calls=[called(1, "call_b", "clock", "{}")])
    + piece(finish="tool_calls")
    + b"data: [DONE]\n\n",
    "cut": OK + piece(tool_calls=[called(0, "call_a", "weather", '{"ci')]) + piece(finish="length"),
    "noon": OK + piece("It is mild at noon.") + END,
}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.left = threading.Event()  # who asked what gets "stuck"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": "thinker", "max_model_len": 14}, {"id": "other"}]}
        self.wfile.write(OK + json.dumps(models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["authorization"])
        question = body["messages"][-1]["content"]
        self.wfile.write(ANSWERS[question])
        if question == "stuck":
            with contextlib.suppress(ConnectionResetError):
                self.rfile.read(1)
            self.server.left.set()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


async def asked(server: Server, question: str, **sampling: Any) -> list[ReplyDelta]:
    model = await ServerModel.connect(server.url, "secret")
    messages = [{"role": "user", "content": question}]
    return [delta async for delta in model.reply(messages, sampling)]


# -- answers --------------------------------------------------------------------------------------


async def test_a_request_has_messages_and_chosen_parameters_only(server: Server) -> None:
    deltas = await asked(server, "hi", temperature=0.5)
    assert "".join(delta.text for delta in deltas) == "Hello."
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert server.keys == ["Bearer secret"]
    assert server.bodies == [
        {
            "model": "thinker",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
        }
    ]


async def test_events_may_be_split_anywhere(server: Server) -> None:
    assert [delta.text for delta in await asked(server, "chunked")] == ["a", ""]


async def test_null_fields_of_a_server_are_treated_as_absent(server: Server) -> None:
    assert "".join(delta.text for delta in await asked(server, "null")) == "a"


async def test_thinking_and_usage_of_a_server_are_reported(server: Server) -> None:
    answer = ReplyRecord(asked_at=0.0)
    splits = [answer.add(delta, 1.0) for delta in await asked(server, "think")]
    assert "".join(split.thinking for split in splits) == "Well, well."
    assert answer.message.startswith("**Yes**")  # servers do not want their thoughts back
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.num_cached_tokens) == (5, 9, None)
    assert answer.fills(14) and not answer.fills(15)


@pytest.mark.parametrize(
    ("question", "kind", "said"),
    [
        ("too long", ContextFullError, "Much."),
        ("too long elsewhere", ContextFullError, "This model's maximum context length"),
        (
            "wrong",
            ServerError,
            "answers 401: Wrong API key. It does not take the key that it was given.",
        ),
        ("page", ServerError, "The server answers 502: <h1>Bad Gateway</h1>"),
        ("broken", ServerError, "ended its answer too early"),
        ("event", ServerError, "The engine has failed."),
        ("deep", ServerError, "does not speak OpenAI's API"),
        ("deep failure", ServerError, 'The server answers 500: {"error":{"error":'),
        ("Latin", ServerError, 'The server answers 500: {"error": "caf\ufffd"}'),
        ("nonsense", ServerError, "does not speak OpenAI's API"),
        ("silent", ServerError, "closed the connection without an answer"),
        ("other", ServerError, "does not answer in HTTP"),
    ],
)
async def test_a_server_failure_is_one_line(
    server: Server, question: str, kind: type[MinisglError], said: str
) -> None:
    with pytest.raises(kind) as failed:
        await asked(server, question)
    assert said in str(failed.value)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(("task", "said"), [("embed", "/v1/embeddings"), ("rerank", "/v1/rerank")])
async def test_a_model_that_does_not_generate_says_what_it_does(task: str, said: str) -> None:
    async with serving(FakeEngine(task=task)) as url:
        with pytest.raises(
            UnsupportedModelError, match=f"fake was loaded with --task {task}.+{said}"
        ):
            await ServerModel.connect(url, "")


async def test_stopping_an_answer_closes_the_connection(server: Server) -> None:
    model = await ServerModel.connect(server.url, "")
    deltas = model.reply([{"role": "user", "content": "stuck"}], {})
    async with contextlib.aclosing(deltas):
        assert (await anext(deltas)).text == "A beginning"
    assert await asyncio.to_thread(server.left.wait, 10)


async def test_a_model_is_chosen_by_name(server: Server) -> None:
    facts = (await ServerModel.connect(server.url, "", "other")).facts
    assert list(facts) == ["other", f"at {server.url}/v1"]
    with pytest.raises(ServerError, match="has no model none; it has thinker, other"):
        await ServerModel.connect(server.url, "", "none")


async def test_an_unreachable_server_is_reported_in_one_line() -> None:
    for url in ("http://127.0.0.1:9", "http://localhost:9"):
        said = f"{url}/v1/models cannot be reached: no server answers there."
        with pytest.raises(ServerError, match=f"^{re.escape(said)}$"):
            await ServerModel.connect(url, "")


async def test_the_chat_works_with_our_own_server() -> None:
    async def start() -> FakeEngine:
        return FakeEngine()

    set_all = {name: getattr(SamplingParams(), name) for name in NAMES}
    sampling = {**set_all, "max_tokens": 4, "seed": 0}
    with served(start, api_key=("secret",), strict_fields=True) as ours:
        model = await ServerModel.connect(ours.url, "secret")
        assert model.max_seq_len == ours.engine.capacity.max_seq_len
        messages = [{"role": "user", "content": "hi"}]
        deltas = [delta async for delta in model.reply(messages, sampling)]
    assert len("".join(delta.text for delta in deltas)) == 4
    assert deltas[-1].num_tokens == 4 and deltas[-1].num_cached_tokens is not None


@pytest.mark.parametrize("first", ["", "alias", "sql"])
async def test_adapters_of_our_own_server_answer_by_their_names(first: str) -> None:
    async def start() -> FakeEngine:
        return FakeEngine(adapters=("sql", "poems"))

    with served(start, served_model_name=("base", "alias")) as ours:
        model = await ServerModel.connect(ours.url, "", first)
        assert model.name == (first or "base")
        base, other = ("alias", "base") if first == "alias" else ("base", "alias")
        assert model.adapters == [other, "sql", "poems"]
        messages = [{"role": "user", "content": "hi"}]
        for chosen in (model.adapter, "poems", "", "sql"):
            model.adapter = chosen
            assert model.name == (chosen or base)
            assert [delta async for delta in model.reply(messages, {"max_tokens": 1})]
    answered = [*filter(None, ("" if first == "alias" else first,))]
    asked = [stream.adapters for stream in ours.engine.submitted]
    assert asked == [answered, ["poems"], [], ["sql"]]


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "127.0.0.1:1919"}, "--url 127.0.0.1:1919: allowed: an address such as"),
        ({"url": "http://host:x"}, "--url http://host:x: allowed"),
        ({"url": ""}, "--url '': allowed: an address such as"),  # of a variable that is not set
        ({"url": "http://a..b"}, "--url http://a..b: allowed"),
        ({"api_key": "a b"}, "--api-key (not shown): allowed"),
        ({"thinking": "hide"}, "--thinking hide: allowed: fold or show"),
        ({"temperature": 3.0}, "--temperature 3.0: allowed: 0 to 2"),
        ({"max_tokens": 0}, "--max-tokens 0: allowed: 1 or more"),
    ],
)
def test_an_invalid_option_is_refused_with_the_allowed_values(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ChatConfig(**options)
    assert str(refused.value).startswith(said)


def test_engine_options_are_refused_with_a_server() -> None:
    refuse_engine_options(EngineConfig(model="thinker"))
    with pytest.raises(ConfigError, match="--dtype float16: is for an engine of its own"):
        refuse_engine_options(EngineConfig(dtype="float16"))


# -- in a pipe and in a terminal ------------------------------------------------------------------


def test_a_pipe_gets_only_the_answers_and_torch_is_not_imported(server: Server) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['minisgl', 'chat', '--url', {server.url!r}, '--api-key', 'secret']\n"
        "from minisgl_cli.main import main\n"
        "exit_code = main()\n"
        "unused = {'torch', 'minisgl.bench.online.client', 'prompt_toolkit', 'rich.markdown'}\n"
        "assert not unused & set(sys.modules)\n"
        "sys.exit(exit_code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input="hi\ninline\nwrong\n",
        capture_output=True,
        text=True,
    )
    assert result.stdout == "Hello.\nNo.\n"
    said = "answers 401: Wrong API key. It does not take the key that it was given.\n"
    assert result.stderr == f"The server {said}"
    assert result.returncode == 1
    assert set(server.keys) == {"Bearer secret"}
    # A thought goes back as the model wrote it: templates know what to do with it.
    assert server.bodies[-1]["messages"][3]["content"] == "<think>\nSo so.\n</think>\n\nNo."


def piped(server: Server, *lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", "--url", server.url, "--max-tokens", "9"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
    )


def test_commands_work_in_a_pipe_and_parameters_are_sent(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    result = piped(
        server,
        *("/system Be kind.", "/set temperature 0", "/set include_stop on", '/set stop ["x"]'),
        *('/set logit_bias {"7": 1}', "/set top_a 0.5", "/set max_tokens default"),
        *("hi", "/retry", f"/save {file}", "/undo", "inline", f"/load {file}", "hi", "/stats"),
    )
    assert result.stdout == "Hello.\nHello.\nNo.\nHello.\n"
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["turns", "mean"]
    assert "\x1b" not in result.stdout + result.stderr
    assert result.returncode == 0
    for body in server.bodies:
        for name in ("model", "stream", "stream_options"):
            del body[name]
    chosen = {
        "temperature": 0,
        "include_stop_str_in_output": True,
        "stop": ["x"],
        "logit_bias": {"7": 1},
        "top_a": 0.5,
    }
    system = {"role": "system", "content": "Be kind."}
    hi, hello = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
    inline = {"role": "user", "content": "inline"}
    assert server.bodies == [
        {"messages": [system, *messages], **chosen}
        for messages in ([hi], [hi], [inline], [hi, hello, hi])
    ]


def test_a_failing_command_in_a_pipe_sets_the_exit_code(server: Server) -> None:
    result = piped(server, "/set temperature 9", "hi")
    assert result.stdout == "Hello.\n"
    assert result.stderr == "temperature: must be from 0 to 2, not 9.\n"
    assert result.returncode == 1
    assert server.bodies[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("typed", "answers", "said"),
    [
        ("hi\r\nhi", "Hello.\nHello.\n", ""),
        ('"""hi"""\n"""\r\nhi\r\n"""  \nhi\n', "Hello.\n" * 3, ""),
        ('hi\n"""hi\nhi\n', "Hello.\n", 'What begins with """ has to end with """.\n'),
        (
            "broken\n",
            "A beginning\n",
            "http://[0-9.:]+/v1 ended its answer too early.\n",
        ),
        # The text of an answer is data, what is said of it is not.
        ("evil\n", "\x1b[1mA\n", r"http://[0-9.:]+/v1: \[2Jno \.\n"),
    ],
)
def test_any_bytes_through_a_pipe_end_in_order(
    server: Server, typed: str, answers: str, said: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", "chat", "--url", server.url],
        input=typed.encode(),
        capture_output=True,
    )
    assert result.stdout.decode() == answers
    assert re.fullmatch(said, result.stderr.decode())
    assert result.returncode == (1 if said else 0)


@pytest.mark.parametrize("question", ["", "stuck\nhi\n"])
def test_ctrl_c_ends_a_pipe_at_once(server: Server, question: str) -> None:
    """While it waits for a line that may never come, and in an answer."""
    with subprocess.Popen(
        [sys.executable, "-m", "minisgl", "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"hi\n{question}")
        process.stdin.flush()
        before = "Hello.\n" + ("A beginning" if question else "")
        assert process.stdout.read(len(before)) == before
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130  # its input is still open
        assert process.stdout.read() == ("\n" if question else "")


def test_control_characters_of_a_model_are_not_printed_with_piped_input(server: Server) -> None:
    program = f"printf 'think\\n' | {sys.executable} -m minisgl chat --url {server.url}"
    child = pexpect.spawn("sh", ["-c", program], encoding="utf-8", timeout=None)
    child.expect(pexpect.EOF)
    assert "**Yes** [31m, `this`." in child.before


@pytest.fixture
def terminal(server: Server, tmp_path: Path) -> Iterator[pexpect.spawn]:
    """At the first prompt, in a terminal that does not tell where its cursor is."""
    environment = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(
        sys.executable,
        ["-m", "minisgl", "chat", "--url", server.url],
        env={**os.environ, **environment, "XDG_STATE_HOME": str(tmp_path)},
        encoding="utf-8",
        codec_errors="replace",
        dimensions=(30, 80),
        timeout=None,
    )
    child.expect("thinker · at http[^\n]*context 14 tokens")
    at_prompt(child)
    yield child
    child.close(force=True)


def test_a_chat_with_a_server_works_in_a_real_terminal(
    terminal: pexpect.spawn, server: Server, tmp_path: Path
) -> None:
    terminal.send("think\r")
    terminal.expect("Thought for ")
    terminal.expect(r"\x1b\[1mYes\x1b\[0m \[31m, \x1b\[36mthis\x1b\[0m")
    terminal.expect("5 tokens [^\n]* 9 prompt tokens · cut at the limit")
    terminal.expect("The context of 14 tokens is full. /undo or /reset makes room")
    at_prompt(terminal)
    terminal.send(CTRL_O)
    terminal.expect("Well, well.")

    terminal.send("/lora ot")
    terminal.expect("other")  # the menu
    terminal.send("\t\r")
    terminal.expect("other answers from now on")
    at_prompt(terminal)
    terminal.send("/lora off\r")
    terminal.expect("thinker answers from now on")
    at_prompt(terminal)

    terminal.send("/res")
    terminal.expect("forgets the conversation")  # the menu
    terminal.send("\t\r")
    terminal.expect("A new conversation")
    at_prompt(terminal)

    terminal.send("hi" + CTRL_J + "\x7f\r")  # a new line, and its removal
    terminal.expect("Hello.")
    at_prompt(terminal)
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["hi"]

    terminal.send("stuck\r")
    terminal.expect("A beginning")
    terminal.send(CTRL_C)
    terminal.expect("stopped")
    at_prompt(terminal)
    assert server.left.wait()
    terminal.send("half a question" + CTRL_C)  # drops it
    terminal.expect("Ctrl-C once more")
    at_prompt(terminal)
    terminal.send(CTRL_C)
    assert left(terminal) == 0

    history = tmp_path / "minisgl" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+stuck" in history.read_text()


def test_commands_work_in_a_real_terminal(
    terminal: pexpect.spawn, server: Server, tmp_path: Path
) -> None:
    terminal.send("/help\r")
    terminal.expect(r"\n/set NAME VALUE +sets a sampling parameter, such as temperature\r\n")
    terminal.expect(r"/params +lists")
    terminal.expect(r"Ctrl-O +shows")
    at_prompt(terminal)

    terminal.send("/system Be :cat:\r")
    terminal.expect("The system prompt is set")
    at_prompt(terminal)
    terminal.send("/system\r")
    terminal.expect_exact("\x1b[?2004lBe :cat:\r\n")
    at_prompt(terminal)
    terminal.send('/system """Be\rkind.\r"""\r')
    terminal.expect("The system prompt is set")
    at_prompt(terminal)
    terminal.send("/set tem")
    terminal.expect("temperature")  # the menu
    terminal.send("\t 0\r")
    terminal.expect(r"temperature is 0\.")
    at_prompt(terminal)

    terminal.send("hi\r")
    terminal.expect("Hello.")
    at_prompt(terminal)
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be\nkind."}
    assert server.bodies[0]["temperature"] == 0
    terminal.send(f"/save {tmp_path}/chat.json\r")
    terminal.expect("1 turn saved to")
    at_prompt(terminal)
    terminal.send("wrong\r")
    terminal.expect("Wrong API key")
    terminal.expect("/retry asks again")
    at_prompt(terminal)
    terminal.send("/retry\r")
    terminal.expect("Wrong API key")
    at_prompt(terminal)
    terminal.send(f"/load {tmp_path}/ch")
    terminal.expect("at.json")  # the menu
    terminal.send("\t\r")
    terminal.expect("1 turn loaded")
    terminal.expect("> hi")
    at_prompt(terminal)
    assert [message["content"] for message in server.bodies[2]["messages"]] == [
        *("Be\nkind.", "hi", "Hello.", "wrong"),
    ]
    terminal.send("/exit\r")
    assert left(terminal) == 0


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "clock")
]


def test_json_works_in_a_real_terminal(terminal: pexpect.spawn, server: Server) -> None:
    terminal.send("/js")
    terminal.expect("has answers follow a JSON schema")  # the menu
    terminal.send('\t {"type": "object"}\r')
    terminal.expect("Answers follow the schema; /json off ends it")
    at_prompt(terminal)
    terminal.send("structured\r")
    terminal.expect(r'"tags"[^\n]*\n')
    terminal.expect(r'"a b"[^\n]*\n[^\n]*1')
    at_prompt(terminal)
    terminal.send("/json off\r")
    terminal.expect("Answers are text")
    at_prompt(terminal)
    terminal.send("hi\r")
    terminal.expect("Hello.")
    at_prompt(terminal)
    form = {"name": "answer", "schema": {"type": "object"}}
    assert [body.get("response_format") for body in server.bodies] == [
        {"type": "json_schema", "json_schema": form},
        None,
    ]


def test_tools_work_in_a_real_terminal(
    terminal: pexpect.spawn, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    terminal.send(f"/tools {tmp_path}/to")
    terminal.expect("ols.json")  # the menu
    terminal.send("\t\r")
    terminal.expect("Offered: weather, clock")
    at_prompt(terminal)
    terminal.send("weather\r")
    terminal.expect("Type the result of weather")
    at_prompt(terminal)
    terminal.send("18 degrees\r")
    terminal.expect("Type the result of clock")
    at_prompt(terminal)
    terminal.send("noon\r")
    terminal.expect("It is mild at noon")
    at_prompt(terminal)
    assert server.bodies[-1]["tools"] == TOOLS
    assert [message["role"] for message in server.bodies[-1]["messages"]] == [
        *("user", "assistant", "tool", "tool"),
    ]
    terminal.send("/tools off\r")
    terminal.expect("No tools are offered")
    at_prompt(terminal)
    terminal.send("hi\r")
    terminal.expect("Hello.")
    assert "tools" not in server.bodies[-1]


def test_tools_and_schemas_work_in_a_pipe(server: Server, tmp_path: Path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps(TOOLS))
    offered = (f"/tools {tools}", "weather", "18 degrees", "noon", "cut", "/tools off")
    result = piped(server, *offered, f"/save {saved}", "/json {}", "structured")
    assert result.stdout == (
        'weather({"city": "Köln"})\nclock({})\nIt is mild at noon.\nweather({"ci\n'
        '{\n  "name": "Ada",\n  "tags": [\n    "a b",\n    1\n  ],\n  "none": {}\n}\n'
    )
    assert result.stderr == "The answer ended inside of a tool call, which is left out.\n"
    assert result.returncode == 1  # as an answer was cut
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in [("weather", '{"city": "Köln"}')]
    ]
    calls += [
        {"id": "call_b", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    ]
    steps = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "call_a", "content": "18 degrees"},
        {"role": "tool", "tool_call_id": "call_b", "content": "noon"},
    ]
    assert server.bodies[1]["messages"] == steps
    answer = {"role": "assistant", "content": "It is mild at noon."}
    cut = {"role": "user", "content": "cut"}
    assert json.loads(saved.read_text())["messages"] == [*steps, answer, cut]


def test_ctrl_d_exits(terminal: pexpect.spawn) -> None:
    terminal.send(CTRL_D)
    assert left(terminal) == 0
