"""The server as a process: start, probes, log, signals, draining, and the end of its children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.folders import SUPPORT
from support.forked_programs import forked_session, minisgl
from support.http_server import (
    FAKE_SERVER,
    HELLO,
    error_of,
    running,
    serve,
    serving_process,
    session,
    tiny_model,
    wait_for_health,
)
from support.processes import check_running
from support.waiting import LIMIT_S

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig
from minisgl.server.process import bind

__all__ = ["tiny_model"]  # a fixture

SCRIPTED_SERVER = SUPPORT / "scripted_server.py"
CHAT = "/v1/chat/completions"
ORIGIN = "https://example.org"
ENDLESS = {"messages": HELLO, "ignore_eos": True}


def test_the_process_parses_http_with_httptools() -> None:
    """httptools, unlike h11, refuses unknown methods."""
    with serving_process({}) as (process, url):
        wait_for_health(process, url, 200)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"BREW /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Invalid HTTP request received." in answer


def test_a_process_logs_running_requests_every_few_seconds(tmp_path: Path) -> None:
    with serving_process({"ends_after": str(tmp_path / "never")}) as (process, url):
        wait_for_health(process, url, 200)
        asked = {"messages": HELLO, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=asked) as stream:
            lines = stream.iter_lines()  # once that is gone, the client has left
            next(lines)
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("running: "))
    # The engine has no CUDA graphs, of which another line would tell.
    told = "running: 1, queued: 0, token usage: 0.00, cache hit rate: -, generation: "
    assert line.startswith(told)


def test_a_process_has_probes_metrics_a_key_cors_and_a_readable_log(
    tiny_model: Path, port: int
) -> None:
    url = f"http://127.0.0.1:{port}"
    command = serve(tiny_model, port, "--api-key", "secret", "--cors-origin", ORIGIN)
    with (
        forked_session(*command) as process,
        httpx.Client(base_url=url) as client,
    ):
        wait_for_health(process, url, 503)
        loading = client.get("/metrics")
        assert loading.status_code == 200
        assert "minisgl_info{" in loading.text
        wait_for_health(process, url, 200)
        assert client.get("/version").json()["version"]
        assert error_of(client.post(CHAT, json={"messages": HELLO}))["code"] == "invalid_api_key"
        key = {"authorization": "Bearer secret", "origin": ORIGIN}
        asked = {**ENDLESS, "max_tokens": 20}
        answer = client.post(CHAT, json=asked, headers=key)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        metrics = client.get("/metrics").text.splitlines()
        while not client.get("/metrics/history").json()["replicas"][""]["slots"]:
            check_running(process)  # the process keeps it
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    num_prompt = answer.json()["usage"]["prompt_tokens"]
    for line in (
        f"minisgl_prompt_tokens_total {num_prompt}.0",
        "minisgl_generated_tokens_total 20.0",
        'minisgl_requests_finished_total{reason="length"} 1.0',
        f'minisgl_http_responses_total{{route="{CHAT}",status="200"}} 1.0',
        "minisgl_inter_token_seconds_count 19.0",
    ):
        assert line in metrics
    # A line for each request but the probes: with a date, and for the refusal with path and client.
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"
    lines = [line for line in log.splitlines() if " request " in line]
    assert all(re.match(rf"{date} INFO request \w+: \w+ /v1/", line) for line in lines)
    [line] = [line for line in lines if " 401 " in line]
    assert re.search(r": \w+ /v1/\S+ 401 in \S+ s client=127\.0\.0\.1: invalid_api_key$", line)
    [line] = [line for line in lines if f"POST {CHAT} 200 " in line]
    assert f" prompt_tokens={num_prompt} cached_tokens=0 output_tokens=20 queue_s=" in line


# -- the end of the engine and of the process -----------------------------------------------------


def members(session: int) -> set[int]:
    """The processes of a session; orphans stay in it."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_session) == session and state != "Z":
                found.add(int(stat.parent.name))
    return found


def wait_for_nobody(session: int) -> None:
    while members(session):
        time.sleep(0.02)


