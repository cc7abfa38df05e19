"""A trainer over HTTP: weights from files and from a group, pauses, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.fake_engine import FakeEngine
from support.http_server import error_of, http_client
from support.ports import free_port
from support.serving import Served, demo_engine, served
from support.started_trainers import start_trainer

from minisgl.config import EngineConfig
from minisgl.distributed.addresses import GroupAddress
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.router.config import RouterConfig
from minisgl.router.process import RouterProcess
from minisgl.server import with_all_keys
from minisgl.server.config import ServerConfig
from minisgl.server.handlers import training, weight_transfer

ADMIN = {"authorization": "Bearer admin"}
NORM = "model.norm.weight"
ENDPOINTS = (*training.ENDPOINTS, *weight_transfer.ENDPOINTS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model with other weights."""
    folder = tmp_path_factory.mktemp("trained")
    for path in DEMO_FOLDER.glob("*.safetensors"):
        tensors = load_file(path)
        changed = tensors | {NORM: tensors[NORM].flip(0)}
        save_file(changed, folder / path.name, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def serving() -> Iterator[Served[AsyncEngine]]:
    with served(demo_engine, trainer=True, admin_key="admin") as found:
        yield found


@pytest.fixture
def client(serving: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    with serving.http() as found:
        found.headers.update(ADMIN)
        found.timeout = None  # type: ignore[assignment]
        yield found
        found.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)})
        serving.on_loop(serving.engine.audit)


def completion(client: httpx.Client) -> Any:
    body = {"prompt": [*range(300, 320)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
    return answer.raise_for_status().json()


def tokens_of(client: httpx.Client) -> list[int]:
    return list(completion(client)["choices"][0]["token_ids"])


def test_weights_come_from_a_folder(client: httpx.Client, trained: Path) -> None:
    before = tokens_of(client)
    body = {"model_path": str(trained), "weight_version": "7"}
    answer = client.post("/update_weights_from_disk", json=body)
    assert answer.json() == {"message": "The weights have the version 7.", "success": True}
    assert tokens_of(client) != before
    body = {"model_path": str(trained / "none")}
    refused = client.post("/update_weights_from_disk", json=body)
    assert refused.status_code == 400 and "none" in error_of(refused)["message"]
    client.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)})
    assert tokens_of(client) == before


