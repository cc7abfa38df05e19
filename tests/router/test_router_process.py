"""The processes of `serve --replicas` with fake engines: start, failures, restarts, and the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from support.folders import SUPPORT
from support.http_server import HELLO
from support.ports import free_port
from support.processes import (
    check_running,
    children_of,
    replica_sockets,
    wait_for_ready,
    wait_until_nothing_is_left,
)
from support.serving_processes import python_in

from minisgl.server.metrics_format import OPEN_METRICS

SCRIPT = str(SUPPORT / "fake_replicas.py")
CHAT = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer admin"}


@contextlib.contextmanager
def serving(
    folder: Path,
    behaviour: dict[str, Any],
    *,
    replicas: int = 2,
    routers: int = 1,
    policy: str = "cache",
    **options: Any,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The parent process and its URL; its private folder is below `folder`."""
    router = json.dumps(
        {"replicas": replicas, "router_processes": routers, "router_policy": policy}
    )
    with free_port() as port:
        server = json.dumps({"port": port, **options})
        with python_in(folder, SCRIPT, json.dumps(behaviour), server, router) as process:
            yield process, f"http://127.0.0.1:{port}"


def test_several_routing_processes_share_an_address_and_what_is_killed_comes_back(
    tmp_path: Path,
) -> None:
    options = {"routers": 2, "api_key": ["k"], "served_model_name": ["first", "second"]}
    with serving(tmp_path, {"interval": 0.01}, **options) as (process, url):
        wait_for_ready(process, url, 2)
        folder = next(tmp_path.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700
        names = {path.name for path in folder.iterdir()}
        assert {"replica-0.sock", "replica-1.sock", "router-0.sock", "router-1.sock"} <= names
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer k"}
        # Connections go to either process; each tells the metrics of both.
        for _ in range(8):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        page = httpx.get(f"{url}/metrics").text
        sent = re.findall(
            r'minisgl_router_requests_total\{router="(\d)",replica="\d"\} (\S+)', page
        )
        assert {router for router, _ in sent} == {"0", "1"}
        assert sum(float(count) for _, count in sent) == 8
        accept = {"accept": OPEN_METRICS.content_type}
        opened = httpx.get(f"{url}/metrics", headers=accept).text
        assert {
            sample.labels["router"]
            for family in openmetrics_families(opened)
            for sample in family.samples
            if sample.name == "minisgl_router_requests_total"
        } == {"0", "1"}
        # Each knows what the other has sent where.
        question = {"role": "user", "content": "What is the capital of France? " * 4}
        told: Any = {"messages": [question], "max_tokens": 1}
        for _ in range(12):
            assert httpx.post(f"{url}{CHAT}", json=told, headers=headers).status_code == 200
        page = httpx.get(f"{url}/metrics").text
        answered = (
            rf'minisgl_http_responses_total\{{replica="\d",route="{CHAT}",status="200"\}} (\S+)'
        )
        assert re.findall(answered, page) == ["12.0"]

        arguments = children_of(tmp_path)
        for kind in ("router", "replica"):
            (pid,) = (pid for pid, args in arguments.items() if kind in args and args[-1] == "1")
            os.kill(pid, signal.SIGKILL)
        asked: Any = {"messages": HELLO, "max_tokens": 60}
        with httpx.Client(base_url=url, headers=headers) as client:
            for _ in range(4):  # connections to the killed router wait for its next start
                answer = httpx.post(f"{url}{CHAT}", json=asked, headers=headers)
                assert answer.status_code == 200
            starts_again = 'minisgl_router_replica_starts_total{router="0",replica="1"} 2.0'
            while starts_again not in client.get("/metrics").text:
                check_running(process)
            wait_for_ready(process, url, 2)
            assert starts_again in client.get("/metrics").text
            # Ctrl-C: the answer is finished, and new requests are refused.
            with client.stream("POST", CHAT, json={**asked, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait() == 0
        assert process.stderr is not None
        log = process.stderr.read()
        assert "Replica 1 has ended (exit code -9); starting it again in 1 s" in log
        assert "Serving first, second with 2 replicas at http://" in log
        assert 'completions.create(model="first", ' in log
        assert "Routing process 1 has ended (exit code -9)" in log
        assert "Traceback" not in log
        wait_until_nothing_is_left(tmp_path)


def models_of(client: httpx.Client) -> set[tuple[str, ...]]:
    """The adapters for which replicas answer, that take turns."""
    asked = {"messages": HELLO, "max_tokens": 1}
    found = set[tuple[str, ...]]()
    for _ in range(2):
        names = []
        for name in ("a", "b", "c"):
            statuses = {client.post(CHAT, json={**asked, "model": name}).status_code for _ in "01"}
            assert len(statuses) == 1, "the replicas differ"
            names += [name] if statuses == {200} else []
        found.add(tuple(names))
    return found


def test_adapters_are_loaded_on_all_replicas_and_on_those_that_start_later(tmp_path: Path) -> None:
    """Or on none: what one refuses, the others have not either."""
    root = tmp_path / "root"
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
    options = {"lora_root": str(root), "admin_key": "admin", "api_key": ["k"]}
    sockets = tmp_path / "s"
    sockets.mkdir()
    with serving(sockets, {}, policy="round-robin", **options) as (process, url):
        wait_for_ready(process, url, 2)
        headers = {"authorization": "Bearer admin"}
        with httpx.Client(base_url=url, headers=headers, timeout=None) as client:

            def change(what: str, name: str, **more: str) -> httpx.Response:
                body = {"lora_name": name, **more}
                return client.post(f"/v1/{what}_lora_adapter", json=body)

            for wrong in ({"authorization": "Bearer k"}, {"authorization": ""}):
                body = {"lora_name": "a", "lora_path": "a"}
                answer = client.post("/v1/load_lora_adapter", json=body, headers=wrong)
                assert answer.status_code == 401
            for name in ("a", "b"):
                answer = change("load", name, lora_path=name)
                told = f"Success: LoRA adapter '{name}' added successfully."
                assert (answer.status_code, answer.text) == (200, told)
            assert models_of(client) == {("a", "b")}
            assert change("unload", "a").status_code == 200
            (root / "c" / "fails_once").touch()
            answer = change("load", "c", lora_path="c")
            assert answer.status_code == 400
            said = r"Replica [01]: The files are broken; loaded: b\."
            assert re.fullmatch(said, answer.json()["error"]["message"])
            assert models_of(client) == {("b",)}
            assert change("load", "b", lora_path="b").status_code == 200  # changes nothing
            answer = change("load", "b", lora_path="c")
            assert answer.status_code == 409 and "b is another" in answer.text
            answer = change("unload", "a")
            assert answer.status_code == 404 and "There is no adapter 'a'" in answer.text
            answer = client.post("/v1/load_lora_adapter", json={"lora_name": 5, "lora_path": "a"})
            assert answer.status_code == 400 and "lora_name" in answer.text
            assert client.get("/v1/load_lora_adapter").status_code == 405
            assert models_of(client) == {("b",)}

            arguments = children_of(sockets)
            (pid,) = (pid for pid, args in arguments.items() if args[-1] == "1")
            os.kill(pid, signal.SIGKILL)
            while client.get("/health").json()["ready"] == 2:
                check_running(process)
            assert change("load", "c", lora_path="c").status_code == 200  # on that which runs
            wait_for_ready(process, url, 2)
            assert models_of(client) == {("b", "c")}
            assert change("unload", "b").status_code == 200
            assert models_of(client) == {("c",)}


def weights_of(sockets: Path) -> list[Any]:
    """What replicas have: the folder of their weights, and the rank in the trainer's group."""
    found = []
    for path in replica_sockets(sockets):
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://replica", headers=ADMIN
        ) as client:
            body = {"name": "model.norm.weight"}
            found.append(client.post("/get_weights_by_name", json=body).json())
    return found


def test_a_trainer_asks_all_replicas_and_those_without_weights_get_no_requests(
    tmp_path: Path,
) -> None:
    first, second, sockets = (tmp_path / name for name in ("1", "2", "s"))
    for folder in (first, second, sockets):
        folder.mkdir()
    asked: Any = {"messages": HELLO, "max_tokens": 1}
    options = {"trainer": True, "admin_key": "admin"}
    with serving(sockets, {}, policy="round-robin", **options) as (process, url):
        wait_for_ready(process, url, 2)
        with httpx.Client(base_url=url, headers=ADMIN, timeout=None) as client:

            def update(folder: Path) -> httpx.Response:
                body = {"model_path": str(folder)}
                return client.post("/update_weights_from_disk", json=body)

            def answers() -> set[int]:
                return {client.post(CHAT, json=asked).status_code for _ in range(6)}

            wrong = client.post("/pause", headers={"authorization": "Bearer x"})
            assert wrong.status_code == 401
            assert client.get("/get_world_size").json() == {"world_size": 2}
            place = {"master_address": "here", "master_port": 1, "rank_offset": 1, "world_size": 3}
            for path, body in [
                ("/init_weights_update_group", place),
                ("/init_weight_transfer_engine", {"init_info": place}),
            ]:
                assert client.post(path, json=body).status_code == 200
                assert weights_of(sockets) == [["", 1], ["", 2]]
            refused = client.post("/init_weights_update_group", json={})
            assert refused.status_code == 400
            assert all(f"Replica {index}: " in refused.text for index in (0, 1))
            assert update(first).status_code == 200
            assert weights_of(sockets) == [[str(first), 1], [str(first), 2]]

            (second / "fails_once").touch()
            failed = update(second)  # on one of them, which is incomplete then
            assert failed.status_code == 400
            assert re.search(r"Replica [01]: The files are broken\.", failed.text)
            assert sorted(folder for folder, _ in weights_of(sockets)) == [str(first), str(second)]
            assert answers() == {200}
            wait_for_ready(process, url, 1)
            assert answers() == {200}
            assert update(second).status_code == 200
            wait_for_ready(process, url, 2)

            def restart() -> None:
                arguments = children_of(sockets)
                (pid,) = (pid for pid, args in arguments.items() if args[-1] == "1")
                os.kill(pid, signal.SIGKILL)
                while client.get("/health").json()["ready"] == 2:
                    check_running(process)

            restart()
            wait_for_ready(process, url, 2)
            assert weights_of(sockets)[1] == [str(second), 0]
            assert client.post("/sleep?level=2").status_code == 200
            wait_for_ready(process, url, 0)
            refused = client.post(CHAT, json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")


def test_a_replica_that_does_not_start_ends_all_with_its_exit_code(tmp_path: Path) -> None:
    with serving(tmp_path, {"load_error": "There is no room for it."}) as (process, _):
        assert process.wait() == 1
        assert process.stderr is not None
        log = process.stderr.read()
        assert "There is no room for it." in log
        assert re.search(r"Replica [01] ended with exit code 1 before it was ready\.", log)
        wait_until_nothing_is_left(tmp_path)


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, {}, routers=2) as (process, url):
        wait_for_ready(process, url, 2)
        assert len(children_of(tmp_path)) == 5
        process.kill()
        process.wait()
        wait_until_nothing_is_left(tmp_path)


def test_a_second_signal_while_requests_run_leaves_nothing(tmp_path: Path) -> None:
    asked = {"messages": HELLO, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with (
        serving(tmp_path, {"interval": 0.1, "max_seq_len": 4000}) as (process, url),
        httpx.Client(base_url=url) as client,
    ):
        wait_for_ready(process, url, 2)
        with client.stream("POST", CHAT, json=asked) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            next(lines)  # a replica that drains answers on
            process.send_signal(signal.SIGINT)
            assert process.wait() == -signal.SIGINT
        wait_until_nothing_is_left(tmp_path)
