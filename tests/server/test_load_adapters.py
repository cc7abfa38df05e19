"""Adapters are loaded and unloaded over HTTP: by whom, from where, and what requests get."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.fake_engine import FakeEngine
from support.forked_ranks import forked_ranks
from support.http_server import HELLO, error_of, http_client
from support.serving import Served, demo_engine, served
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.images.prompt import Prompt
from minisgl.router.config import RouterConfig
from minisgl.router.process import RouterProcess
from minisgl.server import ADMIN_VARIABLE, with_all_keys
from minisgl.server.config import ServerConfig
from minisgl.server.handlers.adapters import LOAD, UNLOAD, LoadAdapter, UnloadAdapter
from minisgl.server.process import ServerProcess

ADMIN = {"authorization": "Bearer admin"}
ROOM = EngineConfig(max_loras=1)
PROMPT = [*range(300, 320)]
TENSORS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root") / "adapters"


@pytest.fixture(scope="module")
def models(root: Path) -> dict[str, PreTrainedModel]:
    """Adapted models, by the folders of their adapters."""
    return {f"v{seed}": save_demo_adapter(root / f"v{seed}", seed) for seed in range(2)}


@pytest.fixture(scope="module")
def adapted(root: Path, models: object) -> Iterator[Served[AsyncEngine]]:
    """Two ranks, which have room for one adapter at a time."""

    async def start() -> AsyncEngine:
        with forked_ranks():
            return await demo_engine(max_loras=1, tp=2, dtype="float32")

    options: dict[str, Any] = {"lora_root": str(root), "admin_key": "admin"}
    with served(start, ROOM, **options) as found:
        yield found


@pytest.fixture
def client(adapted: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    with adapted.http() as found:
        found.timeout = None  # type: ignore[assignment]
        yield found
        for name in names_at(found)[1:]:
            found.post(UNLOAD, json={"lora_name": name}, headers=ADMIN).raise_for_status()
        adapted.on_loop(adapted.engine.audit)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_adapter_that_is_unloaded_while_a_prompt_is_read_is_not_replaced_by_the_model(
    path: str,
) -> None:
    class Leaving(FakeEngine):
        """Its adapter is unloaded while the first prompt is tokenized."""

        async def encode(self, text: str, /, **_: bool) -> list[int]:
            await self.adapters.unload("sql")
            return list(text.encode())

        async def encode_conversation(self, *_: Any, **__: Any) -> Prompt:
            return Prompt(await self.encode("a"))

    engine = Leaving(adapters=["sql"])
    asked = {"prompt": "a"} if "chat" not in path else {"messages": HELLO}
    async with http_client(engine) as http:
        answer = await http.post(path, json={"model": "sql", "max_tokens": 2, **asked})
        assert [stream.adapters for stream in engine.submitted] == [["sql"]]
        assert answer.json()["model"] == "sql"
        again = await http.post(path, json={"model": "sql", "max_tokens": 2, **asked})
        assert again.status_code == 404


def names_at(client: httpx.Client) -> list[str]:
    return [each["id"] for each in client.get("/v1/models").json()["data"]]


def load(client: httpx.Client, name: Any, path: Any, **more: Any) -> httpx.Response:
    return client.post(LOAD, json={"lora_name": name, "lora_path": path, **more}, headers=ADMIN)


def asked_of(model: str, num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    greedy = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": model, "prompt": PROMPT, **greedy, "return_token_ids": True, **more}


def tokens_of(client: httpx.Client, model: str) -> list[int]:
    answer = client.post("/v1/completions", json=asked_of(model)).raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def fingerprint_of(client: httpx.Client) -> str:
    answer = client.post("/v1/completions", json=asked_of("sql", 1)).raise_for_status()
    return str(answer.json()["system_fingerprint"])


def test_what_is_loaded_answers_at_once_and_what_is_unloaded_no_more(
    client: httpx.Client, models: dict[str, PreTrainedModel]
) -> None:
    assert names_at(client) == ["demo"]
    answer = load(client, "sql", "v0")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    fingerprint = fingerprint_of(client)
    listed = client.get("/v1/models/sql").json()
    assert (listed["id"], listed["parent"]) == ("sql", "demo")
    assert tokens_of(client, "sql") == greedy_tokens(models["v0"], PROMPT, 8)
    assert tokens_of(client, "demo") == greedy_tokens(None, PROMPT, 8)
    again = load(client, "sql", "v0")
    assert again.status_code == 200
    other = load(client, "sql", "v1")
    assert other.status_code == 409 and error_of(other)["code"] == "adapter_exists"
    assert "unload that first" in other.text and "loaded: sql." in other.text
    answer = client.post(UNLOAD, json={"lora_name": "sql"}, headers=ADMIN)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    gone = client.post("/v1/completions", json=asked_of("sql"))
    assert gone.status_code == 404 and names_at(client) == ["demo"]
    answer = client.post(UNLOAD, json={"lora_name": "sql"}, headers=ADMIN)
    assert answer.status_code == 404
    assert error_of(answer)["message"] == "There is no adapter 'sql'; loaded: none."
    assert load(client, "sql", str(Path("v0", "..", "v1"))).status_code == 200
    assert tokens_of(client, "sql") == greedy_tokens(models["v1"], PROMPT, 8)
    assert fingerprint_of(client) != fingerprint  # of another adapter of that name


def test_a_stream_ends_with_the_adapter_that_it_began_with(
    client: httpx.Client, models: dict[str, PreTrainedModel]
) -> None:
    load(client, "x", "v0").raise_for_status()
    found: list[int] = []
    body = asked_of("x", 40, stream=True)
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        found += json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        client.post(UNLOAD, json={"lora_name": "x"}, headers=ADMIN).raise_for_status()
        load(client, "x", "v1").raise_for_status()
        for line in lines:
            for choice in json.loads(line[6:])["choices"]:
                found += choice["token_ids"]
    assert found == greedy_tokens(models["v0"], PROMPT, 40)
    assert tokens_of(client, "x") == greedy_tokens(models["v1"], PROMPT, 8)


def test_requests_loads_and_unloads_of_one_name_at_once(
    client: httpx.Client, models: dict[str, PreTrainedModel]
) -> None:
    """Each request is of an adapter that the name had, or a 404; each change is one or an error."""
    wanted = {tuple(greedy_tokens(model, PROMPT, 8)) for model in models.values()}
    ended, done = threading.Event(), set[int]()

    def ask() -> set[tuple[int, ...]]:
        found = set[tuple[int, ...]]()
        while not ended.is_set():
            answer = client.post("/v1/completions", json=asked_of("x"))
            assert answer.status_code in (200, 404), answer.text
            if answer.status_code == 200:
                found.add(tuple(answer.json()["choices"][0]["token_ids"]))
        return found

    def change(folder: str) -> None:
        for _ in range(6):
            done.add(load(client, "x", folder).status_code)
            unloaded = client.post(UNLOAD, json={"lora_name": "x"}, headers=ADMIN)
            assert unloaded.status_code in (200, 404)

    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        for changing in [pool.submit(change, folder) for folder in models]:
            changing.result()
        load(client, "x", "v0").raise_for_status()
        assert tokens_of(client, "x") == greedy_tokens(models["v0"], PROMPT, 8)
        ended.set()
        found = set[tuple[int, ...]]().union(*(each.result() for each in asking))
    assert 200 in done and done <= {200, 409}
    assert found and found <= wanted


def broken_in(root: Path, name: str, tensors: dict[str, torch.Tensor] | bytes | None) -> str:
    """An adapter like v0 with other tensors, or none."""
    shutil.copytree(root / "v0", root / name)
    if tensors is None:
        (root / name / TENSORS).unlink()
    elif isinstance(tensors, bytes):
        (root / name / TENSORS).write_bytes(tensors)
    else:
        save_file(tensors, root / name / TENSORS)
    return name


def test_what_is_broken_or_lies_elsewhere_is_refused_and_changes_nothing(
    client: httpx.Client, root: Path, models: dict[str, PreTrainedModel]
) -> None:
    load(client, "good", "v0").raise_for_status()
    whole = load_file(root / "v0" / TENSORS)
    first = next(iter(whole))
    nan = {**whole, first: torch.full_like(whole[first], torch.nan)}
    wide = {**whole, first: torch.ones(len(whole[first]), 7)}
    outside = root.parent / "outside"
    shutil.copytree(root / "v0", outside)
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for path in outside.iterdir():
        (root / "files" / path.name).symlink_to(path)
    (root / "loop").symlink_to(root / "loop")
    cases = {
        broken_in(root, "cut", (root / "v0" / TENSORS).read_bytes()[:-5]): "cannot be read",
        broken_in(root, "noise", b"\xff" * 100): "cannot be read",
        broken_in(root, "nan", nan): "has NaN or infinities",
        broken_in(root, "wide", wide): "the shapes of this model",
        broken_in(root, "empty", {}): "has no tensors",
        broken_in(root, "lacks", None): f"has no file {TENSORS}",
        "absent": "has no file adapter_config.json",
        "../outside": "lies outside of",
        "v0/../../outside": "lies outside of",
        str(outside): "lies outside of",
        "link": "lies outside of",
        "files": "lies outside of",
        "/etc": "lies outside of",
        "/proc/self": "lies outside of",
        "../absent": "lies outside of",  # not whether it is there
        "loop": "cannot be read",
        "a\0b": "cannot be read",
        "x" * 9999: "cannot be read",
    }
    for path, said in cases.items():
        answer = load(client, "bad", path)
        assert answer.status_code == 400, path
        assert said in error_of(answer)["message"], path
        assert error_of(answer)["message"].endswith("; loaded: good.") or len(path) > 900
    assert names_at(client) == ["demo", "good"]
    assert tokens_of(client, "good") == greedy_tokens(models["v0"], PROMPT, 8)
    assert load(client, "absolute", str(root / "v1")).status_code == 200


def test_names_and_bodies_that_cannot_be_are_refused(client: httpx.Client) -> None:
    for body, said in (
        ({"lora_name": "demo", "lora_path": "v0"}, "a name of the model itself"),
        ({"lora_name": "", "lora_path": "v0"}, "1 to 256 printable characters"),
        ({"lora_name": "a\r\nb", "lora_path": "v0"}, "1 to 256 printable characters"),
        ({"lora_name": "a" * 257, "lora_path": "v0"}, "1 to 256 printable characters"),
        ({"lora_name": "a", "lora_path": ""}, "has no file"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_path": "v0"}, "lora_name"),
        ({"lora_name": ["a"], "lora_path": "v0"}, "lora_name"),
        ({"lora_name": "a", "lora_path": {"v": 0}}, "lora_path"),
        ([], ""),
    ):
        answer = client.post(LOAD, json=body, headers=ADMIN)
        assert answer.status_code == 400 and said in error_of(answer)["message"], body
    answer = client.post(LOAD, content="{", headers={**ADMIN, "content-type": "application/json"})
    assert answer.status_code == 400
    assert client.post(LOAD, content="{}", headers=ADMIN).status_code == 400  # of no JSON type
    assert error_of(load(client, "a\r\nb", "v0"))["param"] == "lora_name"
    assert client.post(UNLOAD, json={"lora_name": "demo"}, headers=ADMIN).status_code == 404
    assert client.get(LOAD, headers=ADMIN).status_code == 405
    assert names_at(client) == ["demo"]


VALUES = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.sampled_from(["v0", "x"])


def test_any_values_give_an_answer_or_a_4xx(client: httpx.Client, models: object) -> None:
    @settings(max_examples=100, deadline=None)
    @given(path=st.sampled_from([LOAD, UNLOAD]), name=VALUES, folder=VALUES)
    def check(path: str, name: Any, folder: Any) -> None:
        body = json.dumps({"lora_name": name, "lora_path": folder})
        headers = {**ADMIN, "content-type": "application/json"}
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code in (200, 400, 404, 409)
        assert answer.status_code == 200 or error_of(answer)["message"]

    check()


def test_the_description_has_both_with_the_admin_key(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert "key" in document["components"]["securitySchemes"]
    assert "security" not in document["paths"]["/v1/completions"]["post"]
    for path, statuses, kind in (
        (LOAD, {"200", "400", "401", "409"}, LoadAdapter),
        (UNLOAD, {"200", "400", "401", "404"}, UnloadAdapter),
    ):
        described = document["paths"][path]["post"]
        assert described["security"] and statuses <= described["responses"].keys()
        example = described["requestBody"]["content"]["application/json"]["example"]
        assert msgspec.convert(example, kind)
        schema = document["components"]["schemas"][kind.__name__]
        assert schema["required"] == [*schema["properties"]] == [*example]
        for field in schema["properties"].values():
            assert field["description"] and field["examples"] == ["sql"]


@pytest.mark.parametrize("keys", [(), ("user", "admin")])
async def test_only_the_admin_key_loads_adapters(keys: tuple[str, ...], tmp_path: Path) -> None:
    options: dict[str, Any] = {"lora_root": str(tmp_path), "admin_key": "admin", "api_key": keys}
    engine = FakeEngine()
    async with http_client(engine, engine_options=ROOM, **options) as client:
        for path, body in (
            (LOAD, {"lora_name": "a", "lora_path": "b"}),
            (UNLOAD, {"lora_name": "a"}),
        ):
            for headers in (
                {},
                {"authorization": "Bearer user"},
                {"authorization": "Bearer"},
                {"authorization": "admin"},
                {"x-api-key": "Admin"},
            ):
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 401 and not engine.adapters
                answer = await client.post(path, content="{", headers=headers)
                assert answer.status_code == 401  # before anything is read
        body = {"lora_name": "a", "lora_path": "b"}
        answer = await client.post(LOAD, json=body, headers={"x-api-key": "admin"})
        assert answer.status_code == 200
        assert engine.adapters["a"].folder == str(tmp_path / "b")


async def test_no_key_is_the_admin_key_where_there_is_none(tmp_path: Path) -> None:
    async with http_client(FakeEngine(), engine_options=ROOM, lora_root=str(tmp_path)) as client:
        for headers in ({}, {"authorization": "Bearer"}, {"x-api-key": ""}):
            body = {"lora_name": "a", "lora_path": "b"}
            assert (await client.post(LOAD, json=body, headers=headers)).status_code == 401


async def test_without_a_root_there_is_nothing_to_ask() -> None:
    async with http_client(FakeEngine(), engine_options=ROOM, admin_key="admin") as client:
        for path in (LOAD, UNLOAD):
            answer = await client.post(path, json={"lora_name": "a"}, headers=ADMIN)
            assert answer.status_code == 404 and error_of(answer)["code"] == "unknown_url"
            assert path not in (await client.get("/openapi.json")).json()["paths"]


def test_a_root_needs_a_key_and_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(lora_root="there")
    with pytest.raises(ConfigError, match=r"--lora-root there: .* MINISGL_ADMIN_KEY"):
        with_all_keys(config)
    monkeypatch.setenv(ADMIN_VARIABLE, "admin")
    assert with_all_keys(config).admin_key == "admin"
    assert with_all_keys(config).api_key == ()
    given = ServerConfig(lora_root="there", admin_key="mine", api_key=("user",))
    assert with_all_keys(given).api_key == ("user", "mine")
    monkeypatch.setenv(ADMIN_VARIABLE, "two words")
    with pytest.raises(ConfigError, match="--admin-key"):
        with_all_keys(config)
    with pytest.raises(ConfigError, match=r"--lora-root there: there is no room .* --max-loras"):
        ServerProcess(EngineConfig(), config)
    for kept in (EngineConfig(max_loras=1), EngineConfig(lora=("a=b",))):
        ServerProcess(kept, config)
    router = RouterConfig(replicas=2, router_processes=2)
    options = EngineConfig(device="cpu", max_loras=1)
    with pytest.raises(ConfigError, match=r"--lora-root there: .* routing processes"):
        RouterProcess(options, given, router, replica=(), front=())