def test_answers_name_the_versions_of_the_weights(client: httpx.Client, trained: Path) -> None:
    path = "/update_weights_from_disk"
    for version in ("8", "9"):
        body = {"model_path": str(trained), "weight_version": version}
        client.post(path, json=body).raise_for_status()
        assert client.get("/server_info").json()["weight_version"] == version
        assert completion(client)["choices"][0]["weight_versions"] == [[0, version]]
        for path_of, asked in [
            ("/v1/completions", {"prompt": [300]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
        ]:
            whole = client.post(path_of, json={**asked, "max_tokens": 2}).json()
            streamed = client.post(path_of, json={**asked, "max_tokens": 2, "stream": True})
            lines = [line[6:] for line in streamed.text.split("\n") if line.startswith("data: {")]
            choices = [json.loads(line)["choices"][0] for line in lines]
            for last in (whole["choices"][0], choices[-1]):
                assert last["finish_reason"] and last["weight_versions"] == [[0, version]]
            assert not any("weight_versions" in each for each in choices[:-1])
    for wrong in ("", "9" * 257):
        refused = client.post(path, json={"model_path": str(trained), "weight_version": wrong})
        assert refused.status_code == 400 and error_of(refused)["param"] == "weight_version"
    assert client.get("/server_info").json()["weight_version"] == "9"


def test_weights_may_get_another_name(client: httpx.Client) -> None:
    path = "/update_weight_version"
    before = completion(client)
    for version in ("step 1", "step 2"):
        answer = client.post(path, json={"new_version": version}).raise_for_status()
        assert answer.json() == {"new_version": version, "success": True}
        assert client.get("/server_info").json()["weight_version"] == version
        named = completion(client)
        assert named["choices"][0]["weight_versions"] == [[0, version]]
        assert named["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
        assert named["system_fingerprint"] == before["system_fingerprint"]
        assert named["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for wrong in ({}, {"new_version": ""}, {"new_version": "7" * 257}, {"new_version": 7}):
        refused = client.post(path, json=wrong)
        assert refused.status_code == 400 and error_of(refused)["param"] == "new_version"
    assert client.get("/server_info").json()["weight_version"] == "step 2"


def test_the_fingerprint_tells_weights_apart(client: httpx.Client, trained: Path) -> None:
    found = [completion(client)["system_fingerprint"] for _ in range(2)]
    for folder in (trained, DEMO_FOLDER):
        body = {"model_path": str(folder), "weight_version": "same"}
        client.post("/update_weights_from_disk", json=body).raise_for_status()
        found.append(completion(client)["system_fingerprint"])
    assert found[0] == found[1] and len({*found}) == 3


GROUP = {"group_name": "policy"}
PLACE: dict[str, Any] = {
    "master_address": "127.0.0.1",
    "master_port": 9,
    "backend": "gloo",
    "rank_offset": 1,
    "world_size": 2,
}


def told_of(folder: Path) -> dict[str, Any]:
    """What is said of tensors before they are sent."""
    tensors = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    names = sorted(tensors)
    return {
        "names": names,
        "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [[*tensors[name].shape] for name in names],
        **GROUP,
    }


@contextmanager
def joined(client: httpx.Client, trained: Path, **options: Any) -> Iterator[None]:
    """A trainer that sends what is in a folder, in a group with the server."""
    with free_port() as port:
        place = PLACE | GROUP | {"master_port": port}
        with start_trainer(GroupAddress(**place), trained, **options):
            client.post("/init_weights_update_group", json=place).raise_for_status()
            yield


def test_weights_come_from_a_group(client: httpx.Client, trained: Path) -> None:
    before, told = tokens_of(client), told_of(trained)
    assert client.get("/get_world_size").json() == {"world_size": 1}
    with joined(client, trained):
        client.post("/pause", params={"mode": "keep"}).raise_for_status()
        client.post("/update_weights_from_distributed", json=told).raise_for_status()
        client.post("/resume").raise_for_status()
    assert tokens_of(client) != before
    client.post("/destroy_weights_update_group", json=GROUP).raise_for_status()
    again = client.post("/update_weights_from_distributed", json=told)
    assert again.status_code == 400 and "There is no group policy" in again.text


def test_a_server_whose_trainer_was_killed_says_so_until_a_whole_update(
    client: httpx.Client, trained: Path
) -> None:
    before = tokens_of(client)
    with joined(client, trained, stop_after=3):
        ended = client.post("/update_weights_from_distributed", json=told_of(trained))
    assert ended.status_code == 400 and "The update ends: " in ended.text
    body = {"prompt": [300], "max_tokens": 1}
    for refused in (client.post("/v1/completions", json=body), client.get("/ready")):
        assert refused.status_code == 503 and error_of(refused)["code"] == "weights_incomplete"
    client.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)})
    assert tokens_of(client) == before


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "names"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["object"], "shapes": [[1]]},
            "dtypes",
        ),
        (
            "/update_weights_from_distributed",
            {"names": [NORM], "dtypes": ["float32"], "shapes": [[-1]]},
            "has the shape",
        ),
        ("/pause_generation", {"mode": "forever"}, "mode: allowed: keep"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/init_weights_update_group", PLACE | {"backend": "mpi"}, "gloo and nccl"),
        *(
            ("/init_weights_update_group", PLACE | wrong, f'"message":"{said}')
            for wrong, said in [
                ({"master_port": 70000}, "master_port: allowed: 1 to 65535."),
                ({"master_port": -1}, "master_port: "),
                ({"world_size": 1}, "world_size: allowed: 2 to "),
                ({"world_size": 1 << 40}, "world_size: "),
                ({"rank_offset": 0}, "rank_offset: "),
                ({"rank_offset": 2}, "rank_offset: allowed: 1 to 1."),
            ]
        ),
    ],
)
def test_what_is_wrong_is_a_400(
    client: httpx.Client, path: str, body: dict[str, Any], said: str
) -> None:
    before = tokens_of(client)
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and said in answer.text
    assert tokens_of(client) == before


def test_the_cache_can_be_reset(client: httpx.Client) -> None:
    def cached() -> int:
        body = {"prompt": [*range(300, 360)], "max_tokens": 1}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    cached()
    assert cached() > 0
    client.post("/reset_prefix_cache").raise_for_status()
    assert cached() == 0


async def test_only_the_admin_key_replaces_weights() -> None:
    options: dict[str, Any] = {"trainer": True, "admin_key": "admin", "api_key": ("user", "admin")}
    async with http_client(FakeEngine(), **options) as client:
        for each in ENDPOINTS:
            for key in ("user", "other"):
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.request(each.method, each.path, headers=headers)
                assert answer.status_code == 401, each.path
    async with http_client(FakeEngine(), admin_key="admin") as client:
        for each in ENDPOINTS:
            answer = await client.request(each.method, each.path, headers=ADMIN)
            assert answer.status_code == 404, each.path


def test_a_trainer_needs_a_key_and_replicas_that_wait_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINISGL_ADMIN_KEY", raising=False)
    with pytest.raises(ConfigError, match="--trainer: replacing weights needs a key"):
        with_all_keys(ServerConfig(trainer=True))
    given = ServerConfig(trainer=True, admin_key="mine")
    assert with_all_keys(given).trainer
    engine = EngineConfig(device="cpu", host_cache=1.0)
    for options in ({"router_processes": 2}, {"roles": "prefill,decode"}):
        router = RouterConfig(replicas=2, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="--trainer: "):
            RouterProcess(engine, given, router, replica=(), front=())
