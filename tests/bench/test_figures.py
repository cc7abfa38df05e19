"""Figures of a benchmark run, and the roofline that they are compared with."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_checks import LIST, read_checks
from rich.console import Console
from support.printed_tables import cells

from minisgl.bench.config import STANDARD, Sizes, Span
from minisgl.bench.energy import Spent
from minisgl.bench.figures import Distribution, Figures, Limit
from minisgl.bench.latency import BatchRecord, print_latencies
from minisgl.bench.offline_run import RequestRecord, RunRecord, gaps
from minisgl.bench.peak import Peak, measure_peak
from minisgl.bench.report.tables import print_figures
from minisgl.bench.roofline import DecodeStep, KernelWork, Work
from minisgl.bench.workload.requests import make_workload
from minisgl.config import ModelFacts
from minisgl.models.registry import read_model_config


def test_percentiles_interpolate_between_the_nearest_values() -> None:
    assert Distribution.of([3.0]) == Distribution(3.0, 3.0, 3.0, 3.0)
    assert Distribution.of([1.0, 2.0]).p50 == 1.5
    few = Distribution.of([0.0, 10.0, 20.0, 30.0, 40.0])
    assert few.p50 == 20.0 and few.p90 == pytest.approx(36.0)
    assert Distribution.of([*map(float, range(101))]) == Distribution(50.0, 50.0, 90.0, 99.0)


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


def test_figures_follow_from_the_records_of_a_run() -> None:
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


def qwen3_06b(folder: Path, num_layers: int) -> ModelFacts:
    return read_facts(
        folder,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
    )


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "limit"),
    [(1024, 3072, 28, 16, 36_000), (5120, 17408, 40, 40, 8_100)],
)
def test_the_roofline_of_the_standard_workload_on_an_h200_is_as_computed_by_hand(
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
    jobs = make_workload(STANDARD, vocab_size=151936, seed=0)
    requests = [
        RequestRecord(
            submitted_s=0.0,
            first_token_s=1.0,
            last_token_s=10.0,
            num_prompt_tokens=len(job.prompt),
            num_cached_tokens=0,
            num_output_tokens=job.max_tokens,
        )
        for job in jobs
    ]
    num_steps = max(request.num_output_tokens for request in requests)
    run = RunRecord(requests, num_steps=num_steps, num_retractions=0)
    peak = Peak(bytes_per_s=4.28e12, operations_per_s=800e12)
    figures = Figures.of(run)
    work = Work.of(run, model, peak, dtype="bfloat16", kv_dtype="bfloat16", max_running=256)
    assert figures.num_output_tokens / work.seconds == pytest.approx(limit, rel=0.01)
    config: Any = SimpleNamespace(dtype="bfloat16", kv_dtype="bfloat16", max_running_requests=256)
    limit = Limit.of(run, figures.elapsed_s, model, peak, config)
    assert limit.work == work and limit.share == pytest.approx(work.seconds / 10)


def test_the_roofline_counts_cached_tokens_as_read_but_not_computed(tmp_path: Path) -> None:
    model = qwen3_06b(tmp_path, num_layers=2)

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


def test_the_roofline_of_a_decode_step_is_the_average_over_a_run(tmp_path: Path) -> None:
    model = qwen3_06b(tmp_path, num_layers=2)
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
def test_the_roofline_of_tpot_at_batch_1_on_an_h200_is_as_computed_by_hand(
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


def prefill_operations(requests: list[RequestRecord], model: ModelFacts) -> int:
    run = RunRecord(requests, num_steps=len(requests), num_retractions=0)
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "max_running": 256}
    return Work.of(run, model, Peak(4e12, 800e12), **options).prefill_operations


def test_the_operations_of_several_prompts_add_up(tmp_path: Path) -> None:
    model = qwen3_06b(tmp_path, num_layers=28)
    one = record((0.0, 1.0, 1.0), (2048, 0, 1))
    assert prefill_operations([one] * 16, model) == 16 * prefill_operations([one], model)
    # By hand: 440.4 million weights in the layers, 155.6 million in the head.
    by_hand = 2 * 440.4e6 * 2048 + 2 * 155.6e6 + 4 * (2048 * 2049 / 2) * 28 * 16 * 128
    assert prefill_operations([one], model) == pytest.approx(by_hand, rel=1e-3)


def test_a_run_without_decoding_shows_what_prefill_computes_in_a_second(tmp_path: Path) -> None:
    model = qwen3_06b(tmp_path, num_layers=28)
    requests = [record((0.0, 0.5, 0.5), (2048, 0, 1))] * 16
    run, peak = RunRecord(requests, num_steps=4, num_retractions=0), Peak(4e12, 800e12)
    config: Any = SimpleNamespace(dtype="bfloat16", kv_dtype="bfloat16", max_running_requests=256)
    printed, figures = io.StringIO(), Figures.of(run)
    limit = Limit.of(run, figures.elapsed_s, model, peak, config)
    print_figures(Console(file=printed, width=200, soft_wrap=True), figures, limit)
    [check] = (check for check in read_checks(LIST) if check.name == "prefill-8b")
    reached = prefill_operations(requests, model) / 0.5 / 1e12
    assert reached > 50
    assert check.figures[0].read(printed.getvalue()) == pytest.approx(reached, abs=0.5)


def test_token_gaps_count_if_both_their_ends_do() -> None:
    assert gaps([0.0, 1.0, 3.0, 6.0, 10.0], 1.0, 6.0) == [2.0, 3.0]
    assert gaps([2.0], 0.0, 9.0) == gaps([], 0.0, 9.0) == []


def latencies(peak: Peak | None) -> str:
    """The printed table for two batches whose requests took 2 ms per token."""
    records = []
    for size in (1, 4):
        requests = [record((0.0, 0.1, 0.108), (10, 0, 5))] * size
        run = RunRecord(requests, num_steps=5, num_retractions=0)
        step = DecodeStep((KernelWork(1e9, 1e9),), attention=KernelWork(size * 1e9, 0.0))
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


def test_latencies_are_printed_as_a_percentage_of_the_roofline() -> None:
    printed = latencies(Peak(bytes_per_s=4e12, operations_per_s=1e15))
    assert cells(printed) == [
        ["1", "2.000", "100.0", "46.3", "0.500", "25.0%"],
        ["4", "2.000", "100.0", "185.2", "1.250", "62.5%"],
    ]
    assert "can read 1.00 GB of weights and 1.00, 4.00 GB of KV cache, or compute" in printed
    assert "at 4.00 TB/s and 1,000 TFLOP/s." in printed


@pytest.mark.parametrize("joules", [None, 1.0])
def test_a_check_reads_the_tokens_of_a_step_behind_those_without_drafts(
    joules: float | None,
) -> None:
    [check] = (check for check in read_checks(LIST) if check.name == "speculation-14b")
    [figure] = (figure for figure in check.figures if figure.name == "tokens a step at 1")
    peak, printed = Peak(bytes_per_s=4e12, operations_per_s=1e15), io.StringIO()
    for num_accepted in (0, 6):
        one = record((0.0, 0.1, 0.118), (10, 0, 10))
        if num_accepted:
            one = replace(one, num_drafted_tokens=12, num_accepted_tokens=num_accepted)
        run = RunRecord([one], num_steps=10, num_retractions=0)
        shown = BatchRecord(
            sizes=Sizes(1, Span(10, 10), Span(10, 10)),
            figures=Figures.of(run).with_energy(Spent(seconds=1.0, joules=joules)),
            step=DecodeStep((KernelWork(1e9, 1e9),), attention=KernelWork(1e9, 0.0)),
            limit_s=1e-3,
            run=run,
        )
        print_latencies(Console(file=printed, width=160, soft_wrap=True), [shown], peak)
        assert figure.read(printed.getvalue()) == (2.5 if num_accepted else None)


def test_latencies_on_a_cpu_have_no_roofline() -> None:
    assert [len(row) for row in cells(latencies(None))] == [4, 4]
    assert "limit" not in latencies(None)


def test_the_peak_performance_is_measured_at_the_start() -> None:
    cpu = torch.device("cpu")
    peak = measure_peak(cpu, torch.float32, copied_bytes=1 << 20, matrix_size=128)
    assert 1e8 < peak.bytes_per_s < 1e13
    assert 1e8 < peak.operations_per_s < 1e14


def test_outputs_of_one_token_have_no_tpot() -> None:
    run = RunRecord([record((0.0, 1.0, 1.0), (5, 0, 1))], num_steps=1, num_retractions=0)
    assert Figures.of(run).tpot_s is None
