"""Servers over real sockets: in the test's own event loop, or as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.ports import free_port
from support.processes import PIPE_BYTES, check_running
from support.quick_server import QuickServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl.config import EngineConfig
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.process import Server, bind, http_settings

HELLO: Any = [{"role": "user", "content": "hello"}]
FAKE_SERVER = Path(__file__).with_name("fake_engine.py")
NEVER_S = 1e6


@contextlib.asynccontextmanager
async def server_on(
    engine: FakeEngine | None, engine_options: EngineConfig | None = None, **options: Any
) -> AsyncIterator[tuple[Server, int]]:
    """A server on the test's own loop, and its port."""
    config = ServerConfig(port=0, **options)
    state = EngineState(config, engine, engine_options)
    with bind(config) as listener:
        server = QuickServer(http_settings(create_app(state)), state)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        yield server, listener.getsockname()[1]
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine | None, **options: Any) -> AsyncIterator[str]:
    """A server on the test's own loop; yields its URL."""
    async with server_on(engine, **options) as (_, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def http_client(
    engine: FakeEngine | None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine, **options) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"]
    return dict(body["error"])


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pipesize=PIPE_BYTES,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def serving_process(
    behaviour: dict[str, Any], **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with the fake engine, and its URL."""
    with free_port() as port:
        # One that waits for its requests although it should not would do so for ever.
        options = {"port": port, "drain_timeout": NEVER_S, **options}
        arguments = [json.dumps(behaviour), json.dumps(options)]
        with running(str(FAKE_SERVER), *arguments) as process:
            yield process, f"http://127.0.0.1:{port}"


def wait_for_health(process: subprocess.Popen[str], url: str, status: int) -> None:
    """Wait until the server that `process` is to become answers /health with `status`."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == status:
                return
        check_running(process)
        time.sleep(0.02)


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {spelling: token_id for token_id, spelling in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=spelled, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def serve(model: Path, port: int, *options: str) -> list[str]:
    return [
        *("-m", "minisgl", "serve", "--model", str(model), "--load-format", "dummy"),
        *("--device", "cpu", "--port", str(port), *options),
    ]


@contextlib.contextmanager
def session(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pipesize=PIPE_BYTES,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
