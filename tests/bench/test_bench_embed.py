"""`--workload embed` asks for one vector of each prompt, in the engine and over HTTP."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_server import serving
from support.pooled_checkpoints import make_pooled, save_modules
from support.serving import demo_engine, served

from minisgl.bench.config import BenchConfig, ReportConfig
from minisgl.bench.offline import bench_offline
from minisgl.bench.online.load_config import LoadConfig, check_load
from minisgl.bench.online.run import OnlineRunError
from minisgl.bench.serve import bench_serve
from minisgl.bench.workload.config import WorkloadConfig, check_lengths, engine_for
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError

EMBED = WorkloadConfig(workload="embed", input_len=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "vectors"
    found.mkdir()
    make_pooled("qwen3", found)
    save_modules(found, "lasttoken")
    return found


def check_figures(figures: dict[str, Any], printed: str) -> None:
    assert "4 requests, 6 tokens in, a vector out, seed 0" in printed
    assert (figures["num_requests"], figures["num_prompt_tokens"]) == (4, 24)
    assert figures["num_output_tokens"] == 0 and figures["tpot_s"] is None
    assert figures["input_tokens_per_s"] * figures["elapsed_s"] == pytest.approx(24)
    assert figures["requests_per_s"] * figures["elapsed_s"] == pytest.approx(4)
    assert figures["ttft_s"] == figures["e2e_s"]
    told = f"{figures['input_tokens_per_s']:,.1f} prompt tok/s, {figures['requests_per_s']:,.2f}"
    assert printed.splitlines()[-1].startswith(f"{told} requests/s: 24 tokens of 4 requests in")
    assert "output tok/s" not in printed and "output tokens" not in printed


@pytest.mark.parametrize("most", [None, 1])
async def test_an_offline_run_counts_requests_and_prompt_tokens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int | None
) -> None:
    file = tmp_path / "bench.json"
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=65)
    config = BenchConfig(num_requests=4, repeat=3, json_file=str(file))
    assert await bench_offline(engine, config, EMBED, ReportConfig(), most) == 0
    found = json.loads(file.read_text())
    requests = found["run"]["requests"]
    follow = [one["last_token_s"] <= other["submitted_s"] for one, other in pairwise(requests)]
    assert follow == [most == 1] * 3
    printed = capsys.readouterr().out
    check_figures(found["figures"], printed)
    assert found["figures"]["num_cached_tokens"] == 0  # no run repeats another one's prompts
    assert found["figures"]["num_steps"] >= 1 and found["limit"] is None
    assert "output_tokens_per_s" not in found["spreads"]


async def test_a_server_is_asked_for_vectors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 65}
    with served(lambda: demo_engine(model=str(folder), **options)) as server:
        load = LoadConfig(url=server.url, max_concurrency=("2",), goodput=("e2e:60000",))
        config = BenchConfig(num_requests=4, repeat=1, json_file=str(file))
        assert await bench_serve(EngineConfig(), config, EMBED, load, ReportConfig()) == 0
        totals = server.on_loop(server.engine.stats).totals
    [point] = json.loads(file.read_text())["points"]
    printed = capsys.readouterr().out
    check_figures(point["figures"], printed)
    assert "over /embeddings" in printed and not point["failures"]
    assert point["figures"]["goodput"]["share"] == 1.0
    assert sum(totals.num_finished.values()) == 4


async def test_a_server_without_vectors_is_an_error() -> None:
    async with serving(FakeEngine()) as url:
        config = BenchConfig(num_requests=1, repeat=1)
        with pytest.raises(OnlineRunError, match="400: /v1/embeddings is not available"):
            await bench_serve(EngineConfig(), config, EMBED, LoadConfig(url=url), ReportConfig())


def test_options_of_outputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="--output-len 3: not with --workload embed"):
        WorkloadConfig(workload="embed", output_len=3)
    for config in (BenchConfig(max_output_length=4), BenchConfig(structured=0.5)):
        with pytest.raises(ConfigError, match="not with --workload embed"):
            check_lengths(config, EMBED)
    with pytest.raises(ConfigError, match="--endpoint chat: allowed with --workload embed: auto"):
        check_load(EMBED, LoadConfig(endpoint="chat"))
    with pytest.raises(ConfigError, match="--task rerank: allowed with --workload embed: embed"):
        engine_for(EMBED, EngineConfig(task="rerank"))
    assert engine_for(EMBED, EngineConfig()).task == "embed"
    assert engine_for(WorkloadConfig(), EngineConfig(task="generate")).task == "generate"
