"""Workloads of `bench serve`: requests, arrival times, and the options that are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.config import STANDARD, BenchConfig, ReportConfig, Sizes, Span
from minisgl.bench.online.load_config import LoadConfig, Point, check_load
from minisgl.bench.workload.config import WorkloadConfig, check_lengths
from minisgl.bench.workload.requests import ScheduledRequest, make_workload
from minisgl.bench.workload.schedule import (
    at_rate,
    chat_text,
    make_schedule,
    schedule_multi_turn,
    schedule_shared_prefix,
    schedule_trace,
)
from minisgl.bench.workload.trace import TraceEntry, read_trace
from minisgl.errors import ConfigError

SMALL = Sizes(12, Span(3, 9), Span(2, 5))


def prompts(schedule: list[ScheduledRequest]) -> list[list[int]]:
    return [request.prompt for request in schedule]


# -- workloads ------------------------------------------------------------------------------------


def test_the_schedule_without_options_is_the_standard_workload() -> None:
    schedule = make_schedule(WorkloadConfig(), STANDARD, vocab_size=151_936, seed=3)
    assert schedule == make_workload(STANDARD, vocab_size=151_936, seed=3)


def test_shared_prefixes_are_used_in_turns() -> None:
    config = WorkloadConfig(workload="shared-prefix", prefix_len=20, num_prefixes=3)
    schedule = schedule_shared_prefix(SMALL, 999, 0, config)
    starts = [tuple(prompt[:20]) for prompt in prompts(schedule)]
    assert len(set(starts)) == 3 and starts[:3] == starts[3:6]
    assert [prompt[20:] for prompt in prompts(schedule)] == prompts(
        make_workload(SMALL, vocab_size=999, seed=0)
    )
    other = schedule_shared_prefix(SMALL, 999, 1, config)
    assert not {tuple(prompt[:4]) for prompt in prompts(other)} & {start[:4] for start in starts}


def test_a_question_of_a_conversation_waits_for_the_one_before() -> None:
    config = WorkloadConfig(workload="multi-turn", num_turns=5, think_time=1.5)
    schedule = schedule_multi_turn(SMALL, 999, 0, config)
    assert [request.parent for request in schedule] == [None, 0, 1, 2, 3, None, 5, 6, 7, 8]
    assert [request.continues for request in schedule] == [False, *[True] * 4] * 2
    assert [request.pause_s for request in schedule] == [0.0, *[1.5] * 4] * 2


def row(timestamp: float, input_length: int, **fields: Any) -> TraceEntry:
    return TraceEntry(timestamp=timestamp, input_length=input_length, output_length=7, **fields)


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    (file := tmp_path / "trace.jsonl").touch()
    config = WorkloadConfig(trace=str(file), trace_scale=0.5, trace_block_size=4)
    rows = [
        row(61.0, 10, hash_ids=[1, 2, 3], chat_id=5, parent_chat_id=-1),
        row(62.0, 14, hash_ids=[1, 2, 9], chat_id=6, parent_chat_id=-1),
        row(63.0, 20, hash_ids=[1, 2, 3, 4], chat_id=7, parent_chat_id=5),
        row(64.0, 3),
    ]
    schedule = schedule_trace(rows, 999, 0, config)
    assert [len(prompt) for prompt in prompts(schedule)] == [10, 14, 20, 3]
    assert [request.due_s for request in schedule] == [0.0, 0.5, 1.0, 1.5]
    assert [request.parent for request in schedule] == [None, None, 0, None]
    first, other, child, _ = prompts(schedule)
    assert first == child[:10] and first[:8] == other[:8]
    assert first[8:] != other[8:10]
    assert schedule_trace(rows, 999, 1, config)[0].prompt[:4] != first[:4]


def test_arrivals_have_the_requested_rate_and_distribution() -> None:
    schedule = make_workload(Sizes(4000, Span(1, 1), Span(1, 1)), vocab_size=9, seed=0)
    constant = at_rate(schedule, 20, "constant", seed=0)
    assert [request.due_s for request in constant[:3]] == pytest.approx([0, 0.05, 0.1])
    poisson = at_rate(schedule, 20, "poisson", seed=0)
    assert poisson[-1].due_s == pytest.approx(4000 / 20, rel=0.1)
    gaps = [after.due_s - before.due_s for before, after in pairwise(poisson)]
    square = sum(gap**2 for gap in gaps) / len(gaps)
    assert square == pytest.approx(2 / 20**2, rel=0.2)  # of the exponential distribution
    assert (
        poisson
        == at_rate(schedule, 20, "poisson", seed=0)
        != at_rate(schedule, 20, "poisson", seed=1)
    )


def test_only_the_first_question_of_a_conversation_has_an_arrival_time() -> None:
    config = WorkloadConfig(workload="multi-turn", num_turns=3)
    schedule = schedule_multi_turn(SMALL, 999, 0, config)
    due = [request.due_s for request in at_rate(schedule, 2, "constant", seed=0)]
    assert due == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1, 1.5, 1.5, 1.5]


def test_a_chat_prompt_has_as_many_words_as_tokens_requested() -> None:
    assert len(chat_text([0, 5, 5000, 123]).split()) == 4


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 12),
        ({"workload": "shared-prefix", "prefix_len": 4}, 12),
        ({"workload": "multi-turn", "num_turns": 5}, 10),
    ],
)
def test_the_options_choose_the_workload(options: dict[str, Any], count: int) -> None:
    config = WorkloadConfig(input_len=6, **options)
    sizes = config.fix(SMALL)
    assert (sizes.prompt, sizes.output) == (Span(6, 6), SMALL.output)
    schedule = make_schedule(config, sizes, vocab_size=99, seed=0)
    assert len(schedule) == count
    assert {len(prompt) % 4 for prompt in prompts(schedule)} == {2}
    assert "6" in config.describe(sizes)


# -- trace files ----------------------------------------------------------------------------------


def test_a_trace_is_ordered_by_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"chat_id": 9, "parent_chat_id": 8, "timestamp": 2.5, "input_length": 3}
        | {"output_length": 0, "type": "text", "turn": 2, "hash_ids": [7]},
        {"chat_id": "a", "parent": "b", "timestamp": 1, "input_length": 3, "output_length": 1},
        {"timestamp": 0, "input_length": 3, "output_length": 1},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    rows = read_trace(file, None)
    assert [row.timestamp for row in rows] == [0, 1, 2.5]
    assert [row.parent for row in rows] == [None, "b", 8]
    assert [row.timestamp for row in read_trace(file, 2)] == [1, 2.5]
    file.write_text("\ufeff" + file.read_text())
    assert read_trace(file, None) == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ('{"timestamp": 1, "input_length": 1}', "line 1: Object missing required field"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length of 1 or more"),
        ('\n{"timestamp": "x", "input_length": 1, "output_length": 1}', "line 2: Expected `float`"),
        ("\xff", "line 1: "),
        ('\n\xef\xbb\xbf{"timestamp": 1, "input_length": 1, "output_length": 1}', "line 2: JSON"),
    ],
)
def test_an_invalid_trace_is_refused_with_the_line_number(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said) as refused:
        read_trace(file, None)
    assert str(refused.value).startswith(f"--trace {file}")


# -- options --------------------------------------------------------------------------------------


def test_a_sweep_is_over_rates_or_over_concurrencies() -> None:
    assert LoadConfig().points == [Point(None, None)]
    rates = LoadConfig(request_rate=("1,2.5", "inf", "1"), max_concurrency=("8",))
    assert rates.points == [Point(1.0, 8), Point(2.5, 8), Point(None, 8)]
    shorts = [point.short() for point in rates.points]
    assert shorts == ["1/s, 8 at once", "2.5/s, 8 at once", "8 at once"]
    assert LoadConfig(max_concurrency=("1,4",)).points == [Point(None, 1), Point(None, 4)]


def test_goodput_limits_are_given_in_milliseconds() -> None:
    assert LoadConfig(goodput=("ttft:500,tpot:50", "e2e:9000")).limits_s == {
        "ttft": 0.5,
        "tpot": 0.05,
        "e2e": 9.0,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "--url localhost:8000: allowed: an address such as"),
        ({"url": "http://[::1"}, "--url http://[::1: allowed"),
        ({"api_key": "secret"}, "--api-key (not shown): only with --url"),
        ({"vocab_size": 7}, "--vocab-size 7: only with --url"),
        ({"endpoint": "embeddings"}, "--endpoint embeddings: allowed: auto, completions or chat"),
        ({"arrivals": "gamma"}, "--arrivals gamma: allowed: poisson or constant"),
        ({"request_rate": ("1,x",)}, "--request-rate 1,x: allowed: numbers above 0, or inf"),
        ({"request_rate": ("nan",)}, "--request-rate nan: allowed"),
        ({"max_concurrency": ("0",)}, "--max-concurrency 0: allowed: whole numbers"),
        (
            {"request_rate": ("1,2",), "max_concurrency": ("3,4",)},
            "--max-concurrency 3,4: a sweep goes over this or over --request-rate",
        ),
        ({"goodput": ("ttfb:3",)}, "--goodput ttfb:3: allowed: ttft:MILLISECONDS"),
        ({"goodput": ("ttft:-3",)}, "--goodput ttft:-3: allowed"),
        ({"request_timeout": 0.0}, "--request-timeout 0.0: allowed: a number above 0"),
    ],
)
def test_invalid_load_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LoadConfig(**options)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workload": "burst"}, "--workload burst: allowed: random, shared-prefix"),
        ({"workload": "trace"}, "--workload trace: needs --trace FILE"),
        ({"trace": "/no/such"}, "--trace /no/such: allowed: a file that exists"),
        ({"trace": __file__, "workload": "multi-turn"}, "--workload multi-turn: allowed with"),
        ({"trace": __file__, "input_len": 3}, "--input-len 3: a trace has its own lengths"),
        ({"prefix_len": 3}, "--prefix-len 3: only with --workload shared-prefix"),
        ({"workload": "multi-turn", "num_turns": 1}, "--num-turns 1: allowed: 2 or more"),
        ({"think_time": 1.0}, "--think-time 1.0: only with --workload multi-turn"),
        ({"trace_scale": -1.0}, "--trace-scale -1.0: allowed: 0 or more"),
    ],
)
def test_invalid_workload_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkloadConfig(**options)
    assert str(refused.value).startswith(said)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="--endpoint completions: allowed with --workload multi"):
        check_load(WorkloadConfig(workload="multi-turn"), LoadConfig(endpoint="completions"))
    with pytest.raises(ConfigError, match="--request-rate 3: a trace has its own times"):
        check_load(WorkloadConfig(trace=__file__), LoadConfig(request_rate=("3",)))
    with pytest.raises(ConfigError, match="--input-len 5: not together with --min- or"):
        check_lengths(BenchConfig(max_prompt_length=9), WorkloadConfig(input_len=5))


def test_a_missing_matplotlib_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib is missing; pip install matplotlib"):
        ReportConfig(plot_file=str(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match=r"x\.txt: at the end of the name allowed: \.png"):
        ReportConfig(plot_file=str(tmp_path / "x.txt"))
    with pytest.raises(ConfigError, match="--csv /no/such/x: allowed: a file in a folder"):
        ReportConfig(csv_file="/no/such/x")
