"""`bench offline` and `bench latency`: their workloads, options and runs of the bundled model."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_runner import engine_config, make_parser
from support.demo_adapters import save_demo_adapter
from support.forked_programs import minisgl as minisgl_program
from support.printed_tables import cells

import minisgl
from minisgl.bench.config import STANDARD, STANDARD_ON_CPU, BenchConfig, LatencyConfig, Sizes, Span
from minisgl.bench.energy import Spent
from minisgl.bench.figures import Distribution, Figures
from minisgl.bench.latency import BatchRecord, check_room, print_latencies
from minisgl.bench.offline_run import RequestRecord, RunRecord, run_offline, run_streaming
from minisgl.bench.peak import Peak
from minisgl.bench.report.output import PrintableConsole
from minisgl.bench.roofline import DecodeStep, KernelWork
from minisgl.bench.workload.requests import ScheduledRequest, make_workload
from minisgl.config import Capacity, EngineConfig, option_names
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.errors import ConfigError, ContextLengthError, StepError
from minisgl.request import SamplingParams

# -- the workload ---------------------------------------------------------------------------------


def standard(vocab_size: int = 151_936, seed: int = 0) -> list[ScheduledRequest]:
    return make_workload(STANDARD, vocab_size=vocab_size, seed=seed)


def test_the_standard_workload_equals_that_of_other_engines() -> None:
    jobs = standard()
    assert len(jobs) == 256
    assert sum(job.max_tokens for job in jobs) == 133_966
    assert sum(len(job.prompt) for job in jobs) == 142_827
    assert jobs[0].prompt[:4] == [6311, 6890, 663, 4242]


def test_requests_ask_for_exactly_their_lengths() -> None:
    job = ScheduledRequest(prompt=[1], max_tokens=7, seed=3)
    params = job.params(0.6)
    assert (params.max_tokens, params.ignore_eos, params.seed) == (7, True, 3)
    assert (params.temperature, job.params().temperature) == (0.6, 0.0)


def test_a_workload_is_a_function_of_its_seed() -> None:
    assert standard() == standard()
    first, other = standard(), standard(seed=1)
    starts = {tuple(job.prompt[:16]) for job in (*first, *other)}
    assert len(starts) == 512, "a page of one could be found in the cache of the other"


def test_a_small_vocabulary_does_not_change_the_lengths() -> None:
    small, large = standard(vocab_size=1237), standard()
    assert max(token_id for job in small for token_id in job.prompt) == 1236
    for one, other in zip(small, large, strict=True):
        assert len(one.prompt) == len(other.prompt)
        assert one.params() == other.params()


# -- the options ----------------------------------------------------------------------------------


def test_sizes_that_are_not_given_depend_on_the_device() -> None:
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
def test_an_invalid_value_is_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        BenchConfig(**options)
    assert str(refused.value).startswith(message)


def test_the_batch_sizes_of_a_latency_run_may_be_repeated_or_listed() -> None:
    assert LatencyConfig().batch_sizes == [1, 8, 32]
    assert LatencyConfig(batch_size=("16,4", "1", "4")).batch_sizes == [16, 4, 1]


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
def test_an_invalid_value_of_a_latency_run_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LatencyConfig(**options)
    assert str(refused.value).startswith(message)


def test_a_batch_above_max_running_requests_is_refused() -> None:
    capacity = Capacity(num_pages=41, page_size=16, num_slots=8, max_seq_len=640)
    check_room(Sizes(8, Span(64, 64), Span(16, 16)), capacity)  # five pages each
    with pytest.raises(ConfigError, match="--batch-size 9: more than --max-running-requests"):
        check_room(Sizes(9, Span(1, 1), Span(2, 2)), capacity)
    with pytest.raises(ConfigError, match="holds 6 requests of 81 tokens; allowed: 6 or less"):
        check_room(Sizes(8, Span(64, 64), Span(17, 17)), capacity)


def test_a_script_offers_every_engine_option_except_those_it_sets() -> None:
    parser = make_parser("What it shows.", without=["cache_type"], page_size=32)
    named = {*re.findall(r"--[a-z-]+", parser.format_help())}
    for spec in EngineConfig.__dataclass_fields__.values():
        offered = spec.name not in ("model", "cache_type")
        assert all((name in named) is offered for name in option_names(spec))
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


# -- on an engine ---------------------------------------------------------------------------------


async def test_a_refused_request_aborts_the_others() -> None:
    jobs = make_workload(STANDARD_ON_CPU, vocab_size=1237, seed=0)
    too_long = ScheduledRequest(prompt=[1], max_tokens=1 << 20)
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        with pytest.raises(ContextLengthError):
            await run_offline(engine, [*jobs, too_long])
        assert (engine.stats().num_queued, engine.stats().num_running) == (0, 0)
        run = await run_offline(engine, jobs)
    assert [request.num_output_tokens for request in run.requests] == [
        job.max_tokens for job in jobs
    ]
    for request in run.requests:
        assert 0 <= request.submitted_s < request.first_token_s < request.last_token_s


async def test_no_more_requests_run_at_once_than_were_allowed() -> None:
    jobs = make_workload(Sizes(5, Span(4, 9), Span(3, 6)), vocab_size=1237, seed=0)
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        run = await run_offline(engine, jobs, max_concurrency=2)
    assert [request.num_output_tokens for request in run.requests] == [
        job.max_tokens for job in jobs
    ]
    for request in run.requests:
        before = [
            other
            for other in run.requests
            if other.submitted_s < request.submitted_s < other.last_token_s
        ]
        assert len(before) <= 1
    assert run.requests[1].submitted_s < run.requests[0].last_token_s, "two do run at once"


async def test_requests_take_turns_with_the_adapters_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        save_demo_adapter(tmp_path / f"{seed}", seed)
    lora = tuple(f"{seed}={tmp_path / str(seed)}" for seed in range(2))
    jobs = make_workload(Sizes(5, Span(4, 9), Span(3, 6)), vocab_size=1237, seed=0)
    asked: list[Any] = []
    submit = AsyncEngine.submit

    def submitted(*given: Any, **more: Any) -> OutputStream:
        asked.append(more["extras"])
        return submit(*given, **more)

    monkeypatch.setattr(AsyncEngine, "submit", submitted)
    async with await AsyncEngine.start(EngineConfig(device="cpu", lora=lora)) as engine:
        turns = [(engine.adapter(f"{index % 2}"),) for index in range(5)]
        await run_offline(engine, jobs)
    assert asked == turns


async def test_streaming_and_waiting_give_the_same_record() -> None:
    sizes = Sizes(6, Span(16, 40), Span(1, 20))
    jobs = make_workload(sizes, vocab_size=1237, seed=0)
    async with await AsyncEngine.start(EngineConfig(device="cpu", cache_type="naive")) as engine:
        runs = [await run_offline(engine, jobs), await run_streaming(engine, jobs)]
    for run in runs:
        for request, job in zip(run.requests, jobs, strict=True):
            assert request.num_prompt_tokens == len(job.prompt)
            assert request.num_output_tokens == job.max_tokens
            assert request.submitted_s < request.first_token_s
            assert request.first_token_s <= request.last_token_s
            # Two steps are in flight, whose tokens may come at once.
            if request.num_output_tokens != 2:
                single = request.num_output_tokens == 1
                assert (request.first_token_s == request.last_token_s) is single
    # Look-ahead may launch a step of which nothing is needed.
    assert abs(runs[0].num_steps - runs[1].num_steps) <= 1


async def test_an_offline_run_wakes_a_request_only_at_its_first_and_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    take = OutputStream._take

    def counted(stream: OutputStream) -> Any:
        taken.append(stream.request.id)
        return take(stream)

    monkeypatch.setattr(OutputStream, "_take", counted)
    jobs = [ScheduledRequest(prompt=[1, 2, index], max_tokens=20) for index in range(4)]
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        await run_offline(engine, jobs)
        assert len(taken) == len(set(taken)) == 4
        await run_streaming(engine, jobs)
        assert len(taken) > 2 * 4


async def test_waiting_for_the_end_of_a_failed_request_raises_its_error() -> None:
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        stream = engine.submit([1, 2, 3], SamplingParams(max_tokens=1000, ignore_eos=True))
        await anext(stream)
        engine._steps.failures.die(StepError("The device is gone."))
        with pytest.raises(StepError, match="The device is gone"):
            await stream.wait_finished()
        with pytest.raises(StepError, match="The device is gone"):
            await stream.wait_finished()


def test_bench_latency_measures_the_bundled_model(tmp_path: Path) -> None:
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
        assert batch["figures"]["tpot_s"]["p50"] == pytest.approx(Distribution.of(tpots).p50)
        assert row[:2] == [str(len(requests)), f"{Distribution.of(tpots).p50 * 1e3:,.3f}"]


def test_bench_latency_can_find_its_prompts_in_the_prefix_cache(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    options = ("--batch-size", "2", "--input-len", "33", "--output-len", "4", "--repeat", "1")
    bench = ("bench", "latency", "--device", "cpu", "--cached-prompts", "--json", file)
    result = minisgl_program(*bench, *options)
    assert (result.returncode, result.stderr) == (0, "")
    [batch] = json.loads(file.read_text())["batches"]
    assert [request["num_cached_tokens"] for request in batch["run"]["requests"]] == [32, 32]
    assert {request["num_output_tokens"] for request in batch["run"]["requests"]} == {4}


def latency_record(batch_size: int) -> BatchRecord:
    """Numbers as wide as those of a fast GPU, all different."""
    request = RequestRecord(
        submitted_s=0.0,
        first_token_s=12.3456 + batch_size,
        last_token_s=13.3456 + 1.5 * batch_size,
        num_prompt_tokens=10,
        num_cached_tokens=0,
        num_output_tokens=100_000 + batch_size,
    )
    run = RunRecord([request], num_steps=1, num_retractions=0)
    spent = Spent(seconds=1.0, joules=12_345.0 * batch_size)
    return BatchRecord(
        sizes=Sizes(batch_size, Span(10, 10), Span(100, 100)),
        figures=Figures.of(run).with_energy(spent),
        step=DecodeStep((KernelWork(1e9, 1e9),), KernelWork(1e9, 1e9)),
        limit_s=1e-6 * batch_size,
        run=run,
    )


@pytest.mark.parametrize(("width", "num_tables"), [(160, 1), (80, 1), (60, 2), (40, 3)])
def test_the_table_of_latencies_is_turned_and_split_rather_than_cut(
    width: int, num_tables: int
) -> None:
    records = [latency_record(size) for size in (1, 8, 32, 64, 256)]
    file = io.StringIO()
    console = PrintableConsole(file=file, width=width, highlight=False, soft_wrap=True)
    print_latencies(console, records, Peak(4e12, 8e14))
    lines = [line for line in file.getvalue().splitlines() if line[:1] in "┏┃┡│└"]
    shown = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in shown
    assert sum(line.startswith("└") for line in lines) == num_tables
    for record in records:
        figures, tpot_s = record.figures, record.tpot_s
        assert figures.energy is not None and record.limit_s is not None
        for number in (
            f"{record.sizes.num_requests}",
            f"{tpot_s * 1e3:,.3f}",
            f"{figures.ttft_s.p50 * 1e3:,.1f}",
            f"{figures.output_tokens_per_s:,.1f}",
            f"{record.limit_s * 1e3:,.3f}",
            f"{record.limit_s / tpot_s:.1%}",
            f"{figures.energy.mean_watts:,.0f}",
            f"{figures.energy.joules_per_output_token:,.3f}",
        ):
            assert f" {number} " in shown
    for heading in ("batch", "TPOT ms", "output tok/s", "of the limit", "joules/token"):
        assert f" {heading} " in shown


def test_bench_latency_refuses_a_batch_that_does_not_run_at_once() -> None:
    options = ("--batch-size", "4", "--max-running-requests", "2")
    result = minisgl_program("bench", "latency", "--device", "cpu", *options)
    assert result.returncode == 2
    assert result.stderr == (
        "minisgl: --batch-size 4: more than --max-running-requests; allowed: 2 or less\n"
    )


def test_bench_offline_measures_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    sizes = ("--num-requests", "5", "--max-prompt-length", "40", "--max-output-length", "9")
    engine = ("--device", "cpu", "--page-size", "8", "--max-queued-requests", "1")
    result = minisgl_program("bench", *sizes, *engine, "--json", file)
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
