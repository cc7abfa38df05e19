"""TRL with a server of minisgl: the example that trains, and TRL's other client of vLLM's servers.

Skipped without TRL (try_trl.sh). For vLLM itself, the module of the example stands in.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.folders import SCRIPTS
from support.http_server import running, wait_for_health
from support.ports import free_port
from support.serving import Served, served
from transformers import AutoModelForCausalLM

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.models.hub import DEMO_FOLDER

EXAMPLES = SCRIPTS / "examples"
STEPS = 20
PROMPT = [*range(300, 320)]
pytestmark = [
    pytest.mark.trl,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: try_trl.sh"),
]


@pytest.fixture
def serving() -> Iterator[Served[AsyncEngine]]:
    options = EngineConfig(device="cpu", dtype="float32")
    names = (str(DEMO_FOLDER),)  # TRL asks for the model by its folder
    keys: dict[str, Any] = {"trainer": True, "admin_key": "admin"}
    with served(
        lambda: AsyncEngine.start(options), options, served_model_name=names, **keys
    ) as found:
        yield found
        found.on_loop(found.engine.audit)


def logprobs_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    """By transformers in float32: of each token after the first, given those before it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    following = torch.tensor(tokens[1:])[:, None]
    return logits[:-1].log_softmax(-1).gather(1, following)[:, 0]


def test_the_reward_rises_and_the_engine_has_the_weights_of_the_trainer(
    serving: Served[AsyncEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, versions = serving.engine.weights, [serving.engine.weights.version]
    update = weights.update_from_group

    async def noted(*args: Any, **options: Any) -> str:
        versions.append(await update(*args, **options))
        return versions[-1]

    monkeypatch.setattr(weights, "update_from_group", noted)
    address = serving.url.replace("http://", "http://trl:admin@")
    command = [sys.executable, str(EXAMPLES / "grpo.py"), str(tmp_path), address]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    # Once before the first step, and after each.
    assert len({*versions}) == len(versions) == STEPS + 2

    found = re.findall(r"step \d+: reward (\S+), KL \S+ \S+ \S+ \S+ (\S+)", ran.stdout)
    rewards, divergences = zip(*(map(float, each) for each in found), strict=True)
    assert len(rewards) == STEPS and sum(rewards[-5:]) > 5 * 0.8 > 5 * 0.5 > sum(rewards[:2])
    assert divergences[0] < 1e-7  # the trainer has the very weights that have answered

    body = {"prompt": PROMPT, "max_tokens": 16, "logprobs": 0, "return_token_ids": True, "seed": 1}
    with serving.http() as client:
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    answered = choice["token_ids"]
    expected = logprobs_of(tmp_path, PROMPT + answered)[len(PROMPT) - 1 :]
    torch.testing.assert_close(
        torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4, rtol=0
    )


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[ModuleType]:
    """The module of the example that stands in for vLLM."""
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(EXAMPLES)
        found = importlib.import_module("trl_on_cpu")
        found.stand_in_for_vllm()
        yield found
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("vllm", "trl"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def client(on_cpu: ModuleType) -> Iterator[Any]:
    """TRL's client of a server in a process of its own: a process has one group of a name."""
    client_of = importlib.import_module("trl.generation.vllm_client").VLLMClient
    options = ["--dtype", "float32", "--max-logprobs", "100", "--trainer", "--admin-key", "admin"]
    command = ["-m", "minisgl", "serve", str(DEMO_FOLDER), "--device", "cpu", *options]
    with free_port() as port, running(*command, "--port", str(port)) as process:
        wait_for_health(process, f"http://127.0.0.1:{port}", 200)
        yield client_of(base_url=f"http://trl:admin@127.0.0.1:{port}")


@pytest.mark.filterwarnings("default")  # of what TRL imports
def test_trls_client_samples_and_scores(client: Any) -> None:
    sampled = client.generate([PROMPT, PROMPT[:5]], n=2, max_tokens=4)
    assert sampled["prompt_ids"] == [PROMPT, PROMPT[:5]]
    assert [*map(len, sampled["completion_ids"])] == [*map(len, sampled["logprobs"])]
    assert len(sampled["completion_ids"]) == 4

    scored = client.get_sequence_logprobs([PROMPT], [10])
    assert len(scored["logprobs"][0][0]) == 100
    actual = torch.tensor(scored["actual_logprobs"][0])[:, 0]
    torch.testing.assert_close(actual, logprobs_of(DEMO_FOLDER, PROMPT)[9:], atol=1e-4, rtol=0)

    question = {"role": "user", "content": "What is 17 + 25?"}
    chosen = client.chat([[question]], max_tokens=8, structured_outputs_regex="[0-9]{2}x")
    assert len(chosen["completion_ids"][0]) == len(chosen["logprobs"][0]) > 0


@pytest.mark.filterwarnings("default")
def test_trls_client_replaces_weights(client: Any, on_cpu: ModuleType) -> None:
    info = client.get_server_info()["model_config"]
    assert info["logprobs_mode"] == "raw_logprobs" and info["dtype"] == "torch.float32"
    # What its init_communicator does, except on a CPU.
    with free_port() as port, ThreadPoolExecutor(1) as thread:
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        place |= {"world_size": client.get_world_size() + 1, "packed": True}
        joined = thread.submit(
            client._post,
            f"{client.base_url}/init_weight_transfer_engine",
            json={"init_info": place},
        )
        client.communicator = on_cpu.trainer_init(place)
        joined.result()
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    names = ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight")
    with client.weight_update():
        for name in names:
            client.update_named_param(name, tensors[name].float() * 2)
    client.reset_prefix_cache()
    client.close_communicator()
    for name in names:
        body: dict[str, Any] = {"name": name, "truncate_size": 1000}
        read = client._post(f"{client.base_url}/get_weights_by_name", json=body)
        assert read == (tensors[name].float() * 2).tolist()
    body = {"model_path": str(DEMO_FOLDER)}
    client._post(f"{client.base_url}/update_weights_from_disk", json=body)
