"""/metrics, scraped over a real socket."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.engine_loop import ScriptedRunner, deltas_of, engine_on, params
from support.fake_engine import FakeEngine
from support.folders import ROOT
from support.http_server import http_client
from support.parity import case_of, load_engine
from support.waiting import until

from minisgl.device.gpu_memory import GPUMemory, gpu_memory
from minisgl.engine import AsyncEngine
from minisgl.engine.stats import REQUEST_BOUNDS, STEP_BOUNDS, TOKEN_BOUNDS
from minisgl.kvcache.snapshots import Snapshots
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.metrics_format import OPEN_METRICS, TEXT, format_for

README = (ROOT / "minisgl/server/README.md").read_text()
OF_THE_SERVER = {"minisgl_info", "minisgl_http_responses", "minisgl_tool_calls"}
OF_THE_PROCESS = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds",
    "process_open_fds",
    "process_max_fds",
}
ACCEPT = {
    "accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
}  # as Prometheus sends it

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scrape:
    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.families = {
            family.name: family for family in text_string_to_metric_families(response.text)
        }
        self._samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """0 where nothing has been counted with such labels."""
        assert any(known == name for known, _ in self._samples), f"no sample of {name}"
        return self._samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def buckets(self, name: str) -> dict[str, float]:
        return {
            sample.labels["le"]: sample.value
            for sample in self.families[name].samples
            if sample.name == f"{name}_bucket"
        }


async def scrape(client: httpx.AsyncClient) -> Scrape:
    return Scrape(await client.get("/metrics"))


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "ignore_eos": True, "seed": 0, **fields}


async def test_scraped_counters_agree_with_what_clients_received() -> None:
    runner = ScriptedRunner(page_size=4)
    async with engine_on(runner, tokenizer=True) as engine, http_client(engine) as client:
        usages = []
        for text in ("How are you today?", "How are you today?", "What is your name?"):
            asked = chat(text, max_tokens=20)
            answer = await client.post("/v1/chat/completions", json=asked)
            usages.append(answer.json()["usage"])
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
        await client.post("/v1/chat/completions", json=chat("x", temperature=3))
        await client.post("/v1/chat/completions", json=chat("x", max_tokens=100_000))
        await client.get("/v1/models/fake")
        await client.get("/v1/models/another")
        await client.get("/what/a/path")
        await client.get("/v1/completions")
        found = await scrape(client)
        again = await scrape(client)

    num_output = sum(usage["completion_tokens"] for usage in usages)
    assert found("minisgl_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert found("minisgl_cached_prompt_tokens_total") == sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    )
    assert found("minisgl_generated_tokens_total") == num_output == 60
    assert found("minisgl_requests_finished_total", reason="length") == 3
    for reason in ("stop", "abort", "error"):
        assert found("minisgl_requests_finished_total", reason=reason) == 0
    assert found("minisgl_retractions_total") == found("minisgl_graph_steps_total") == 0
    assert found("minisgl_time_to_first_token_seconds_count") == 3
    assert found("minisgl_request_seconds_count") == 3
    assert found("minisgl_inter_token_seconds_count") == num_output - 3
    for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "prompt_tokens"):
        assert found(f"minisgl_request_{name}_count") == 3
    assert found("minisgl_request_prompt_tokens_sum") == found("minisgl_prompt_tokens_total")
    assert found("minisgl_request_generated_tokens_sum") == num_output
    assert found("minisgl_request_generated_tokens_count") == 3
    lengths = found.buckets("minisgl_request_generated_tokens")
    assert (lengths["16.0"], lengths["32.0"]) == (0, 3)
    phases = sum(
        found(f"minisgl_request_{phase}_seconds_sum") for phase in ("queue", "prefill", "decode")
    )
    assert 0 < phases <= found("minisgl_request_seconds_sum")
    assert found("minisgl_step_seconds_count") == len(runner.launched)
    assert 0 < found("minisgl_step_seconds_sum") <= found("minisgl_request_seconds_sum")
    for gauge in ("running_requests", "queued_requests", "token_usage_ratio"):
        assert found(f"minisgl_{gauge}") == 0

    responses = {
        ("/v1/chat/completions", "200"): 3,
        ("/v1/chat/completions", "400"): 2,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 1,
        ("/v1/completions", "405"): 1,
        ("other", "404"): 1,
    }
    name = "minisgl_http_responses_total"
    assert {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in found.families["minisgl_http_responses"].samples
    } == responses
    assert again(name, route="/metrics", status="200") == 1


async def test_gauges_report_running_and_queued_requests_and_used_pages() -> None:
    runner = ScriptedRunner(page_size=4)
    runner.may_collect.clear()
    async with (
        engine_on(runner, max_running_requests=2, num_pages=101) as engine,
        http_client(engine) as client,
    ):
        streams = [engine.submit([i] * 9, params(2, ignore_eos=True)) for i in range(5)]
        await until(lambda: engine.stats().num_running == 2)
        found = await scrape(client)
        assert found("minisgl_running_requests") == 2
        assert found("minisgl_queued_requests") == 3
        assert found("minisgl_token_usage_ratio") == engine.stats().num_used_pages / 100 > 0
        assert found("minisgl_kv_capacity_tokens") == 100 * 4
        for stream in streams[1:]:
            stream.abort()
        found = await scrape(client)
        assert found("minisgl_requests_finished_total", reason="abort") == 4
        # Three of them waited until their end.
        assert found("minisgl_request_queue_seconds_count") == 4
        assert found("minisgl_request_prefill_seconds_count") == 0
        runner.may_collect.set()
        await deltas_of(streams[0])


async def test_histogram_buckets_are_cumulative_and_complete() -> None:
    async with engine_on(ScriptedRunner(page_size=4)) as engine, http_client(engine) as client:
        await deltas_of(engine.submit([1], params(30, ignore_eos=True)))
        found = await scrape(client)
    for name, bounds in (
        ("minisgl_step_seconds", STEP_BOUNDS),
        ("minisgl_inter_token_seconds", STEP_BOUNDS),
        ("minisgl_time_to_first_token_seconds", REQUEST_BOUNDS),
        ("minisgl_request_seconds", REQUEST_BOUNDS),
        ("minisgl_request_queue_seconds", REQUEST_BOUNDS),
        ("minisgl_request_prompt_tokens", TOKEN_BOUNDS),
        ("minisgl_request_generated_tokens", TOKEN_BOUNDS),
    ):
        buckets = found.buckets(name)
        assert [float(bound) for bound in buckets] == [*bounds, float("inf")]
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets["+Inf"] == found(f"{name}_count") > 0


async def test_retractions_are_counted() -> None:
    async with (
        engine_on(
            ScriptedRunner(page_size=4), num_pages=20, schedule_conservativeness=0.1
        ) as engine,
        http_client(engine) as client,
    ):
        streams = [engine.submit([i, 1, 2], params(60, ignore_eos=True)) for i in range(6)]
        await asyncio.gather(*map(deltas_of, streams))
        found = await scrape(client)
        assert found("minisgl_retractions_total") == engine.stats().counters.num_retractions > 0


async def test_a_client_that_disconnects_before_its_answer_counts_as_499(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "minisgl")
    engine = FakeEngine()
    engine.gate.clear()
    async with http_client(engine) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: bool(engine.running))
        asking.cancel()
        await until(lambda: "/v1/completions 499 in " in caplog.text)  # it was counted just before
        found = await scrape(client)
    name = "minisgl_http_responses_total"
    assert found(name, route="/v1/completions", status="499") == 1


async def test_an_unexpected_error_is_a_counted_500_with_cors_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, origin = FakeEngine(), "https://example.org"

    async def broken(text: str) -> list[int]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(engine, "encode", broken)
    async with http_client(engine, cors_origin=(origin,)) as client:
        headers = {"origin": origin}
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        found = await scrape(client)
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.json()["error"]["type"] == "internal_error"
    assert "defect" not in answer.text
    assert found("minisgl_http_responses_total", route="/v1/completions", status="500") == 1


async def test_servers_of_one_process_count_separately_from_zero() -> None:
    async def one() -> tuple[Scrape, Scrape]:
        async with engine_on(ScriptedRunner(page_size=4)) as engine, http_client(engine) as client:
            before = await scrape(client)
            await client.get("/version")
            await deltas_of(engine.submit([1], params(5, ignore_eos=True)))
            return before, await scrape(client)

    for before, after in await asyncio.gather(one(), one()):
        assert before.families["minisgl_http_responses"].samples == []
        assert before("minisgl_generated_tokens_total") == 0
        assert after("minisgl_generated_tokens_total") == 5
        assert after("minisgl_http_responses_total", route="/version", status="200") == 1


async def test_metrics_are_served_without_a_key_in_every_phase() -> None:
    state = EngineState(ServerConfig(api_key=("secret",)))
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        loading = await scrape(client)
        known = OF_THE_SERVER | OF_THE_PROCESS
        assert loading.families.keys() == known | {"minisgl_loading_ratio"}
        engine = FakeEngine()
        state.start(engine)
        ready = await scrape(client)
        state.drain()
        draining = await scrape(client)
        engine.fail(RuntimeError("the device is gone"))
        dead = await scrape(client)
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 401
    assert ready.families.keys() == draining.families.keys() == dead.families.keys()
    [info] = ready.families["minisgl_info"].samples
    assert info.labels["model"] == "fake"
    assert info.labels["version"]
    counted = dead("minisgl_http_responses_total", route="/metrics", status="200")
    assert counted == 3


async def test_metric_names_have_units_and_are_listed_in_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineState, "gpu_memory", lambda _: GPUMemory(used=1, total=3))
    runner = ScriptedRunner(page_size=4)
    options: Any = {"host_cache": 0.1, "speculative": "ngram"}
    keys = ("ada: secret",)
    async with engine_on(runner, **options) as engine, http_client(engine, api_key=keys) as client:
        await engine.pages.share(str(tmp_path / "pages"), always_load=False)
        kv = engine._scheduler.kv
        kv.snapshots = Snapshots(3, kv._cache)  # as of a model with states
        await client.get("/version")
        await client.get("/v1/models", headers={"x-api-key": "secret"})
        found = await scrape(client)
    expected = []
    for family in found.families.values():
        name, kind = family.name, family.type
        if kind == "histogram":
            assert name.endswith(("_seconds", "_tokens"))
        elif kind == "counter":
            name += "_total"
        assert name.startswith(("minisgl_", "process_"))
        expected.append((name, kind))
    section = README.partition("## Metrics\n")[2].partition("\n## ")[0]
    own = ("| `minisgl_", "| `process_")
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith(own)]
    documented = [(name.split("`")[1].partition("{")[0], kind.strip()) for name, kind in rows]
    assert documented == expected
    peers = [line.split("|")[2] for line in section.splitlines() if line.startswith("| `vllm:")]
    assert len(peers) > 15
    assert {name.strip(" `") for name in peers} <= {name for name, _ in expected}


def values(families: Iterable[Metric]) -> Samples:
    """Without those of the process, which change between two scrapes."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("minisgl_")
    }


