"""What TRL's client of vLLM asks a server for, and what else reads and replaces weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.http_server import error_of
from support.ports import free_port
from support.serving import Served, demo_engine, served
from support.started_trainers import start_trainer
from torch import Tensor

from minisgl.distributed import weight_group
from minisgl.distributed.addresses import GroupAddress
from minisgl.engine import AsyncEngine
from minisgl.models.hub import DEMO_FOLDER
from minisgl.request import SamplingParams
from minisgl.server.handlers import weight_transfer

NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model with other weights."""
    folder = tmp_path_factory.mktemp("trained")
    changed = {
        name: tensor.flip(0).contiguous() for name, tensor in tensors_of(DEMO_FOLDER).items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def serving() -> Iterator[Served[AsyncEngine]]:
    with served(demo_engine, trainer=True, admin_key="admin") as found:
        yield found


@pytest.fixture
def client(serving: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    """With the key in the URL, the only place where TRL's client can have one."""
    with serving.http() as found:
        found.auth = httpx.BasicAuth("trl", "admin")
        found.timeout = None  # type: ignore[assignment]
        yield found
        found.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)})
        serving.on_loop(serving.engine.audit)


def asked(answer: httpx.Response) -> Any:
    """As TRL's client reads answers."""
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs_of(client: httpx.Client) -> list[Any]:
    body = {"prompt": [*range(300, 320)], "max_tokens": 8, "temperature": 0, "logprobs": 0}
    choices: list[Any] = asked(client.post("/v1/completions", json=body))["choices"]
    for choice in choices:
        choice.pop("weight_versions", None)  # which an engine that was loaded with them has not
    return choices


@pytest.fixture(scope="module")
def expected(trained: Path) -> list[Any]:
    """The answer of a server that was started with the weights."""
    for path in DEMO_FOLDER.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            (trained / path.name).symlink_to(path)
    with served(lambda: demo_engine(model=str(trained))) as found, found.http() as client:
        return logprobs_of(client)


@pytest.mark.parametrize(
    ("packed_bytes", "named", "finished", "version"),
    [(0, {"weight_version": "7"}, {}, "7"), (100_000, {}, {"weight_version": "8"}, "8")],
)
def test_the_calls_of_trls_client_replace_the_weights(
    client: httpx.Client,
    trained: Path,
    expected: list[Any],
    packed_bytes: int,
    named: dict[str, str],
    finished: dict[str, str],
    version: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_group, "PACKED_BYTES", packed_bytes)
    before, tensors = logprobs_of(client), tensors_of(trained)
    info = asked(client.get("/server_info", params={"config_format": "json"}))["vllm_config"]
    assert info["weight_transfer_config"] is not None and info["lora_config"] is None
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["parallel_config"]["data_parallel_size"] == 1
    world_size = asked(client.get("/get_world_size"))["world_size"] + 1
    names = sorted(tensors)
    update = {
        "names": names,
        "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [[*tensors[name].shape] for name in names],
    }
    with free_port() as port:
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        place |= {"world_size": world_size, "packed": packed_bytes > 0}
        address = GroupAddress("127.0.0.1", port, 1, world_size, "weight_transfer", "gloo")
        with start_trainer(address, trained, packed_bytes=packed_bytes):
            asked(client.post("/init_weight_transfer_engine", json={"init_info": place}))
            asked(client.post("/pause?mode=keep"))
            asked(client.post("/start_weight_update", json={}))
            asked(client.post("/update_weights", json={"update_info": update, **named}))
            asked(client.post("/finish_weight_update", json=finished))
            asked(client.post("/resume"))
    assert asked(client.get("/server_info"))["weight_version"] == version
    asked(client.post("/reset_prefix_cache"))
    assert logprobs_of(client) == expected != before


