"""Benchmarks: the workload is the one that others run, and the figures follow from the records."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import minisgl
from minisgl.bench.config import (
    STANDARD,
    STANDARD_ON_CPU,
    BenchConfig,
    LatencyConfig,
    Sizes,
    Span,
)
from minisgl.bench.latency import BatchRecord, check_room, print_latencies
from minisgl.bench.offline_run import RequestRecord, RunRecord, gaps, run_offline, run_streaming
from minisgl.bench.peak import Peak, measure_peak
from minisgl.bench.report.figures import Distribution, Figures, Limit, percentile
from minisgl.bench.roofline import DecodeStep, Load, Work, prefill_operations
from minisgl.bench.script import engine_config, make_parser
from minisgl.bench.workload.requests import OfflineRequest, make_offline_request, make_workload
from minisgl.config import Capacity, EngineConfig, ModelFacts, option_names
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.errors import ConfigError, ContextLengthError, StepError
from minisgl.models.registry import read_model_config
from minisgl.request import SamplingParams

# -- the workload ---------------------------------------------------------------------------------


def standard(vocab_size: int = 151_936, seed: int = 0) -> list[OfflineRequest]:
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


def test_the_batch_sizes_of_a_latency_run_may_be_repeated_or_listed() -> None:
    assert LatencyConfig().batch_sizes == (1, 8, 32)
    assert LatencyConfig(batch_size=("16,4", "1", "4")).batch_sizes == (16, 4, 1)


def test_a_latency_run_has_the_standard_lengths_and_smaller_ones_on_a_cpu() -> None:
    assert LatencyConfig().sizes(8, "cuda") == Sizes(8, Span(512, 512), Span(256, 256))
    assert LatencyConfig().sizes(8, "cpu") == Sizes(8, Span(64, 64), Span(32, 32))
    given = LatencyConfig(input_len=5, output_len=7)
    assert given.sizes(2, "cuda") == given.sizes(2, "cpu") == Sizes(2, Span(5, 5), Span(7, 7))
    assert str(given.sizes(2, "cpu")) == "2 requests, 5 tokens in, 7 out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": ("1,x",)}, "--batch-size 1,x: allowed: whole numbers of 1 or more"),
        ({"batch_size": ("1", "0")}, "--batch-size 1,0: allowed: whole numbers of 1 or more"),
        ({"batch_size": ()}, "--batch-size : allowed: whole numbers of 1 or more"),
        ({"input_len": 0}, "--input-len 0: allowed: 1 or more"),
        ({"output_len": 1}, "--output-len 1: allowed: 2 or more"),
        ({"repeat": 0}, "--repeat 0: allowed: 1 or more"),
        ({"json_file": "no/such.json"}, "--json no/such.json: allowed: a file in a folder"),
    ],
)
def test_a_wrong_value_of_a_latency_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LatencyConfig(**options)
    assert str(refused.value).startswith(message)


def test_a_batch_that_would_have_to_wait_is_refused() -> None:
    capacity = Capacity(num_pages=41, page_size=16, num_slots=8, max_seq_len=640)
    check_room(Sizes(8, Span(64, 64), Span(16, 16)), capacity)  # five pages each
    with pytest.raises(ConfigError, match="--batch-size 9: more than --max-running-requests"):
        check_room(Sizes(9, Span(1, 1), Span(2, 2)), capacity)
    with pytest.raises(ConfigError, match="holds 6 requests of 81 tokens; allowed: 6 or less"):
        check_room(Sizes(8, Span(64, 64), Span(17, 17)), capacity)


def test_a_script_offers_every_engine_option_but_those_it_decides() -> None:
    parser = make_parser("What it shows.", without=["cache_type"], page_size=32)
    for spec in EngineConfig.__dataclass_fields__.values():
        offered = spec.name not in ("model", "cache_type")
        assert all((name in parser.format_help()) is offered for name in option_names(spec))
    config = engine_config(parser.parse_args([]), cache_type="naive")
    assert config == EngineConfig(load_format="dummy", page_size=32, cache_type="naive")
    given = ["folder", "--page-size", "8", "--memory-ratio", "0.5", "--disable-pynccl"]
    assert engine_config(parser.parse_args(given)) == EngineConfig(
        model="folder",
        load_format="dummy",
        page_size=8,
        memory_ratio=0.5,
        disable_pynccl=True,
    )


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
    [(1024, 3072, 28, 16, 36_000), (5120, 17408, 40, 40, 8_100)],
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
    work = Work.of(run, model, peak, dtype="bfloat16", kv_dtype="bfloat16", max_running=256)
    assert figures.num_output_tokens / work.seconds == pytest.approx(limit, rel=0.01)
    assert Limit.of(figures, peak, work).share == pytest.approx(work.seconds / 10)


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
        run = RunRecord([request], num_steps=3, num_retractions=0)
        peak = Peak(bytes_per_s=1e12, operations_per_s=1e12)
        return Work.of(run, model, peak, dtype="float32", kv_dtype="float32", max_running=1)

    cold, warm = work(0), work(8)
    per_token = model.kv_bytes_per_token("float32")
    # Two decoded tokens read 11 and 12 tokens; prompt and decoded tokens are written.
    assert cold.kv_bytes == (11 + 12 + 10 + 2) * per_token
    assert warm.kv_bytes == (11 + 12 + 2 + 2) * per_token
    assert cold.weight_bytes == warm.weight_bytes
    pair = 4 * 2 * 16 * model.attention[0].head_dim
    head = 2 * model.num_head_weights  # of the one row that is sampled
    assert cold.prefill_operations == 10 * 2 * model.num_layer_weights + 55 * pair + head
    assert warm.prefill_operations == 2 * 2 * model.num_layer_weights + (9 + 10) * pair + head


def test_a_decode_step_is_the_average_of_those_of_a_run(tmp_path: Path) -> None:
    model = read_facts(
        tmp_path,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
    )
    requests = [record((0.0, 1.0, 2.0), (10, 0, 3)), record((0.0, 1.0, 2.0), (20, 0, 3))]
    run = RunRecord(requests, num_steps=3, num_retractions=0)
    step = DecodeStep.of(run, model, dtype="bfloat16", kv_dtype="bfloat16")
    weights = model.num_layer_weights + model.num_head_weights
    read = (11 + 12 + 21 + 22) / 2  # in two steps
    assert step.weight_bytes == 2 * weights
    assert step.kv_bytes == (read + 2) * model.kv_bytes_per_token("bfloat16")
    pair = 4 * 2 * 16 * model.attention[0].head_dim
    assert step.operations == 2 * 2 * weights + read * pair
    moving = (step.weight_bytes + step.kv_bytes) / 1e9
    assert step.seconds(Peak(bytes_per_s=1e9, operations_per_s=1e15)) == pytest.approx(moving)
    computing = step.operations / 1e9
    assert step.seconds(Peak(bytes_per_s=1e15, operations_per_s=1e9)) == pytest.approx(computing)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "limit_ms"),
    [(1024, 3072, 28, 16, 0.295), (5120, 17408, 40, 40, 6.56)],
)
def test_the_limit_of_tpot_at_batch_1_on_one_h200(
    tmp_path: Path, hidden: int, intermediate: int, layers: int, heads: int, limit_ms: float
) -> None:
    """By hand, for Qwen3-0.6B and 14B: 1.19 and 27.98 GB of weights, 640 tokens of KV cache."""
    model = read_facts(
        tmp_path,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    run = RunRecord([record((0.0, 1.0, 2.0), (512, 0, 256))], num_steps=256, num_retractions=0)
    peak = Peak(bytes_per_s=4.28e12, operations_per_s=800e12)
    seconds = DecodeStep.of(run, model, dtype="bfloat16", kv_dtype="bfloat16").seconds(peak)
    assert seconds * 1e3 == pytest.approx(limit_ms, rel=0.01)


def test_operations_of_several_prompts_add_up(tmp_path: Path) -> None:
    model = read_facts(
        tmp_path,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
    )
    one = record((0.0, 1.0, 1.0), (2048, 0, 1))
    assert prefill_operations([one] * 16, model) == 16 * prefill_operations([one], model)
    # By hand: 440.4 million weights in the layers, 155.6 million in the head.
    by_hand = 2 * 440.4e6 * 2048 + 2 * 155.6e6 + 4 * (2048 * 2049 / 2) * 28 * 16 * 128
    assert prefill_operations([one], model) == pytest.approx(by_hand, rel=1e-3)


def test_gaps_count_where_both_their_ends_do() -> None:
    assert gaps([0.0, 1.0, 3.0, 6.0, 10.0], 1.0, 6.0) == [2.0, 3.0]
    assert gaps([2.0], 0.0, 9.0) == gaps([], 0.0, 9.0) == []


def latencies(peak: Peak | None) -> str:
    """What is printed of two batches whose requests took 2 ms a token."""
    records = []
    for size in (1, 4):
        requests = [record((0.0, 0.1, 0.108), (10, 0, 5))] * size
        run = RunRecord(requests, num_steps=5, num_retractions=0)
        step = DecodeStep((Load(1e9, 1e9),), attention=Load(size * 1e9, 0.0))
        records.append(
            BatchRecord(
                sizes=Sizes(size, Span(10, 10), Span(5, 5)),
                figures=Figures.of(run),
                step=step,
                limit_s=step.seconds(peak) if peak else None,
                run=run,
            )
        )
    printed = io.StringIO()
    print_latencies(Console(file=printed, width=200, soft_wrap=True), records, peak)
    return printed.getvalue()


def cells(printed: str) -> list[list[str]]:
    """The rows of a table, without its heading."""
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_latencies_are_printed_with_the_share_of_the_limit() -> None:
    printed = latencies(Peak(bytes_per_s=4e12, operations_per_s=1e15))
    assert cells(printed) == [
        ["1", "2.000", "100.0", "46.3", "0.500", "25.0%"],
        ["4", "2.000", "100.0", "185.2", "1.250", "62.5%"],
    ]
    assert "can read 1.00 GB of weights and 1.00, 4.00 GB of KV cache, or compute" in printed
    assert "at 4.00 TB/s and 1,000 TFLOP/s." in printed


def test_on_a_cpu_latencies_have_no_limit() -> None:
    assert [len(row) for row in cells(latencies(None))] == [4, 4]
    assert "limit" not in latencies(None)


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
    too_long = OfflineRequest([1], SamplingParams(max_tokens=1 << 20))
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


async def test_streaming_and_waiting_make_the_same_record() -> None:
    sizes = Sizes(6, Span(16, 40), Span(1, 20))
    jobs = make_workload(sizes, vocab_size=1237, temperature=0.0, seed=0)
    async with await AsyncEngine.start(EngineConfig(device="cpu", cache_type="naive")) as engine:
        runs = [await run_offline(engine, jobs), await run_streaming(engine, jobs)]
    for run in runs:
        for request, job in zip(run.requests, jobs, strict=True):
            assert request.num_prompt_tokens == len(job.prompt_token_ids)
            assert request.num_output_tokens == job.params.max_tokens
            assert request.submitted_s < request.first_token_s
            single = request.num_output_tokens == 1
            assert (request.first_token_s == request.last_token_s) is single
    # Look-ahead may launch a step of which nothing is needed.
    assert abs(runs[0].num_steps - runs[1].num_steps) <= 1


async def test_an_offline_run_wakes_a_request_at_its_first_token_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    take = OutputStream._take

    def counted(stream: OutputStream) -> Any:
        taken.append(stream.request_id)
        return take(stream)

    monkeypatch.setattr(OutputStream, "_take", counted)
    jobs = [make_offline_request([1, 2, index], max_tokens=20) for index in range(4)]
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        await run_offline(engine, jobs)
        assert len(taken) == len(set(taken)) == 4
        await run_streaming(engine, jobs)
        assert len(taken) > 2 * 4


async def test_whoever_waits_for_the_end_gets_the_error() -> None:
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        job = make_offline_request([1, 2, 3], max_tokens=1000)
        stream = engine.submit(job.prompt_token_ids, job.params)
        await anext(stream)
        engine._die(StepError("The device is gone."))
        with pytest.raises(StepError, match="The device is gone"):
            await stream.wait_finished()
        with pytest.raises(StepError, match="The device is gone"):
            await stream.wait_finished()


def test_latency_measures_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    options = ("--batch-size", "1,3", "--batch-size", "2", "--input-len", "20", "--output-len", "6")
    command = [sys.executable, "-m", "minisgl", "bench", "latency", "--device", "cpu", *options]
    result = subprocess.run([*command, "--json", file], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "demo with its own weights in float32, on CPU" in result.stdout
    assert "attention torch" in result.stdout and "in pages of 16" in result.stdout
    assert "20 tokens in, 6 out, greedy, EOS ignored" in result.stdout

    report = json.loads(file.read_text())
    assert report["peak"] is None
    assert [batch["sizes"]["num_requests"] for batch in report["batches"]] == [1, 3, 2]
    for batch, row in zip(report["batches"], cells(result.stdout), strict=True):
        requests = batch["run"]["requests"]
        assert batch["limit_s"] is None
        assert {request["num_prompt_tokens"] for request in requests} == {20}
        assert {request["num_output_tokens"] for request in requests} == {6}
        # Prompts of another batch or repetition would be found in the prefix cache.
        assert {request["num_cached_tokens"] for request in requests} == {0}
        tpots = sorted(
            (request["last_token_s"] - request["first_token_s"]) / 5 for request in requests
        )
        assert batch["figures"]["tpot_s"]["p50"] == pytest.approx(percentile(tpots, 50))
        assert row[:2] == [str(len(requests)), f"{percentile(tpots, 50) * 1e3:,.3f}"]


def test_latency_refuses_a_batch_that_does_not_run_at_once() -> None:
    command = [sys.executable, "-m", "minisgl", "bench", "latency", "--device", "cpu"]
    options = ("--batch-size", "4", "--max-running-requests", "2")
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        "minisgl: --batch-size 4: more than --max-running-requests; allowed: 2 or less\n"
    )


def test_bench_measures_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    sizes = ("--num-requests", "5", "--max-prompt-length", "40", "--max-output-length", "9")
    engine = ("--device", "cpu", "--page-size", "8", "--max-queued-requests", "1")
    command = [sys.executable, "-m", "minisgl", "bench", *sizes, *engine]
    result = subprocess.run([*command, "--json", file], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 requests, 16 to 40 tokens in, 9 out, temperature 0.6" in result.stdout
    assert "the vocabulary of 2,048" in result.stdout
    assert "attention torch" in result.stdout and "in pages of 8" in result.stdout

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