async def test_a_client_that_asks_for_openmetrics_gets_the_same_values_with_their_units() -> None:
    async with engine_on(ScriptedRunner(page_size=4)) as engine, http_client(engine) as client:
        await deltas_of(engine.submit([1, 2], params(30, ignore_eos=True)))
        await client.get("/metrics")
        answer = await client.get("/metrics", headers=ACCEPT)
        families = [*openmetrics.text_string_to_metric_families(answer.text)]
        plain = await scrape(client)
    assert answer.headers["content-type"] == OPEN_METRICS.content_type
    assert answer.headers["vary"] == "Accept"
    assert answer.text.endswith("\n# EOF\n")
    found, expected = values(families), values(plain.families.values())
    scrapes = ("minisgl_http_responses_total", (("route", "/metrics"), ("status", "200")))
    assert expected.pop(scrapes) == found.pop(scrapes) + 1 == 2
    assert found == expected
    names = {family.name: family for family in families}
    assert (names["minisgl"].type, names["minisgl_generated_tokens"].type) == ("info", "counter")
    for name, unit in {
        "minisgl_generated_tokens": "tokens",
        "minisgl_kv_capacity_tokens": "tokens",
        "minisgl_token_usage_ratio": "ratio",
        "minisgl_step_seconds": "seconds",
        "minisgl_request_prompt_tokens": "tokens",
        "minisgl_running_requests": "",
    }.items():
        assert names[name].unit == unit


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (ACCEPT["accept"], OPEN_METRICS),
        (OPEN_METRICS.content_type, OPEN_METRICS),
        ("Application/OpenMetrics-Text", OPEN_METRICS),
        ("text/plain;q=0.5, application/openmetrics-text;q=0.5", OPEN_METRICS),
        ("text/plain;q=0.6, application/openmetrics-text;q=0.5", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;version=x;q", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        ("application/openmetrics-text;q=x", TEXT),
        (TEXT.content_type, TEXT),
        ("*/*", TEXT),
        (",;=,;;", TEXT),
        ("", TEXT),
    ],
)
def test_the_format_is_the_one_that_the_client_likes_best(accept: str, expected: object) -> None:
    assert format_for(accept) is expected


