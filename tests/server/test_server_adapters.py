"""`model` chooses an adapter, or the model itself, at every endpoint; answers have its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.fake_engine import FakeEngine, names_of
from support.http_server import HELLO, error_of, http_client
from support.scripted_engine import ScriptedEngine, qwen
from support.serving import Served, demo_engine, served

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.router.config import RouterConfig
from minisgl.router.process import RouterProcess
from minisgl.server.answers.handover import PREFILL, PREFILLED, Handover
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess

ADAPTERS = ("sql", "poems/v2")
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3, "n": 2},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}
VECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": ("embed", {"input": ["a", "bc"]}),
    "/v1/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v2/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v1/score": ("rerank", {"text_1": "a", "text_2": "b"}),
}


def models_in(text: str) -> set[str]:
    """All that a stream says of its model."""
    events = [line.removeprefix("data: ") for line in text.splitlines()]
    found = [json.loads(event) for event in events if event.startswith("{")]
    parts = [each.get("response") or each.get("message") or each for each in found]
    return {part["model"] for part in parts if isinstance(part, dict) and "model" in part}


@pytest.mark.parametrize("model", [*ADAPTERS, "fake", None])
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_is_of_the_model_that_was_asked_for(
    path: str, stream: bool, model: str | None
) -> None:
    engine = FakeEngine(adapters=ADAPTERS)
    async with http_client(engine) as client:
        body = {**GENERATING[path], "model": model, "stream": stream}
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        said = models_in(response.text) if stream else {response.json()["model"]}
    assert said == {model or "fake"}
    assert engine.submitted
    wanted = [model] if model in ADAPTERS else []
    assert [stream.adapters for stream in engine.submitted] == [wanted] * len(engine.submitted)


@pytest.mark.parametrize("path", VECTORS)
async def test_vectors_and_scores_are_of_the_model_that_was_asked_for(path: str) -> None:
    task, body = VECTORS[path]
    engine = FakeEngine(task=task, adapters=ADAPTERS)
    async with http_client(engine) as client:
        for model in ("sql", "fake", "poems/v2"):
            response = await client.post(path, json={**body, "model": model})
            assert response.json()["model"] == model
    assert engine.vectors.adapters == ["sql", "poems/v2"]


@pytest.mark.parametrize("path", [*GENERATING, *OTHERS])
async def test_an_unknown_model_is_a_404_that_names_the_adapters(path: str) -> None:
    body = {**GENERATING, **OTHERS}[path]
    async with http_client(FakeEngine(adapters=ADAPTERS)) as client:
        for name in ADAPTERS:
            assert (await client.post(path, json={**body, "model": name})).status_code == 200
        response = await client.post(path, json={**body, "model": "SQL"})
    assert response.status_code == 404
    said = response.json()["error"]["message"]
    assert said == "The model 'SQL' does not exist; available: fake; adapters: sql, poems/v2."


async def test_without_adapters_nothing_is_said_of_them() -> None:
    async with http_client(FakeEngine()) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "model": "sql"})
        assert error_of(response)["param"] == "model"
        assert error_of(response)["message"] == "The model 'sql' does not exist; available: fake."


async def test_a_request_that_goes_on_from_an_answer_has_an_adapter_of_its_own() -> None:
    engine = FakeEngine(adapters=ADAPTERS)
    async with http_client(engine) as client:
        previous = None
        for model in ("sql", None, "poems/v2"):
            body = {**GENERATING["/v1/responses"], "model": model, "previous_response_id": previous}
            answer = (await client.post("/v1/responses", json=body)).json()
            assert answer["model"] == (model or "fake")
            previous = answer["id"]
            stored = (await client.get(f"/v1/responses/{previous}")).json()
            assert stored["model"] == answer["model"]
    assert [stream.adapters for stream in engine.submitted] == [["sql"], [], ["poems/v2"]]


@pytest.mark.parametrize("model", ["sql", "fake"])
async def test_masks_parsers_and_tools_go_with_an_adapter(model: str) -> None:
    engine = ScriptedEngine(qwen(), adapters=ADAPTERS)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine.answers = [f"<think>\nWell.\n</think>\n\n{call}"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "n": 2, "model": model}
    async with http_client(engine) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    await engine.close()
    assert answer["model"] == model
    for stream, choice in zip(engine.streams, answer["choices"], strict=True):
        assert stream.adapters == ([] if model == "fake" else [model])
        assert stream.matcher is not None
        assert choice["message"]["reasoning_content"] == "Well."
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


class HandingOver(FakeEngine):
    """Records for which adapters pages are offered and fetched."""

    handed_over: list[tuple[str, list[str]]]

    @property
    def pages(self) -> HandingOver:
        return self

    async def offer(self, *_: object, extras: Any, **__: object) -> bool:
        self.handed_over.append(("offered", names_of(extras)))
        return True

    async def fetch(self, *_: object, extras: Any, **__: object) -> bool:
        self.handed_over.append(("fetched", names_of(extras)))
        return True


def test_prompts_are_handed_over_for_their_adapters() -> None:
    async def start() -> HandingOver:
        engine = HandingOver(adapters=ADAPTERS)
        engine.handed_over = []
        return engine

    with served(start) as ours, ours.http() as client:
        ours.state.around = Handover(cast("AsyncEngine", ours.engine), "there").around
        for model in ("sql", "fake"):
            for header in (PREFILL, PREFILLED):
                body = {"messages": HELLO, "max_tokens": 3, "model": model}
                headers = {header.decode(): "there"}
                client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
    names = [("offered", ["sql"]), ("fetched", ["sql"]), ("offered", []), ("fetched", [])]
    assert ours.engine.handed_over == names


@pytest.fixture(scope="module")
def adapted() -> Iterator[Served[FakeEngine]]:
    async def start() -> FakeEngine:
        return FakeEngine(adapters=ADAPTERS)

    with served(start, served_model_name=("base", "alias")) as found:
        yield found


@pytest.fixture(scope="module")
def client(adapted: Served[FakeEngine]) -> Iterator[openai.OpenAI]:
    with adapted.openai() as found:
        yield found


def test_the_list_of_models_tells_whose_adapters_they_are(client: openai.OpenAI) -> None:
    listed = [each.to_dict() for each in client.models.list()]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        ("base", "base", None),
        ("alias", "base", None),
        ("sql", "base", "base"),
        ("poems/v2", "base", "base"),
    ]
    assert client.models.retrieve("poems/v2").to_dict()["parent"] == "base"
    with pytest.raises(openai.NotFoundError, match="adapters: sql, poems/v2"):
        client.models.retrieve("prose")


def test_a_client_streams_from_an_adapter(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sql", messages=HELLO, max_tokens=4, seed=0, stream=True
    )
    chunks = [*stream]
    assert {chunk.model for chunk in chunks} == {"sql"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcd"


def test_answers_over_http_have_the_tokens_of_their_adapters(tmp_path: Path) -> None:
    models = {f"{seed}": save_demo_adapter(tmp_path / f"{seed}", seed) for seed in range(2)}
    lora = tuple(f"{name}={tmp_path / name}" for name in models)
    prompts = [[*range(300, 320)], [*range(500, 530)]]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}

    async def start() -> AsyncEngine:
        return await demo_engine(lora=lora, max_loras=1, dtype="float32")

    with served(start) as ours, ours.openai() as client, ThreadPoolExecutor(3) as pool:

        def tokens_of(model: str) -> list[list[int]]:
            answer = client.completions.create(model=model, extra_body=extra, **asked)
            return [choice.to_dict()["token_ids"] for choice in answer.choices]  # type: ignore

        found = [*pool.map(tokens_of, ["0", "demo", "1"])]  # at once, with room for one adapter
    wanted = [models["0"], None, models["1"]]
    assert found == [[greedy_tokens(model, each, 8) for each in prompts] for model in wanted]
    assert len({(*each[0],) for each in found}) == 3


@pytest.mark.parametrize(
    ("name", "model", "names", "said"),
    [
        ("sql", "folder", ("mine", "sql"), "this is a name of the model itself; allowed: another"),
        ("sql", "sql", (), "this is a name of the model itself"),
        ("demo", "", (), "this is a name of the model itself"),
        ("caf\udce9", "folder", (), "the name is not UTF-8"),
    ],
)
def test_a_name_that_an_adapter_cannot_have_is_refused_before_loading(
    name: str, model: str, names: tuple[str, ...], said: str
) -> None:
    lora = ("other=there", f"{name}=there")
    options = EngineConfig(model=model, lora=lora, device="cpu")
    config = ServerConfig(served_model_name=names)
    name = name if name.isascii() else ascii(name)
    for start in (
        lambda: ServerProcess(options, config),
        lambda: RouterProcess(options, config, RouterConfig(replicas=2), replica=(), front=()),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"--lora {name}: {said}")):
            start()
