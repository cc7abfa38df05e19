"""Addresses, sockets, TLS, host names and URL prefixes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.http_server import FAKE_SERVER, HELLO, error_of, running, session, wait_for_health
from support.processes import check_running
from support.quick_server import QuickServer
from support.tls import CERTIFICATE, KEY, LOCKED_KEY, OTHER_KEY
from support.waiting import LIMIT_S

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.hosts import Hosts, hosts_of
from minisgl.server.process import ServerProcess, bind, http_settings

CHAT = "/v1/chat/completions"
ASKED = {"messages": HELLO, "max_tokens": 2}


@contextlib.asynccontextmanager
async def client(url: str = "http://localhost", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with these options, as a process would have it."""
    if "uds" not in options:
        options.setdefault("port", 0)
    config = ServerConfig(**options)
    state = EngineState(config, FakeEngine())
    with bind(config) as listener:
        app = create_app(state, hosts_of(config, listener))
        server = QuickServer(http_settings(app, config.ssl_certfile, config.ssl_keyfile), state)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        if config.uds:
            transport = httpx.AsyncHTTPTransport(uds=config.uds)
        else:
            transport = httpx.AsyncHTTPTransport(
                verify=ssl.create_default_context(cafile=CERTIFICATE)
            )
            url = f"{url}:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, transport=transport) as found:
            yield found
        server.should_exit = True
        await task


def started(**options: Any) -> tuple[str, ...]:
    return str(FAKE_SERVER), "{}", json.dumps(options)


