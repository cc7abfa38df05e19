"""The HTTP client of chat and benchmark against hostile, broken and redirecting servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.raw_server import HEAD, again, raw_server, redirect

from minisgl.bench.config import BenchConfig, ReportConfig
from minisgl.bench.online.client import post
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.online.metrics_poller import poll_metrics
from minisgl.bench.online.run import OnlineRunError, run_online
from minisgl.bench.online.target import Endpoint
from minisgl.bench.serve import bench_serve
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.client import exchange
from minisgl.client.address import Address
from minisgl.client.connection import HEAD_BYTES
from minisgl.client.errors import AnswerError, Refusal, ServerError
from minisgl.client.exchange import EVENT_BYTES, MEMORY_BYTES, EventCutter, get
from minisgl.client.models import list_models
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.printable import printable
from minisgl_cli.chat.config import ChatConfig
from minisgl_cli.chat.model import ReplyDelta
from minisgl_cli.chat.server_model import ServerModel

KEY = "sk-0123456789"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\r\b"
MODELS = HEAD + b'{"data": [{"id": "m"}]}'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEVER_S = 60  # long before which everything here has ended


def answered(text: str) -> bytes:
    choice = {"delta": {"content": text}, "text": text, "finish_reason": "stop"}
    return HEAD + b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [choice]}).encode()


def refusing(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def chat(url: str, *, key: str = "", timeout_s: float = NEVER_S) -> list[ReplyDelta]:
    model = await ServerModel.connect(url, key, timeout_s=timeout_s)
    async with aclosing(model.reply([{"role": "user", "content": "hi"}], {})) as deltas:
        return [delta async for delta in deltas]


async def bench(url: str, **load: Any) -> None:
    json_file = load.pop("json_file", None)
    await bench_serve(
        EngineConfig(),
        BenchConfig(num_requests=2, repeat=1, json_file=json_file),
        WorkloadConfig(input_len=3, output_len=2),
        LoadConfig(url=url, **load),
        ReportConfig(),
    )


# -- redirects and keys ---------------------------------------------------------------------------


async def test_a_redirect_to_another_origin_is_reported_and_not_followed() -> None:
    async with raw_server({"": MODELS}) as other:
        place = f"{other.url}/v1/models?token=x"
        async with raw_server({"": redirect(place)}) as server:
            for ask in (bench(server.url, api_key=KEY), chat(server.url, key=KEY)):
                with pytest.raises(ServerError) as failed:
                    await ask
                said = f"redirects to {other.url}/v1/models, which is not followed"
                assert said in str(failed.value)
    assert server.heads and not other.heads


async def test_a_redirect_of_a_post_is_reported_and_not_followed() -> None:
    async with raw_server({"": answered("hi")}) as other:
        answers = {"/v1/models": MODELS, "": redirect(f"{other.url}/v1")}
        async with raw_server({**answers}) as server:
            for ask in (bench(server.url, api_key=KEY), chat(server.url, key=KEY)):
                with pytest.raises((OnlineRunError, ServerError), match="redirects to http"):
                    await ask
    assert not other.heads


@pytest.mark.parametrize("place", ["/v1/list", "list"])
async def test_a_redirect_within_the_origin_is_followed_with_the_key(place: str) -> None:
    async with raw_server({"/v1/models": redirect(place), "/v1/list": MODELS}) as server:
        [model] = await list_models(f"{server.url}/v1", KEY)
    assert model.id == "m"
    assert all(f"authorization: Bearer {KEY}\r\n" in head for head in server.heads)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/v1/models", "redirects more than 3 times"),
        ("https://127.0.0.1/", "redirects to https://127.0.0.1/, which is not followed"),
        ("http://127.0.0.1@evil.example/x", "redirects to http://evil.example/x,"),
        ("//evil.example", "redirects to http://evil.example/,"),
        ("http://[", "redirects to what is no address,"),
        ("file:///etc/passwd", "redirects to what is no address,"),
    ],
)
async def test_invalid_and_endless_redirects_are_errors(place: str, said: str) -> None:
    async with raw_server({"": redirect(place)}) as server:
        with pytest.raises(ServerError) as failed:
            await list_models(f"{server.url}/v1", KEY)
    assert said in str(failed.value)


@pytest.mark.parametrize("config", [ChatConfig, LoadConfig])
def test_a_key_comes_from_an_option_a_file_or_the_environment(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("of-file\n")
    url = "http://host"
    monkeypatch.delenv("MINISGL_API_KEY", raising=False)
    assert config(url=url).find_key() == ""
    monkeypatch.setenv("MINISGL_API_KEY", "of-environment")
    assert config(url=url).find_key() == "of-environment"
    assert config(url=url, api_key_file=str(file)).find_key() == "of-file"
    assert config(url=url, api_key="of-option").find_key() == "of-option"
    with pytest.raises(ConfigError, match=r"--api-key-file .* one of the two"):
        config(url=url, api_key="a", api_key_file=str(file))
    file.write_text("# of a server that has several\nfirst\nsecond\n")
    assert config(url=url, api_key_file=str(file)).find_key() == "first"
    for content in ("", "secret secret", "s\u00e9cret", "secret" * 2000):
        file.write_text(content)
        with pytest.raises(ConfigError, match="--api-key-file") as refused:
            config(url=url, api_key_file=str(file)).find_key()
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"--api-key-file .*none: No such file"):
        config(url=url, api_key_file=str(tmp_path / "none")).find_key()
    monkeypatch.setenv("MINISGL_API_KEY", "first, second")
    assert config(url=url).find_key() == "first"
    monkeypatch.setenv("MINISGL_API_KEY", "s\u00e9cret")
    with pytest.raises(ConfigError, match=r"^MINISGL_API_KEY \(not shown\): allowed"):
        config(url=url).find_key()


@pytest.mark.parametrize("config", [ChatConfig, LoadConfig])
@pytest.mark.parametrize(
    "url", ["http://u:secret@host", "http://secret@host", "http://host?k=secret", "x?secret"]
)
def test_an_address_with_a_secret_is_refused_and_not_shown(config: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url \(not shown\): allowed: an address"):
        config(url=url)


async def test_the_key_of_the_environment_is_sent_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_API_KEY", KEY)
    report = tmp_path / "a.json"
    refusal = refusing(403, f"Not with {KEY}.")
    turns = iter([answered("hi"), refusal])

    async def take_turns(writer: asyncio.StreamWriter) -> None:
        writer.write(next(turns))

    answers = {"/v1/models": MODELS, "/metrics": HEAD, CHAT: refusal, "": take_turns}
    async with raw_server({**answers}) as server:
        await bench(server.url, json_file=str(report))
        with pytest.raises(ServerError, match=r"403: Not with \(your key\)\."):
            await chat(server.url, key=KEY)
    assert all(f"Bearer {KEY}\r\n" in head for head in server.heads if "/v1/" in head)
    printed = capsys.readouterr().out
    assert "1 failed: 403: Not with (your key)." in printed
    assert KEY not in printed + report.read_text()


async def test_the_chat_takes_the_key_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    async with raw_server({"/v1/models": MODELS, "": answered("Hello.")}) as server:
        for options, variable in (((), KEY), (("--api-key-file", str(file)), "other")):
            server.heads.clear()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "minisgl", "chat", "--url", server.url, *options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "MINISGL_API_KEY": variable},
            )
            out, _ = await process.communicate(b"hi\n")
            assert out == b"Hello.\n"
            assert len(server.heads) == 2
            assert all(f"Bearer {KEY}\r\n" in head for head in server.heads)


# -- limits of time and size ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (again(b"", pause_s=0.05), "does not end its answer within 60 s"),
        (again(b"x", pause_s=0.05), "does not end its answer within 60 s"),
        (again(b"data: {}\n\n", pause_s=0.05), "does not end its answer within 60 s"),
        (again(b"", head=b"HTTP/1.1 200", pause_s=0.05), "does not end its answer within 60 s"),
        (again(b"x: y\r\n" * 99, head=b"HTTP/1.1 200 OK\r\n"), "sends headers of more than 64 KiB"),
        (again(b"y" * 999, head=b"HTTP/1.1 200 OK\r\nx: "), "sends headers of more than 64 KiB"),
        (again(b"HTTP/1.1 100 Continue\r\n\r\n", head=b""), "sends headers of more than 64 KiB"),
    ],
)
async def test_endless_answers_are_ended(
    answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, num_late_s = asyncio.get_running_loop(), 0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + num_late_s)

    async def late(writer: asyncio.StreamWriter) -> None:
        """An answer that the client waits for, when its time is over."""
        nonlocal num_late_s
        answering = asyncio.ensure_future(answer(writer))
        for _ in range(20):
            await asyncio.sleep(0)
        num_late_s += NEVER_S
        await answering

    sent = late if "within" in said else answer
    async with raw_server({"": sent}) as server:
        for url in (server.url, f"{server.url}/v1/metrics"):
            with pytest.raises(ServerError, match=said):
                await get(url, {}, NEVER_S)
    async with raw_server({"/v1/models": MODELS, "": sent}) as server:
        with pytest.raises(ServerError, match=said):
            await chat(server.url)


@pytest.mark.parametrize("piece", [b"x" * 9999, b"x\n\n" * 999, b"\r\n" * 4999])
async def test_answers_above_the_size_limit_are_refused(
    piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "DOCUMENT_BYTES", 1 << 20)
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for answer in (again(piece), again(chunk, head=chunked)):
        async with raw_server({"": answer}) as server:
            with pytest.raises(ServerError, match="sends an answer of more than 1,048,576 bytes"):
                await get(server.url, {}, NEVER_S)
            run = await run_online(Endpoint(url=f"{server.url}/v1"), schedule(1))
    [failure] = run.failures
    assert failure.startswith("the server sends an answer of more than 1,0")


def schedule(count: int) -> list[ScheduledRequest]:
    return [ScheduledRequest(prompt=[1, 2], max_tokens=3, seed=0) for _ in range(count)]


async def test_a_large_chunk_counts_as_a_whole_towards_the_limit() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n"
    async with raw_server({"": again(b"x" * 9999, head=chunked)}) as server:
        run = await run_online(Endpoint(url=f"{server.url}/v1"), schedule(1))
    assert next(iter(run.failures)).startswith("the server sends an answer of more than")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcdefgh\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 9999,
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabcdefgh\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_answers_that_are_not_http_are_reported(answer: bytes) -> None:
    async def wait(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await asyncio.sleep(NEVER_S)

    async with raw_server({"": wait}) as server:
        with pytest.raises(ServerError, match=r"does not answer in HTTP\.$"):
            await get(server.url, {}, NEVER_S)
        with pytest.raises(AnswerError, match="does not answer in HTTP"):
            await post(Address.of(server.url), b"{}")


def test_event_sizes_are_limited_including_their_overhead() -> None:
    cutter = EventCutter(1 << 40)
    with pytest.raises(AnswerError, match="an event of more than 4 MiB"):
        for _ in range(2 + EVENT_BYTES // 100_000):
            cutter.cut(b"x" * 100_000)
    cutter = EventCutter(10 * (3 + MEMORY_BYTES))
    assert len(cutter.cut(b"x\n\n" * 10)) == 10
    with pytest.raises(AnswerError, match="an answer of more than"):
        cutter.cut(b"x")


def test_an_event_in_many_pieces_is_parsed_in_linear_time() -> None:
    cutter = EventCutter(1 << 40)
    piece = b"x" * 40
    assert not any(cutter.cut(piece) for _ in range(EVENT_BYTES // 50))
    assert cutter.cut(b"\n") == []
    assert cutter.cut(b"\nrest") == [piece * (EVENT_BYTES // 50)]
    assert cutter.rest == b"rest"


async def test_an_endless_answer_can_be_cancelled() -> None:
    """However fast it comes, there is time to notice."""
    events = answered("a").removeprefix(HEAD).partition(b"data: [DONE]")[0] * 999
    asked = asyncio.Event()

    async def flood(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await again(events)(writer)

    async with raw_server({"/v1/models": MODELS, "": flood}) as server:
        asking = asyncio.ensure_future(chat(server.url))
        await asked.wait()
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking], timeout=NEVER_S)
        assert asking.cancelled()


async def test_endless_metrics_are_treated_as_absent() -> None:
    samples = b"minisgl_step_seconds_count nan\nminisgl_graph_steps_total 1e999\n"
    for metrics in (again(b"x", pause_s=0.05), HEAD + samples, redirect("http://evil.example")):
        async with raw_server({"/metrics": metrics}) as server:
            target = Endpoint(url=f"{server.url}/v1", document_s=0.3)
            async with poll_metrics(target, interval_s=0.01) as polled:
                await asyncio.sleep(0.05)
        assert (polled.samples, polled.counts) == ([], None)


async def test_ctrl_c_ends_a_benchmark_that_waits_for_metrics() -> None:
    asked = asyncio.Event()

    async def drip(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await again(b"x", pause_s=0.05)(writer)

    program = (
        "import sys\n"
        f"sys.argv = ['minisgl', *{BENCH!r}, '--url', sys.argv[1]]\n"
        "from minisgl.client import exchange\n"
        f"exchange.DOCUMENT_S = {NEVER_S}\n"
        "from minisgl_cli.main import main\n"
        "sys.exit(main())"
    )
    async with raw_server({"/v1/models": MODELS, "/metrics": drip}) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, server.url), stdout=subprocess.DEVNULL
        )
        await asyncio.wait_for(asked.wait(), NEVER_S)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), NEVER_S / 2) == 130


BENCH = ("bench", "serve", "--num-requests", "1", "--input-len", "3", "--output-len", "2")


def test_ctrl_c_ends_a_name_lookup() -> None:
    program = (
        "import socket, sys, threading\n"
        "def ask(*_, **__):\n"
        "    print('asked', flush=True)\n"
        "    threading.Event().wait()\n"
        "socket.getaddrinfo = ask\n"
        "sys.argv = ['minisgl', 'chat', '--url', 'http://host.invalid']\n"
        "from minisgl_cli.main import main\n"
        "sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


# -- what reaches a terminal ----------------------------------------------------------------------


def test_printable_removes_control_and_escape_characters() -> None:
    everything = "".join(map(chr, range(0x3000)))
    left = printable(everything)
    assert {"\n", "\t", "\xa0", "\u200d", "\u200f", "é"} <= set(left)
    assert not {character for character in ESCAPES if not character.isprintable()} & set(left)
    assert len(everything) - len(left) == 30 + 1 + 32 + 5 + 4
    assert printable("a\ud800b") == "ab"


async def test_a_benchmark_prints_no_escape_sequences_of_a_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    models = HEAD + json.dumps({"data": [{"id": f"m{ESCAPES}!"}]}).encode()
    turns = iter([answered("hi"), refusing(500, f"out{ESCAPES} of luck")])

    async def take_turns(writer: asyncio.StreamWriter) -> None:
        writer.write(next(turns))

    async with raw_server({"/v1/models": models, "/metrics": HEAD, "": take_turns}) as server:
        await bench(server.url, json_file=str(tmp_path / "a.json"))
    printed = capsys.readouterr().out
    assert "1 failed: 500: out]0;owned[2J31m of luck" in printed
    assert "m]0;owned" in printed
    assert printable(printed) == printed
    assert json.loads((tmp_path / "a.json").read_text())["model"] == f"m{ESCAPES}!"  # is data


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
async def test_no_server_error_prints_escape_sequences(level: str) -> None:
    """One at the start, from which the chat does not go on."""
    async with raw_server({"": refusing(500, f"evil{ESCAPES} words")}) as server:
        out = await asyncio.to_thread(
            pexpect.run,
            f"{sys.executable} -m minisgl chat --url {server.url}",
            env={**os.environ, "LOG_LEVEL": level, "TERM": "dumb"},
            timeout=NEVER_S,
        )
    text = out.decode().replace("\r\n", "\n").removeprefix("\x1b[?12l\x1b[?25h")  # of "Connecting"
    assert "answers 500: evil]0;owned[2J31m words" in text
    assert printable(text) == text


def test_server_messages_are_shortened_to_one_line() -> None:
    said = Refusal.read(json.dumps({"detail": "x \n" * 10**5 + ESCAPES}).encode(), "").message
    assert len(said) == 300 and set(said) == {"x", " "}
    assert Refusal.read(b'{"error": {"code": 7}}', "").message == '{"error": {"code": 7}}'


def test_addresses_are_normalized_for_requests() -> None:
    assert Address.of("http://[::1]:80/a?b") == Address("http", "::1", 80, "/a?b")
    assert Address.of("https://bücher.example").authority == "xn--bcher-kva.example"
    assert Address("http", "::1", 8000, "/").authority == "[::1]:8000"
    assert HEAD_BYTES == 64 << 10
