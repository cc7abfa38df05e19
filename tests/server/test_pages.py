"""The pages as files over HTTP: encodings, policy, without a key; and the lines at the start."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.http_server import http_client, serving_process, wait_for_health

from minisgl.errors import ConfigError
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.pages import ASSETS, CHAT, DOCS, Page

PAGES = {"/": Page.read(CHAT).plain.decode(), "/docs": Page.read(DOCS).plain.decode()}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_served_to_everybody_gzipped_or_plain(path: str) -> None:
    content = PAGES[path].encode()
    async with http_client(FakeEngine(), api_key=("secret",)) as client:
        plain = await client.get(path, headers={"accept-encoding": "identity"})
        packed = await client.get(path, headers={"accept-encoding": "br, gzip"})
        refused = await client.get(path, headers={"accept-encoding": "gzip;q=0"})
        head = await client.head(path)
    assert plain.content == packed.content == refused.content == content
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(gzip.compress(content)) + 64
    assert "content-encoding" not in {**plain.headers, **refused.headers}
    assert head.status_code == 200
    assert head.content == b""
    for answer in (plain, packed, head):
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["vary"] == "accept-encoding"


@pytest.mark.parametrize("path", PAGES)
async def test_a_browser_that_has_the_page_gets_a_304(path: str) -> None:
    async with http_client(FakeEngine()) as client:
        etag = (await client.get(path)).headers["etag"]
        for tags in (etag, f'"other", {etag}', etag.removeprefix("W/"), "*"):
            answer = await client.get(path, headers={"if-none-match": tags})
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == etag
        assert (await client.get(path, headers={"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize("path", PAGES)
async def test_the_policy_allows_the_page_its_own_script_and_style_and_nothing_else(
    path: str,
) -> None:
    page = PAGES[path]
    async with http_client(FakeEngine()) as client:
        policy = (await client.get(path)).headers["content-security-policy"]
    allowed = dict(directive.split(" ", 1) for directive in policy.split("; "))
    for tag in ("script", "style"):
        sources = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [b64encode(hashlib.sha256(source.encode()).digest()) for source in sources]
        assert allowed[f"{tag}-src"] == " ".join(f"'sha256-{each.decode()}'" for each in digests)
        assert not re.search(rf"<{tag} |<link rel=.stylesheet", page)  # each is in its place
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert "*" not in policy


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_small_and_takes_nothing_from_outside(path: str) -> None:
    page = PAGES[path]
    assert len(gzip.compress(page.encode())) < (96 if "temml" in page else 24) * 1024
    # Only the namespace of its own drawings.
    assert set(re.findall(r"https?://[\w.]+\w", page)) <= {"http://www.w3.org"}
    assert not re.search(r'\son\w+="|innerHTML|insertAdjacentHTML|document\.write|eval\(', page)


def test_each_file_of_the_pages_belongs_to_one_of_them_and_ends_no_element_early() -> None:
    """The licence of Temml, too: whoever gets a copy gets it."""
    for file in (*(ASSETS / "page").iterdir(), *(ASSETS / "temml").iterdir()):
        content = file.read_text()
        assert any(content in page for page in PAGES.values()), file
        assert not re.search("</(script|style)", content), file


async def test_without_the_pages_there_is_a_plain_answer_at_the_root() -> None:
    async with http_client(FakeEngine(), no_ui=True, api_key=("secret",)) as client:
        answer = await client.get("/")
        assert answer.status_code == (await client.head("/")).status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert "/v1" in answer.text
        client.headers["authorization"] = "Bearer secret"
        assert (await client.get("/docs")).status_code == 404


async def test_the_pages_are_not_part_of_the_described_interface() -> None:
    async with http_client(FakeEngine()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert not {"/", "/docs"} & paths.keys()


# -- the start ------------------------------------------------------------------------------------


def said_by(process: subprocess.Popen[str], until: str) -> dict[str, str]:
    """The lines of its log up to the one that begins with `until` and a colon."""
    assert process.stderr is not None
    lines: dict[str, str] = {}
    for line in process.stderr:
        start, _, rest = line.strip().partition(": " if ": " in line else ":")
        lines[start] = rest
        if start == until:
            return lines
    raise AssertionError(f"the process ended; it said {lines}")


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_the_commands_that_the_server_prints_work(keys: tuple[str, ...]) -> None:
    """Of curl only the request is made here, because not every machine has it."""
    with serving_process({"answer_length": 3}, api_key=keys) as (process, url):
        lines = said_by(process, until="Try it")
        page = lines["Talk to it in a browser"]
        assert page == f"{url}/"
        assert "<title>minisgl</title>" in httpx.get(page).text
        environment = {**os.environ, "MINISGL_API_KEY": "".join(keys)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        answer = subprocess.run(
            ["bash", "-c", lines["Or with the openai package"]],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert answer.stdout == "abc\n", answer.stderr
        words = shlex.split(lines["Try it"])
        headers = dict(
            words[index + 1].replace("$MINISGL_API_KEY", "".join(keys)).split(": ")
            for index, word in enumerate(words)
            if word == "-H"
        )
        asked = json.loads(words[words.index("-d") + 1])
        assert httpx.post(words[1], headers=headers, json=asked).status_code == 200


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_the_commands_for_vectors_and_scores_work(task: str) -> None:
    with serving_process({"task": task}) as (process, url):
        lines = said_by(process, until="Try it")
        assert lines["See it at work in a browser"] == f"{url}/"
        words = shlex.split(lines["Try it"])
        asked = json.loads(words[words.index("-d") + 1])
        assert httpx.post(words[1], json=asked).status_code == 200
        command = lines.get("Or with the openai package")
        assert (command is None) == (task == "rerank")
        if command is not None:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            answer = subprocess.run(
                ["bash", "-c", command],
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert answer.stdout == "[2.0, -0.5]\n", answer.stderr


def test_a_server_on_all_addresses_names_one_that_a_browser_can_go_to() -> None:
    with serving_process({}, host="0.0.0.0") as (process, url):
        lines = said_by(process, until="Try it")
        assert lines["Talk to it in a browser"] == f"{url}/"


def test_the_option_open_opens_the_page_while_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    endless = {"loads_until": str(tmp_path / "never")}
    with serving_process(endless, open=True) as (process, url):
        while not opened.exists():
            assert process.poll() is None
        assert opened.read_text() == f"{url}/\n"
        assert httpx.get(url).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 503


def test_where_no_browser_can_be_opened_the_log_says_where_the_page_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BROWSER", "/nowhere/program %s")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with serving_process({}, open=True) as (process, url):
        start = "No browser could be opened; the page is at http"
        assert said_by(process, until=start)[start] == f"{url}/".partition(":")[2]
        wait_for_health(process, url, 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"open": True, "no_ui": True}, "--open: .*cannot be combined with --no-ui"),
        ({"open": True, "uds": "/tmp/socket"}, "--open: .*cannot be combined with --uds"),
    ],
)
def test_the_option_open_is_refused_where_there_is_no_page_to_open(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)  # type: ignore[arg-type]


async def test_a_server_that_loads_says_how_far_it_is() -> None:
    state = EngineState(ServerConfig())
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        state.load("reading weights", 0.4321)
        health = await client.get("/health")
        metrics = (await client.get("/metrics")).text
        assert 'minisgl_loading_ratio{phase="reading weights"} 0.4321' in metrics
        state.load("reading weights", 0.0)  # how much of it is unknown
        unknown = await client.get("/health")
        state.start(FakeEngine())  # type: ignore[arg-type]
        assert "minisgl_loading_ratio" not in (await client.get("/metrics")).text
    assert (
        health.json()["error"]["message"] == "The model is still loading (reading weights, 43 %)."
    )
    assert unknown.json()["error"]["message"] == "The model is still loading (reading weights)."