@contextlib.contextmanager
def said(*command: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process, with what it says of where it is and how to try it."""
    with running(*command) as process:
        assert process.stderr is not None
        lines: dict[str, str] = {}
        for line in process.stderr:
            start, _, rest = line.strip().partition(" fake at " if "Serving" in line else ": ")
            lines[start] = rest
            if start == "Try it":
                break
        yield process, lines


# -- names ----------------------------------------------------------------------------------------

OWN_NAMES = (
    "localhost",
    "LocalHost:1919",
    "localhost.",
    "my.app.localhost:80",
    "127.0.0.1:1919",
    "127.8.9.10",
    "[::1]:1919",
    "[::1]",
    socket.gethostname(),
    "",  # as HTTP/1.0 has it
    "more.example.org:1919",
    "a.example.com",
    "a.b.example.com:80",
)
FOREIGN_NAMES = (
    "example.com",
    "attacker.example",
    "attacker.example:1919",
    "localhost.attacker.example",
    "127.0.0.1.attacker.example",
    "attackerlocalhost",
    "[::1].attacker.example",
    "[::2]:1919",
    "10.0.0.1",
)


async def test_a_server_on_loopback_answers_to_its_own_host_names_only() -> None:
    async with client(allowed_host=("more.example.org", "*.example.com")) as http:
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            for name in OWN_NAMES:
                answer = await http.get(path, headers={"host": name})
                assert answer.status_code == (404 if path == "/nowhere" else 200), name
            for name in FOREIGN_NAMES:
                answer = await http.get(path, headers={"host": name})
                assert answer.status_code == 403, name
                assert error_of(answer)["code"] == "host_not_allowed"
                assert "--allowed-host" in error_of(answer)["message"]
                assert answer.headers["x-request-id"]
        refused = await http.post(CHAT, json=ASKED, headers={"host": "attacker.example"})
        assert refused.status_code == 403
        for headers, status in (
            (b"", b"200"),
            (b"host: localhost\r\nhost: attacker.example\r\n", b"403"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            writer.write(b"GET /health HTTP/1.0\r\n" + headers + b"\r\n")
            assert (await reader.read()).split()[1] == status
            writer.close()


async def test_an_allowed_origin_can_read_why_its_host_is_refused() -> None:
    async with client(cors_origin=("http://page.example",)) as http:
        headers = {"host": "attacker.example", "origin": "http://page.example"}
        answer = await http.get("/health", headers=headers)
    assert answer.status_code == 403
    assert answer.headers["access-control-allow-origin"] == "http://page.example"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"api_key": ("secret",)}, 200),
        ({"host": "0.0.0.0"}, 200),
        ({"allowed_host": ("*",)}, 200),
        ({}, 403),
        ({"host": "localhost"}, 403),
        ({"host": "127.0.0.2"}, 403),
        ({"api_key": ("secret",), "allowed_host": ("other.example",)}, 403),
        ({"host": "0.0.0.0", "allowed_host": ("other.example",)}, 403),
    ],
)
async def test_host_names_are_checked_where_no_key_protects_the_server(
    options: dict[str, Any], status: int
) -> None:
    url = "http://127.0.0.2" if options.get("host") == "127.0.0.2" else "http://127.0.0.1"
    async with client(url, **options) as http:
        answer = await http.get("/health", headers={"host": "foreign.example"})
        assert answer.status_code == status
        # Probes by address pass, with any of these options.
        assert (await http.get("/health")).status_code == 200


def test_the_configured_address_is_an_allowed_host_name() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        hosts = hosts_of(ServerConfig(host="my-laptop"), listener)
        assert hosts is not None and "My-Laptop" in hosts and "my-laptop.example" not in hosts
    assert "x" in Hosts(("*",))


# -- TLS ------------------------------------------------------------------------------------------


async def test_https_serves_whole_and_streamed_answers() -> None:
    options = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}
    async with client("https://localhost", **options) as http:
        assert (await http.post(CHAT, json=ASKED)).status_code == 200
        streamed = await http.post(CHAT, json={**ASKED, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        large = await http.get("/health", headers={"x": "y" * 100_000})
        assert large.status_code == 431


async def test_a_plain_text_client_of_an_https_port_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.server.http.tls_server.HEAD_SECONDS", 0.1)
    options = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}
    async with client("https://localhost", **options) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        assert await reader.read() == b""
        writer.close()


def test_the_process_prints_an_https_url() -> None:
    command = started(port=0, ssl_certfile=CERTIFICATE, ssl_keyfile=KEY)
    with said(*command) as (_, lines):
        url = lines["Serving"]
        assert url.startswith("https://127.0.0.1:")
        assert lines["Try it"].startswith(f"curl {url}/v1/")
        context = ssl.create_default_context(cafile=CERTIFICATE)
        assert httpx.get(f"{url}/health", verify=context).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_certfile": "/nowhere.pem"}, "--ssl-certfile /nowhere.pem: No such file"),
        ({"ssl_certfile": CERTIFICATE}, "--ssl-certfile .*pem: .*a certificate and its own key"),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": "/nowhere.key"},
            "--ssl-keyfile /nowhere.key: No such file",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": OTHER_KEY},
            "--ssl-certfile .*pem with .*other.key: .*its own key",
        ),
        ({"ssl_certfile": __file__}, "--ssl-certfile .*py: .*a certificate and its own key"),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": LOCKED_KEY},
            "--ssl-keyfile .*locked.key: has a password",
        ),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_the_model_loads(
    options: dict[str, Any], message: str
) -> None:
    async def start(config: EngineConfig) -> FakeEngine:
        pytest.fail("the model was loaded")

    process = ServerProcess(EngineConfig(model="fake"), ServerConfig(port=0, **options), start)
    with pytest.raises(ConfigError, match=message):
        process.run()


# -- a Unix socket --------------------------------------------------------------------------------


async def test_a_unix_socket_serves_whole_and_streamed_answers(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with client(uds=str(path)) as http:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await http.post(CHAT, json=ASKED)).status_code == 200
        streamed = await http.post(CHAT, json={**ASKED, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        # A proxy passes on whatever name it has, and no web page gets here.
        answer = await http.get("/health", headers={"host": "public.example"})
        assert answer.status_code == 200


def test_the_process_prints_how_to_use_its_socket_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    with said(*started(uds=str(path))) as (process, lines):
        assert lines["Serving"] == f"unix:{path}"
        words = shlex.split(lines["Try it"])
        assert words[:3] == ["curl", "--unix-socket", str(path)]
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport) as http:
            asked = json.loads(words[words.index("-d") + 1])
            assert http.post(words[3], json=asked).status_code == 200
        with pytest.raises(ConfigError, match=r"--uds .*: a server listens there"):
            bind(ServerConfig(uds=str(path)))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert not path.exists()


def test_a_socket_is_removed_when_loading_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    arguments = (
        json.dumps({"loads_until": str(tmp_path / "never")}),
        json.dumps({"uds": str(path)}),
    )
    with running(str(FAKE_SERVER), *arguments) as process:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path), retries=20)) as http:
            while not path.exists():
                check_running(process)
            assert http.get("http://localhost/health").status_code == 503
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert not path.exists()


def test_a_stale_socket_is_replaced_and_any_other_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bind(ServerConfig(uds=str(path))) as listener:
        pass
    assert path.exists()
    with bind(ServerConfig(uds=str(path))) as listener, socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))
        listener.accept()[0].close()
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        bind(ServerConfig(uds=str(file)))
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"--uds .*too long"):
        bind(ServerConfig(uds=str(tmp_path / ("x" * 200))))
    with pytest.raises(ConfigError, match=r"--uds .*No such file"):
        bind(ServerConfig(uds=str(tmp_path / "no" / "folder")))


# -- a proxy's path -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_routes_work_with_and_without_the_root_path(prefix: str) -> None:
    async with client(root_path="/llm", api_key=("secret",)) as http:
        assert (await http.get(f"{prefix}/health")).status_code == 200
        assert (await http.get(f"{prefix}/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        assert (await http.get(f"{prefix}/v1/models")).status_code == 200
        assert (await http.post(f"{prefix}{CHAT}", json=ASKED)).status_code == 200
        description = (await http.get(f"{prefix}/openapi.json")).json()
        assert description["servers"] == [{"url": "/llm"}]
        assert "/v1/models" in description["paths"]
        assert (await http.get(f"{prefix}/version/")).status_code == 200
        moved = await http.get(f"{prefix}/docs/")
        assert moved.status_code == 307
        assert moved.headers["location"].endswith("/llm/docs")
        for path in ("/llm/llm/health", "/llmhealth"):
            assert (await http.get(path)).status_code == 404
        page = await http.get("/llm", follow_redirects=True)
        assert page.status_code == 200
        assert page.url.path == "/llm/"  # below which its requests go, being relative


async def test_a_similar_prefix_opens_no_route() -> None:
    async with client(root_path="/llm", api_key=("secret",)) as http:
        for path in ("/llm/llm/health", "/llmhealth", "/health/llm", "/llm/nowhere"):
            assert (await http.get(path)).status_code == 401, path


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root_path": "llm"}, "--root-path llm: allowed: a path that begins with /"),
        ({"root_path": "/llm/"}, "--root-path /llm/: "),
        ({"root_path": "/"}, "--root-path /: "),
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile key.pem: .*--ssl-certfile"),
        ({"uds": "/s", "port": 80}, "--port 80: cannot be combined with --uds"),
        ({"uds": "/s", "host": "::"}, "--host ::: cannot be combined with --uds"),
        ({"uds": "/s", "ssl_certfile": "c"}, "--ssl-certfile c: cannot be combined with --uds"),
        ({"allowed_host": ("https://a.b",)}, "--allowed-host https://a.b: allowed: a host name"),
        ({"allowed_host": ("a.b:80",)}, "--allowed-host a.b:80: allowed: a host name"),
        ({"allowed_host": ("[::1]:80",)}, r"--allowed-host \[::1\]:80: allowed: a host name"),
        ({"allowed_host": ("",)}, "--allowed-host : allowed: a host name"),
    ],
)
def test_invalid_listening_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ServerConfig(**options)


def test_valid_listening_options_are_accepted() -> None:
    ServerConfig(root_path="/a/b-c", allowed_host=("a", "*.a.b", "*", "[::1]", "::1"))


# -- the helpers of these tests -------------------------------------------------------------------


def test_a_reserved_port_is_for_a_server_alone(port: int) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for shares_port in (False, True):
        with bind(ServerConfig(port=port), shares_port=shares_port) as listener:
            socket.create_connection(("127.0.0.1", port)).close()
            assert listener.getsockname()[1] == port


def test_a_wait_for_a_server_that_has_ended_fails_at_once_with_what_it_has_said() -> None:
    # Its child has its output open.
    ended = "import subprocess, sys; subprocess.Popen(['sleep', '99']); sys.exit('no weights')"
    with (
        session("-c", ended) as process,
        pytest.raises(pytest.fail.Exception, match=r"ended with exit code 1:\nno weights"),
    ):
        wait_for_health(process, "http://127.0.0.1:1", 200)