def resident_bytes() -> int:
    """Of this process, as another file of the system has it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_the_memory_of_the_process_is_that_which_the_system_counts() -> None:
    async with http_client(FakeEngine()) as client:
        found = await scrape(client)
    # The two are read one after the other, while the process goes on.
    assert found("process_resident_memory_bytes") == pytest.approx(resident_bytes(), rel=0.5)
    assert "minisgl_gpu_memory_used_bytes" not in found.families


async def test_the_memory_of_a_gpu_is_told_as_long_as_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    engine.config.device = "cuda"
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (30, 100))
    async with http_client(engine) as client:
        found = await scrape(client)
        assert found("minisgl_gpu_memory_used_bytes") == 70
        assert found("minisgl_gpu_memory_total_bytes") == 100

        def fault() -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr("torch.cuda.mem_get_info", fault)
        found = await scrape(client)
    assert "minisgl_gpu_memory_used_bytes" not in found.families


@pytest.mark.gpu
def test_the_memory_of_the_gpu_has_what_is_allocated_here() -> None:
    kept = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    found = gpu_memory()
    assert found is not None and kept.numel() < found.used < found.total
    assert found.total == torch.cuda.get_device_properties(0).total_memory


async def test_a_model_that_computes_is_measured_in_both_formats() -> None:
    engine = AsyncEngine(load_engine(case_of("llama3").folder))
    async with engine, http_client(engine) as client:
        usages = []
        for length in (1, 7, 20):
            asked = {"prompt": [*range(3, 3 + length)], "max_tokens": length, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=asked)
            usages.append(answer.json()["usage"])
        text = await client.get("/metrics")
        opened = await client.get("/metrics", headers=ACCEPT)
    for families in (
        text_string_to_metric_families(text.text),
        openmetrics.text_string_to_metric_families(opened.text),
    ):
        found = values(families)
        for name, field in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
            expected = sum(usage[field] for usage in usages)
            assert found[f"minisgl_request_{name}_tokens_sum", ()] == expected == 28
            assert found[f"minisgl_request_{name}_tokens_count", ()] == 3
        for phase in ("queue", "prefill", "decode"):
            assert found[f"minisgl_request_{phase}_seconds_count", ()] == 3
        assert found["minisgl_kv_capacity_tokens", ()] == engine.capacity.num_tokens