async def test_a_dead_engine_fails_requests_health_and_process(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    with session(str(SCRIPTED_SERVER), "4", json.dumps({"port": port})) as process:
        await asyncio.to_thread(wait_for_health, process, url, 200)
        async with httpx.AsyncClient(base_url=url) as client:

            async def ask(stream: bool) -> httpx.Response:
                return await client.post(CHAT, json={**ENDLESS, "stream": stream})

            # Two run and two wait when the device dies.
            answers = await asyncio.gather(*map(ask, (True, False, True, False)))
            with contextlib.suppress(httpx.TransportError):  # or nobody listens any more
                assert (await client.get("/health")).status_code == 503
        for answer in answers[::2]:
            assert answer.status_code == 200
            *_, error, done = [line for line in answer.text.splitlines() if line]
            assert done == "data: [DONE]"
            body = json.loads(error.removeprefix("data: "))["error"]
            assert (body["type"], body["message"]) == ("service_unavailable", "The device is gone.")
        for answer in answers[1::2]:
            assert answer.status_code == 503
            assert error_of(answer)["message"] == "The device is gone."
        _, log = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 1
        assert "The device is gone." in log
        wait_for_nobody(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_process_outlives_the_server(
    tiny_model: Path, port: int, number: signal.Signals
) -> None:
    url = f"http://127.0.0.1:{port}"
    with forked_session(*serve(tiny_model, port, "--drain-timeout", "0")) as process:
        wait_for_health(process, url, 200)
        asked = {**ENDLESS, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=asked) as stream:
            lines = stream.iter_lines()  # once that is gone, the client has left
            next(lines)
            assert process.pid in members(process.pid)
            process.send_signal(number)
            process.communicate(timeout=LIMIT_S)
        assert process.returncode == (-number if number == signal.SIGKILL else 0)
        wait_for_nobody(process.pid)


def test_a_server_that_cannot_start_leaves_no_process() -> None:
    arguments = (json.dumps({"load_error": "no such weights"}), json.dumps({"port": 0}))
    with session(str(FAKE_SERVER), *arguments) as process:
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        wait_for_nobody(process.pid)


# -- start, signals and draining -------------------------------------------------------------------


def stream_lines(url: str) -> Iterator[str]:
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={"messages": HELLO, "stream": True}
    ) as response:
        yield from (line for line in response.iter_lines() if line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_idle_process_exits_at_once_with_0(tmp_path: Path, number: signal.Signals) -> None:
    loaded = tmp_path / "loaded"
    with serving_process({"loads_until": str(loaded), "adapters": ["sql"]}) as (process, url):
        wait_for_health(process, url, 503)
        loaded.touch()
        wait_for_health(process, url, 200)
        process.send_signal(number)
        _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"Serving fake, sql at {url}" in log
    assert f"curl {url}/v1/chat/completions" in log
    assert "Traceback" not in log


def test_a_process_drains_before_it_exits(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with serving_process({"answer_length": 100, "ends_after": str(end)}) as (process, url):
        wait_for_health(process, url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_for_health(process, url, 503)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        end.touch()
        assert [*lines][-1] == "data: [DONE]"
        assert process.wait() == 0


def test_requests_beyond_the_drain_timeout_end_with_an_error_event(tmp_path: Path) -> None:
    endless = {"ends_after": str(tmp_path / "never")}
    with serving_process(endless, drain_timeout=0.3) as (process, url):
        wait_for_health(process, url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, done = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "service_unavailable"
        assert process.wait() == 0


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    with serving_process({"ends_after": str(tmp_path / "never")}) as (process, url):
        wait_for_health(process, url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGINT)
        wait_for_health(process, url, 503)
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_a_signal_while_loading_exits_at_once(tmp_path: Path) -> None:
    with serving_process({"loads_until": str(tmp_path / "never")}) as (process, url):
        wait_for_health(process, url, 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_dead_engine_ends_the_streams_and_the_process() -> None:
    with serving_process({"interval": 0.02, "dies_at": 10}) as (process, url):
        wait_for_health(process, url, 200)
        *_, error, done = stream_lines(url)
        assert done == "data: [DONE]"
        assert "the device is gone" in error
        assert process.wait() == 1


def test_a_failed_load_ends_the_process() -> None:
    with serving_process({"load_error": "no such weights"}) as (process, _):
        _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert log.strip().endswith("no such weights")


def test_an_unavailable_address_is_an_error_that_names_the_option() -> None:
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind(ServerConfig(port=port))
        assert caught.value.param == "--port"
        assert str(port) in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        bind(ServerConfig(host="no.such.host.invalid"))
    assert caught.value.param == "--host"


# -- the command and the real engine --------------------------------------------------------------


def test_minisgl_serve_serves_a_model(
    tiny_model: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{port}"
    options = ("--api-key", "secret", "--served-model-name", "tiny", "--served-model-name", "t")
    monkeypatch.setenv("MINISGL_API_KEY", "secret-2, secret-3")
    (tmp_path / "keys").write_text("# of the team\nsecret-4\n")
    options += ("--api-key", "secret-5", "--api-key-file", str(tmp_path / "keys"))
    with running(*serve(tiny_model, port, *options)) as process:
        wait_for_health(process, url, 200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            check_answers(client)
        for key, status in (*((f"secret-{n}", 200) for n in range(2, 6)), ("#", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"Serving tiny, t at {url}" in log
    assert '-H "Authorization: Bearer $MINISGL_API_KEY"' in log
    assert "secret" not in log
    assert "Traceback" not in log


def check_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "n": 2,
        "seed": 5,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("user: hello\n")
    assert whole.usage.completion_tokens == 60
    texts = [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or []) == 30

    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts

    prompt = "a prompt that is longer than a page " * 3
    for cached in (0, 96):
        echo = client.completions.create(
            model="t", prompt=prompt, echo=True, max_tokens=3, temperature=0
        )
        assert echo.choices[0].text.startswith(prompt)
        assert echo.usage is not None
        assert echo.usage.prompt_tokens_details is not None
        assert echo.usage.prompt_tokens_details.cached_tokens == cached

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="t", messages=HELLO, max_tokens=501)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="t", prompt=[257])
    assert caught.value.param == "prompt"
    with client.chat.completions.create(model="t", messages=HELLO, stream=True) as stream:
        next(iter(stream))


def test_a_process_without_standard_streams_shuts_down_cleanly(port: int) -> None:
    """Its sockets would get their numbers, and libuv aborts where it closes one of those."""
    behind = (
        "import fake_engine, sys; from minisgl_cli import main as cli; "
        "cli.app = lambda *_, **__: fake_engine.main(); sys.exit(cli.main())"
    )
    arguments = [sys.executable, "-c", behind, "{}", json.dumps({"port": port})]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *arguments], cwd=SUPPORT
    )
    try:
        wait_for_health(process, f"http://127.0.0.1:{port}", 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def test_minisgl_serve_reports_startup_errors_in_one_line(tmp_path: Path) -> None:
    with bind(ServerConfig(port=0)) as listener:
        taken_port = listener.getsockname()[1]
        taken = minisgl(*serve(tmp_path, taken_port)[2:])
    missing = minisgl(*serve(tmp_path / "missing", 0)[2:])
    for ended, word in ((taken, "--port"), (missing, "missing")):
        assert ended.returncode == 2
        assert word in ended.stderr
        log = ended.stderr.splitlines()
        assert len([line for line in log if " INFO " not in line]) == 1