def test_no_request_is_computed_between_the_updates_of_one(
    serving: Served[AsyncEngine], client: httpx.Client
) -> None:
    engine = serving.engine
    asked(client.post("/start_weight_update"))
    asked(client.post("/resume"))
    asked(client.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)}))

    queued = serving.on_loop(
        lambda: engine.submit([*range(300, 310)], SamplingParams(max_tokens=2, ignore_eos=True))
    )
    assert serving.on_loop(lambda: engine.stats().num_queued) == 1
    wrong = client.post("/finish_weight_update", json={"weight_version": ""})
    assert wrong.status_code == 400 and error_of(wrong)["param"] == "weight_version"
    assert serving.on_loop(lambda: engine.stats().num_queued) == 1
    asked(client.post("/finish_weight_update"))
    asyncio.run_coroutine_threadsafe(queued.wait_finished(), serving.loop).result()
    assert queued.request.num_output_tokens == 2


def test_a_group_that_sends_pickles_is_refused_by_its_name(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "backend_of", lambda device: "nccl")
    place = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    refused = client.post("/init_weight_transfer_engine", json={"init_info": place})
    assert refused.status_code == 400 and "StatelessProcessGroup" in error_of(refused)["message"]


def test_a_model_sleeps_and_wakes_up(client: httpx.Client) -> None:
    before = logprobs_of(client)
    body = {"prompt": [300], "max_tokens": 1}
    for level in (1, 2):
        asked(client.post(f"/sleep?level={level}"))
        assert asked(client.get("/is_sleeping")) == {"is_sleeping": True}
        asked(client.get("/health"))  # a trainer may come
        for refused in (client.post("/v1/completions", json=body), client.get("/ready")):
            assert refused.status_code == 503 and error_of(refused)["code"] == "asleep"
        asked(client.post("/wake_up?tags=weights"))
        if level == 2:
            asked(client.post("/update_weights_from_disk", json={"model_path": str(DEMO_FOLDER)}))
        asked(client.post("/wake_up?tags=kv_cache"))
        assert asked(client.get("/is_sleeping")) == {"is_sleeping": False}
        assert logprobs_of(client) == before
        asked(client.get("/ready"))
    for path, param in [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=for+ever", "mode"),
        ("/wake_up?tags=drafter", "tags"),
    ]:
        wrong = client.post(path)
        assert wrong.status_code == 400 and error_of(wrong)["param"] == param


def test_weights_are_read_by_their_names(client: httpx.Client) -> None:
    tensors = tensors_of(DEMO_FOLDER)
    for name, num_rows in [(NORM, 3), (QUERY, 2), (QUERY, 100)]:
        body = {"name": name, "truncate_size": num_rows}
        found = asked(client.post("/get_weights_by_name", json=body))
        assert found == tensors[name].float()[:num_rows].tolist()
    refused = client.post("/get_weights_by_name", json={"name": "model.none", "truncate_size": 2})
    assert refused.status_code == 400 and "model.none cannot be read" in refused.text
    refused = client.post("/get_weights_by_name", json={"name": NORM, "truncate_size": 0})
    assert error_of(refused)["param"] == "truncate_size"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/update_weights",
            {"update_info": {"names": ["a"], "dtype_names": ["object"], "shapes": [[1]]}},
            "dtype_names: object is none",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [NORM], "dtype_names": ["float32"], "shapes": [[-1]]}},
            "has the shape",
        ),
        *(
            (
                "/update_weights",
                {
                    "update_info": {"names": [], "dtype_names": [], "shapes": []},
                    "weight_version": wrong,
                },
                "weight_version",
            )
            for wrong in ("", "7" * 257, 7)
        ),
        ("/init_weight_transfer_engine", {}, "init_info"),
        (
            "/init_weight_transfer_engine",
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": 70000,
                    "rank_offset": 1,
                    "world_size": 2,
                }
            },
            "init_info.master_port: allowed: 1 to 65535",
        ),
    ],
)
def test_what_is_wrong_is_a_400(
    client: httpx.Client, path: str, body: dict[str, Any], said: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and said in answer.text
