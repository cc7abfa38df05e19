"""`--structured`: which requests follow the schema, and that it cannot end too early."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.toy_tokenizers import byte_level

from minisgl.bench.config import BenchConfig, LatencyConfig, ReportConfig, Sizes, Span
from minisgl.bench.figures import Figures
from minisgl.bench.latency import bench_latency
from minisgl.bench.offline import bench_offline
from minisgl.bench.offline_run import RequestRecord
from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import ScheduledRequest, make_workload
from minisgl.bench.workload.schedule import make_schedule
from minisgl.bench.workload.structured import RESPONSE_FORMAT, STRUCTURED, is_structured
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.grammar.compiler import Grammars
from minisgl.matcher import mask_words

SIZES = Sizes(40, Span(3, 9), Span(4, 8))


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.25, 10), (0.5, 20), (0.9, 36), (1, 40)])
def test_a_share_of_the_requests_is_structured_and_spread_evenly(share: float, count: int) -> None:
    chosen = [is_structured(index, share) for index in range(40)]
    assert sum(chosen) == count
    assert abs(sum(chosen[:20]) - count / 2) <= 1


def test_structured_requests_have_the_prompts_and_lengths_of_the_others() -> None:
    jobs, plain = (
        make_workload(SIZES, vocab_size=99, seed=1, structured=share) for share in (0.5, 0.0)
    )
    assert [job.params().structured for job in jobs] == [None, STRUCTURED] * 20
    assert not any(job.params().structured for job in plain)
    assert [job.prompt for job in jobs] == [job.prompt for job in plain]
    lengths = [(job.params().max_tokens, job.params().ignore_eos) for job in jobs]
    assert lengths == [(job.params().max_tokens, True) for job in plain]


def test_every_workload_can_be_structured() -> None:
    for options in ({}, {"workload": "shared-prefix"}, {"workload": "multi-turn"}):
        schedule = make_schedule(
            WorkloadConfig(**options), SIZES, vocab_size=99, seed=0, structured=0.5
        )
        assert sum(request.structured for request in schedule) == len(schedule) / 2


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_gets_the_schema_as_response_format(endpoint: str) -> None:
    target = Endpoint(url="http://127.0.0.1:1/v1", endpoint=endpoint)
    bodies = [
        json.loads(
            target.body(ScheduledRequest(prompt=[1], max_tokens=5, seed=0, structured=structured))
        )
        for structured in (True, False)
    ]
    assert bodies[0].pop("response_format") == RESPONSE_FORMAT
    assert bodies[0] == bodies[1] and bodies[0]["ignore_eos"] is True


async def test_an_output_under_the_schema_cannot_end_before_its_planned_length() -> None:
    tokenizer = byte_level()
    eos = tokenizer.eos_token_id
    assert eos is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [eos])
    compiled = await grammars.compile(STRUCTURED)
    assert compiled.ignored_keywords == ()
    chance = np.random.default_rng(0)
    for _ in range(3):
        matcher = compiled.matcher()
        words = np.zeros(mask_words(tokenizer.vocab_size), np.uint32)
        text = b""
        for _ in range(1000):
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            assert eos not in allowed
            token = int(chance.choice(allowed))
            matcher.accept([token])
            text += tokenizer.token_bytes(token)
        assert matcher.error is None
        # Random tokens get through the records: nothing in them has no end.
        assert text.count(b'"note"') > 1
    grammars.close()
    grammars.join()


@pytest.mark.parametrize("config", [BenchConfig, LatencyConfig])
@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_out_of_range_is_refused(config: type, share: float) -> None:
    with pytest.raises(ConfigError, match=r"--structured -?\d\.\d: allowed: 0 to 1"):
        config(structured=share)


def test_figures_have_the_share_that_followed_a_schema() -> None:
    requests = [
        RequestRecord(
            submitted_s=0.0,
            first_token_s=1.0,
            last_token_s=2.0,
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=2,
            structured=index == 0,
        )
        for index in range(4)
    ]
    figures = Figures.of_requests(requests, 2.0, None)
    assert figures.structured_share == 0.25


async def test_runs_with_and_without_a_schema_have_the_same_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report, engine = tmp_path / "a.json", ReportConfig(), EngineConfig(device="cpu")
    lengths = []
    for share in (0.5, 0.0):
        config = BenchConfig(num_requests=4, repeat=1, structured=share, json_file=str(file))
        await bench_offline(engine, config, WorkloadConfig(input_len=4, output_len=6), report)
        found = json.loads(file.read_text())
        assert found["figures"]["structured_share"] == share
        assert found["bench_options"]["structured"] == share
        assert [one["structured"] for one in found["run"]["requests"]] == [
            is_structured(index, share) for index in range(4)
        ]
        lengths.append([one["num_output_tokens"] for one in found["run"]["requests"]])
        printed = capsys.readouterr().out
        assert ("50% of the requests under a JSON schema" in printed) == bool(share)
        assert ("share under a JSON schema" in printed) == bool(share)
    assert lengths[0] == lengths[1] == [6] * 4

    batches = LatencyConfig(
        batch_size=("2",), input_len=4, output_len=6, structured=1.0, repeat=1, json_file=str(file)
    )
    await bench_latency(engine, batches, report)
    [batch] = json.loads(file.read_text())["batches"]
    assert batch["figures"]["structured_share"] == 1 and batch["figures"]["num_output_tokens"] == 12
