"""The server on a local Ray cluster with the demo model. Skipped without Ray (try_ray.sh).

The folder is not called ray, because pytest would then offer it to `import ray`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.http_server import error_of
from support.ports import free_port
from support.processes import check_running
from support.waiting import wait_until
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.distributed.cluster_token import VARIABLE
from minisgl.errors import ConfigError
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig

pytest.importorskip("ray.serve", reason="Ray is not installed: scripts/tools/try_ray.sh")
deployments = importlib.import_module("minisgl.ray.deployments")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
# Deploys an application, and when a file is there, the same with another name of the model.
DEPLOY_TWICE = """
import os, sys, time, ray
from ray import serve
from minisgl.ray import app
port, go = sys.argv[1:]
ray.init(log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
for name in ("old", "new"):
    args = {"device": "cpu", "replicas": "2", "served-model-name": name}
    serve.run(app(args), name="chat")
    while not os.path.exists(go):
        time.sleep(0.1)
time.sleep(3600)
"""
SERVE = Path(sys.executable).with_name("serve")  # Ray Serve's command


@contextlib.contextmanager
def cluster(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A command that starts a cluster of its own, in a session of its own."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for the paths of sockets
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        for number in processes(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)


def processes(cluster: subprocess.Popen[str], title: str = "") -> list[int]:
    """The processes of a cluster whose command line begins with `title`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        number = int(place.name)
        with contextlib.suppress(OSError):
            if os.getsid(number) == cluster.pid and (place / "cmdline").read_text().startswith(
                title
            ):
                found.append(number)
    return sorted(found)


def wait_while_running(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for something that a cluster does."""
    while not condition():
        check_running(process)
        time.sleep(0.5)


def num_ready(url: str) -> int:
    with contextlib.suppress(httpx.TransportError):
        health = httpx.get(f"{url}/health")
        if health.status_code == 200:
            return int(health.json()["ready"])
    return 0


def running(url: str) -> float:
    """The requests that all engines are computing."""
    page = httpx.get(f"{url}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("minisgl_running_requests{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def ask(url: str, content: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    return httpx.post(url + CHAT, json=body)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("lora") / "sql"
    return folder, save_demo_adapter(folder, seed=0)


@pytest.fixture(scope="module")
def served(
    adapter: tuple[Path, PreTrainedModel],
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Two engines of `minisgl serve --ray`, with an adapter."""
    options = ("--replicas", "2", "--device", "cpu", "--lora", f"sql={adapter[0]}")
    command = (sys.executable, "-m", "minisgl", "serve", "--ray", *options)
    with free_port() as port, cluster(*command, "--port", str(port)) as process:
        url = f"http://127.0.0.1:{port}"
        wait_while_running(process, lambda: num_ready(url) == 2)
        yield url, process


def test_answers_errors_and_ids_are_those_of_one_server(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = served
    headers = {"x-request-id": "mine"}
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = httpx.post(url + CHAT, json=body, headers=headers)
    text = whole.json()["choices"][0]["message"]["content"]
    assert text == "The capital of France is Paris."
    assert whole.headers.get_list("x-request-id") == ["mine"]
    assert whole.json()["id"].startswith("chatcmpl-mine-")
    streamed = httpx.post(url + CHAT, json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    refused = httpx.post(url + CHAT, json={"messages": 7}, headers=headers)
    assert refused.status_code == 400 and error_of(refused)["param"] == "messages"
    assert refused.headers.get_list("x-request-id") == ["mine"]
    foreign = httpx.get(f"{url}/v1/models", headers={"host": "evil.example"})
    assert foreign.status_code == 403 and error_of(foreign)["code"] == "host_not_allowed"


def test_adapters_of_all_engines_are_models(
    served: tuple[str, subprocess.Popen[str]], adapter: tuple[Path, PreTrainedModel]
) -> None:
    """What asks for them may go to either engine."""
    url, _ = served
    prompts = [[*range(start, start + 40)] for start in range(3, 9)]
    for model, adapted in (("sql", adapter[1]), ("demo", None)):
        for prompt in prompts:
            body = {"prompt": prompt, "model": model, "max_tokens": 6, "ignore_eos": True}
            options = {"temperature": 0, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=body | options)
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == greedy_tokens(adapted, prompt, 6)
    listed = {each["id"]: each["parent"] for each in httpx.get(f"{url}/v1/models").json()["data"]}
    assert listed == {"demo": None, "sql": "demo"}
    assert ask(url, "Hello", model="poems").status_code == 404


def test_adapters_are_not_loaded_later() -> None:
    asked = EngineConfig(max_loras=1), ServerConfig(lora_root="/loras", admin_key="a")
    with pytest.raises(ConfigError, match=r"with Ray adapters are loaded at the start; .* --lora"):
        deployments.build(*asked, RouterConfig(), RayConfig())


def test_a_conversation_stays_on_the_engine_that_has_its_prefix(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = served
    conversations = [[{"role": "user", "content": f"{n} {n * 7919} " * 8}] for n in range(100, 108)]
    sent = [0] * len(conversations)  # tokens of the last prompt of each
    for _ in range(3):
        for index, messages in enumerate(conversations):
            body = {"messages": messages, "max_tokens": 12}
            answer = httpx.post(url + CHAT, json=body).json()
            usage = answer["usage"]
            # All of the last prompt, in whole pages.
            assert usage["prompt_tokens_details"]["cached_tokens"] >= sent[index] // 16 * 16
            sent[index] = usage["prompt_tokens"]
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "And then?"})
    assert min(sent) > 64
    page = httpx.get(f"{url}/metrics").text
    prompts = [
        line for line in page.splitlines() if line.startswith("minisgl_prompt_tokens_total{")
    ]
    assert len(prompts) == 2 and all(float(line.rpartition(" ")[2]) > 500 for line in prompts)


def test_a_request_whose_client_leaves_ends_on_its_engine(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = served
    endless = {"max_tokens": 1900, "ignore_eos": True}
    body = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, **endless}
    with httpx.stream("POST", url + CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_while_running(process, lambda: running(url) == 1)
    wait_while_running(process, lambda: running(url) == 0)


def test_a_killed_engine_costs_no_request_its_end_and_comes_back(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = served
    ends: list[str] = []

    def stream(index: int) -> None:
        fields = {"stream": True, "max_tokens": 600, "ignore_eos": True}
        answer = ask(url, f"Tell me {index} things.", **fields)
        assert answer.status_code == 200
        lines = [line for line in answer.text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        ends.append("replica_lost" if "replica_lost" in lines[-2] else "complete")

    before = processes(process, "ray::ServeReplica:minisgl:engine")
    assert len(before) == 2
    threads = [threading.Thread(target=stream, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    wait_while_running(process, lambda: running(url) == 16)
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(ends) == 16 and "replica_lost" in ends and "complete" in ends
    assert ask(url, "Hello").status_code == 200
    wait_while_running(
        process, lambda: len(processes(process, "ray::ServeReplica:minisgl:engine")) == 2
    )
    wait_while_running(process, lambda: num_ready(url) == 2)


def test_the_end_lets_a_stream_finish_and_leaves_no_process(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = served
    body = {"messages": [{"role": "user", "content": "Go on."}], "stream": True}
    fields = {"max_tokens": 300, "ignore_eos": True}
    with httpx.stream("POST", url + CHAT, json={**body, **fields}) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line]
    assert last[-1] == "data: [DONE]" and '"finish_reason":"length"' in last[-2]
    assert process.wait() == 0
    wait_until(lambda: not processes(process))


def test_one_engine_computes_prompts_for_another_which_does_without_it_if_need_be(
    port: int,
) -> None:
    options = ("--replicas", "2", "--roles", "prefill,decode", "--device", "cpu")
    command = (sys.executable, "-m", "minisgl", "serve", "--ray", *options, "--port", str(port))
    with cluster(*command) as process:
        url = f"http://127.0.0.1:{port}"
        wait_while_running(process, lambda: num_ready(url) == 1)

        def handed_over(index: int) -> int:
            answer = ask(url, f"{index} " + "the " * 600, temperature=0, max_tokens=4)
            assert answer.status_code == 200
            count = answer.json()["usage"]["prompt_tokens_details"].get("host_cached_tokens", 0)
            return int(count)

        prompts = itertools.count(100)
        wait_while_running(process, lambda: handed_over(next(prompts)) > 200)
        page = httpx.get(f"{url}/metrics").text
        kinds = [
            line.rpartition(" ")[2] != "0.0"
            for line in page.splitlines()
            if line.startswith("minisgl_kv_transfers_total{")
        ]
        assert sorted(kinds) == [False, False, True, True]  # one has sent, and one received

        before = processes(process, "ray::ServeReplica:minisgl:prefill")
        assert len(before) == 1
        os.kill(before[0], signal.SIGKILL)
        for _ in range(4):
            handed_over(next(prompts))
        wait_while_running(process, lambda: handed_over(next(prompts)) > 200)


def test_engines_on_several_nodes_need_a_secret_to_exchange_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(deployments.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(deployments.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    assert deployments._pages_address(EngineConfig()) == "127.0.0.1:0"
    nodes[1]["Alive"] = True
    with pytest.raises(ConfigError, match="several nodes the engines need a shared secret"):
        deployments._pages_address(EngineConfig())
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    assert deployments._pages_address(EngineConfig()) == "10.0.0.7:0"


@pytest.mark.parametrize(
    ("given", "level", "encoding"),
    [
        ({}, None, None),
        ({"log_format": "json"}, "INFO", "JSON"),
        ({"log_level": "ERROR"}, "ERROR", "TEXT"),
    ],
)
def test_the_log_of_deployments_is_as_the_options_say(
    given: dict[str, str], level: str | None, encoding: str | None
) -> None:
    server = ServerConfig(**given)  # type: ignore[arg-type]
    built = deployments.build(EngineConfig(device="cpu"), server, RouterConfig(), RayConfig())
    ingress = built._bound_deployment
    [engine] = [each._bound_deployment for each in ingress.init_args[0].values()]
    for deployment in (ingress, engine):
        found = deployment._deployment_config.logging_config
        if level is None:
            assert found is None
        else:
            config = importlib.import_module("ray.serve.schema").LoggingConfig(**found)
            assert (config.log_level, config.encoding) == (level, encoding)


def test_load_starts_a_second_engine_of_an_application_in_a_file(tmp_path: Path, port: int) -> None:
    soon = {"upscale_delay_s": 1, "metrics_interval_s": 1, "look_back_period_s": 2}
    limits = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    application = {
        "name": "chat",
        "import_path": "minisgl.ray:app",
        "args": {"device": "cpu", "api_key": "secret"},
        "deployments": [{"name": "engine", "autoscaling_config": {**limits, **soon}}],
    }
    address = {"host": "127.0.0.1", "port": port}
    file = tmp_path / "serve.yaml"  # JSON is YAML
    file.write_text(json.dumps({"http_options": address, "applications": [application]}))
    with cluster(str(SERVE), "run", str(file)) as process:
        url = f"http://127.0.0.1:{port}"
        wait_while_running(process, lambda: num_ready(url) == 1)
        assert ask(url, "Hello").status_code == 401
        stopping = threading.Event()

        def load() -> None:
            headers = {"authorization": "Bearer secret"}
            body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 200}
            while not stopping.is_set():
                answer = httpx.post(url + CHAT, json={**body, "ignore_eos": True}, headers=headers)
                assert answer.status_code == 200

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            wait_while_running(process, lambda: num_ready(url) == 2)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


def test_a_rolling_update_costs_no_request(tmp_path: Path, port: int) -> None:
    url, go = f"http://127.0.0.1:{port}", tmp_path / "go"
    with cluster(sys.executable, "-c", DEPLOY_TWICE, str(port), str(go)) as process:
        wait_while_running(process, lambda: num_ready(url) == 2)
        answers: list[tuple[int, str]] = []
        stopping = threading.Event()

        def load(index: int) -> None:
            while not stopping.is_set():
                answer = ask(url, f"Tell me {index} things.", max_tokens=64, ignore_eos=True)
                answers.append((answer.status_code, answer.json().get("model", answer.text)))

        threads = [threading.Thread(target=load, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_while_running(process, lambda: len(answers) >= 8)
            go.touch()
            wait_while_running(process, lambda: [*answers[-8:]] == [(200, "new")] * 8)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert {*answers} == {(200, "old"), (200, "new")}
