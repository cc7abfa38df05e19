"""Benchmarks: the workload is the one that others run, and the figures follow from the records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import minisgl
from minisgl.bench.config import STANDARD, STANDARD_ON_CPU, BenchConfig, Sizes, Span
from minisgl.bench.driver import RequestRecord, RunRecord, run_offline
from minisgl.bench.limits import Peak, Work, measure_peak
from minisgl.bench.report import Distribution, Figures, Limit, percentile
from minisgl.bench.workload import Job, make_workload
from minisgl.config import EngineConfig, ModelFacts
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError, ContextLengthError
from minisgl.models.config import read_model_config
from minisgl.request import SamplingParams

# -- the workload ---------------------------------------------------------------------------------


def standard(vocab_size: int = 151_936, seed: int = 0) -> list[Job]:
    return make_workload(STANDARD, vocab_size=vocab_size, temperature=0.6, seed=seed)


def test_the_standard_workload_is_the_one_that_other_engines_run() -> None:
    jobs = standard()
    assert len(jobs) == 256
    assert sum(job.params.max_tokens or 0 for job in jobs) == 133_966
    assert sum(len(job.prompt_token_ids) for job in jobs) == 142_827
    assert jobs[0].prompt_token_ids[:4] == [6311, 6890, 663, 4242]
    assert {job.params.ignore_eos for job in jobs} == {True}
    assert {job.params.temperature for job in jobs} == {0.6}


def test_a_workload_is_a_function_of_its_seed() -> None:
    assert standard() == standard()
    first, other = standard(), standard(seed=1)
    starts = {tuple(job.prompt_token_ids[:16]) for job in (*first, *other)}
    assert len(starts) == 512, "a page of one could be found in the cache of the other"


def test_a_small_vocabulary_leaves_the_lengths_as_they_are() -> None:
    small, large = standard(vocab_size=1237), standard()
    assert max(token_id for job in small for token_id in job.prompt_token_ids) == 1236
    for one, other in zip(small, large, strict=True):
        assert len(one.prompt_token_ids) == len(other.prompt_token_ids)
        assert one.params == other.params


# -- the options ----------------------------------------------------------------------------------


def test_the_device_decides_about_sizes_that_are_not_given() -> None:
    assert BenchConfig().sizes("cuda") == STANDARD
    assert BenchConfig().sizes("cpu") == STANDARD_ON_CPU
    given = BenchConfig(num_requests=8, min_output_length=2000, max_prompt_length=10)
    assert given.sizes("cuda") == Sizes(8, Span(10, 10), Span(2000, 2000))
    assert given.sizes("cpu") == Sizes(8, Span(10, 10), Span(2000, 2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "--num-requests 0: allowed: 1 or more"),
        ({"repeat": 0}, "--repeat 0: allowed: 1 or more"),
        ({"max_output_length": 0}, "--max-output-length 0: allowed: 1 or more"),
        (
            {"min_prompt_length": 9, "max_prompt_length": 8},
            "--max-prompt-length 8: allowed: 9 or more",
        ),
        ({"temperature": float("nan")}, "--temperature nan: allowed: 0 to 2"),
        ({"json_file": "no/such.json"}, "--json no/such.json: allowed: a file in a folder"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        BenchConfig(**options)
    assert str(refused.value).startswith(message)


# -- the figures ----------------------------------------------------------------------------------


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([0.0, 10.0, 20.0, 30.0, 40.0], 50) == 20.0
    assert percentile([0.0, 10.0, 20.0, 30.0, 40.0], 90) == pytest.approx(36.0)
    hundred_and_one = [float(value) for value in range(101)]
    assert [percentile(hundred_and_one, percent) for percent in (0, 50, 90, 99, 100)] == [
        *(0.0, 50.0, 90.0, 99.0, 100.0)
    ]


def test_a_distribution_does_not_depend_on_the_order_of_its_values() -> None:
    distribution = Distribution.of([40.0, 10.0, 30.0, 20.0])
    assert distribution == Distribution.of([10.0, 20.0, 30.0, 40.0])
    assert (distribution.mean, distribution.p50, distribution.p90) == (25.0, 25.0, 37.0)
    assert distribution.p99 == pytest.approx(39.7)


def record(times: tuple[float, float, float], counts: tuple[int, int, int]) -> RequestRecord:
    return RequestRecord(
        submitted_s=times[0],
        first_token_s=times[1],
        last_token_s=times[2],
        num_prompt_tokens=counts[0],
        num_cached_tokens=counts[1],
        num_output_tokens=counts[2],
    )


def test_figures_of_a_run() -> None:
    long = record((0.0, 1.0, 4.0), (30, 0, 7))
    short = record((0.5, 2.0, 2.0), (10, 8, 1))
    figures = Figures.of(RunRecord([long, short], num_steps=9, num_retractions=2))
    assert figures.elapsed_s == 4.0
    assert figures.output_tokens_per_s == 2.0
    assert figures.total_tokens_per_s == 12.0
    assert figures.requests_per_s == 0.5
    assert figures.cache_hit_rate == 0.2
    assert (figures.num_steps, figures.num_retractions) == (9, 2)
    assert figures.ttft_s.mean == 1.25
    assert figures.e2e_s.mean == 2.75
    assert figures.tpot_s == Distribution(0.5, 0.5, 0.5, 0.5), "one token has no time between"


def read_facts(folder: Path, **fields: object) -> ModelFacts:
    config = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151936}
    config |= {"torch_dtype": "bfloat16", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    config |= {"num_key_value_heads": 8, "hidden_act": "silu", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config | fields))
    return read_model_config(folder).facts()


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "limit"),
    [(1024, 3072, 28, 16, 36_000), (5120, 17408, 40, 40, 8_250)],
)
def test_the_limit_of_the_standard_workload_on_one_h200(
    tmp_path: Path, hidden: int, intermediate: int, layers: int, heads: int, limit: int
) -> None:
    """Counted by hand for Qwen3-0.6B and 14B, at a bandwidth and a peak once measured there."""
    model = read_facts(
        tmp_path,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    jobs = make_workload(STANDARD, vocab_size=151936, temperature=0.6, seed=0)
    requests = [
        RequestRecord(
            submitted_s=0.0,
            first_token_s=1.0,
            last_token_s=10.0,
            num_prompt_tokens=len(job.prompt_token_ids),
            num_cached_tokens=0,
            num_output_tokens=job.params.max_tokens or 0,
        )
        for job in jobs
    ]
    num_steps = max(request.num_output_tokens for request in requests)
    run = RunRecord(requests, num_steps=num_steps, num_retractions=0)
    peak = Peak(bytes_per_s=4.28e12, operations_per_s=800e12)
    figures = Figures.of(run)
    reached = Limit.of(figures, peak, Work.of(run, model, "bfloat16"))
    assert figures.num_output_tokens / reached.seconds == pytest.approx(limit, rel=0.02)
    assert reached.share == pytest.approx(reached.seconds / 10)


def test_cached_tokens_are_read_and_not_computed(tmp_path: Path) -> None:
    model = read_facts(
        tmp_path,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
    )

    def work(num_cached_tokens: int) -> Work:
        request = RequestRecord(
            submitted_s=0.0,
            first_token_s=1.0,
            last_token_s=2.0,
            num_prompt_tokens=10,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=3,
        )
        return Work.of(RunRecord([request], num_steps=3, num_retractions=0), model, "float32")

    cold, warm = work(0), work(8)
    per_token = model.kv_bytes_per_token("float32")
    # Two decoded tokens read 11 and 12 tokens; prompt and decoded tokens are written.
    assert cold.kv_bytes == (11 + 12 + 10 + 2) * per_token
    assert warm.kv_bytes == (11 + 12 + 2 + 2) * per_token
    assert cold.weight_bytes == warm.weight_bytes
    pairs = 4 * model.num_layers * model.num_heads * model.head_dim
    assert cold.prefill_operations == 10 * 2 * model.num_layer_weights + 55 * pairs
    assert warm.prefill_operations == 2 * 2 * model.num_layer_weights + (9 + 10) * pairs


def test_the_peak_is_measured_on_the_spot() -> None:
    cpu = torch.device("cpu")
    peak = measure_peak(cpu, torch.float32, copied_bytes=1 << 20, matrix_size=128)
    assert 1e8 < peak.bytes_per_s < 1e13
    assert 1e8 < peak.operations_per_s < 1e14


def test_outputs_of_one_token_have_no_time_per_token() -> None:
    run = RunRecord([record((0.0, 1.0, 1.0), (5, 0, 1))], num_steps=1, num_retractions=0)
    assert Figures.of(run).tpot_s is None


# -- on an engine ---------------------------------------------------------------------------------


async def test_a_refused_request_ends_the_others() -> None:
    jobs = make_workload(STANDARD_ON_CPU, vocab_size=1237, temperature=0.0, seed=0)
    too_long = Job([1], SamplingParams(max_tokens=1 << 20))
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        with pytest.raises(ContextLengthError):
            await run_offline(engine, [*jobs, too_long])
        assert (engine.stats().num_queued, engine.stats().num_running) == (0, 0)
        run = await run_offline(engine, jobs)
    assert [request.num_output_tokens for request in run.requests] == [
        job.params.max_tokens for job in jobs
    ]
    for request in run.requests:
        assert 0 <= request.submitted_s < request.first_token_s < request.last_token_s


def test_bench_measures_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    sizes = ("--num-requests", "5", "--max-prompt-length", "40", "--max-output-length", "9")
    engine = ("--device", "cpu", "--page-size", "8", "--max-queued-requests", "1")
    command = [sys.executable, "-m", "minisgl", "bench", *sizes, *engine]
    result = subprocess.run([*command, "--json", file], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 requests, 16 to 40 tokens in, 9 to 9 out, temperature 0.6" in result.stdout
    assert "the vocabulary of 2,048" in result.stdout

    report = json.loads(file.read_text())
    figures, requests = report["figures"], report["run"]["requests"]
    assert result.stdout.splitlines()[-1].startswith(
        f"{figures['output_tokens_per_s']:,.1f} output tok/s: 45 tokens of 5 requests in"
    )
    assert (report["model"], report["versions"]["minisgl"]) == ("demo", minisgl.__version__)
    assert report["bench_options"]["num_requests"] == 5
    assert report["engine_options"]["page_size"] == report["capacity"]["page_size"] == 8
    assert [request["num_output_tokens"] for request in requests] == [9] * 5
    assert figures["num_output_tokens"] == 45
    assert figures["num_prompt_tokens"] == sum(request["num_prompt_tokens"] for request in requests)
    assert figures["num_steps"] >= 9
    assert figures["elapsed_s"] == max(request["last_token_s"] for request in requests)
    assert figures["output_tokens_per_s"] * figures["elapsed_s"] == pytest.approx(45)
    assert figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"] <= figures["elapsed_s"]
