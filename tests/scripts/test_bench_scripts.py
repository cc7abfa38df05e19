"""The benchmark scripts: what they print, not how fast they are."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from dummy_config import config_of
from support.draft_policies import choose_by_clock
from support.folders import SCRIPTS
from support.pooled_checkpoints import make_pooled

from minisgl.kvcache.copies import LoadRule
from minisgl.tiers.host.host_copies import HostCopies

BENCH_SCRIPTS = SCRIPTS / "bench"
Run = Callable[..., subprocess.CompletedProcess[str]]


def run_program(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    """For scripts that start processes, which import the script."""
    command = [sys.executable, str(BENCH_SCRIPTS / name), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


def run_script(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    """As `run_program`, in this process, which has imported torch already."""
    command = [str(BENCH_SCRIPTS / name), *map(str, options)]
    code: object = 0
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ending:
            code = ending.code
        finally:
            gc.unfreeze()
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


@pytest.mark.parametrize("clock", [("--step-ms", 2), ()])
def test_bench_server_compares_server_and_engine(clock: tuple[object, ...]) -> None:
    options = ("--num", 6, "--input", 5, 9, "--output", 10, 12, "--repeat", 1)
    done = run_program("bench_serve.py", "--device", "cpu", "--num-pages", 300, *options, *clock)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 requests, 5 to 9 tokens in, 10 to 12 out, all at once" in done.stdout
    assert ("a clock takes the place of the model: 2 ms a step" in done.stdout) == bool(clock)
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line[0] == "│"]
    figures = {name.strip(): float(value.strip(" %").replace(",", "")) for name, value in rows}
    served, offline = figures["served tok/s"], figures["offline tok/s"]  # rounded to whole ones
    least, most = (served - 0.5) / (offline + 0.5), (served + 0.5) / (offline - 0.5)
    assert 100 * least - 0.05 <= figures["served / offline"] <= 100 * most + 0.05
    # On a busy machine a client may read all of an answer at once.
    assert 0 <= figures["ITL p50 ms"] <= figures["ITL p99 ms"]
    assert 0 < figures["TTFT p50 ms"] <= figures["TTFT p99 ms"]
    assert 0 <= figures["one token"] <= 100


def test_bench_server_reports_why_the_engine_does_not_start() -> None:
    done = run_program("bench_serve.py", "/no/such/folder", "--num", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("bench_serve.py: ") and "/no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_router_tells_the_cost_of_a_token_and_how_much_later_first_bytes_come() -> None:
    load = ("--streams", 4, "--rate", 200, "--seconds", 0.2, "--requests", 5, "--repeat", 1)
    done = run_program("bench_router.py", *load)
    assert done.stderr == ""
    cost, delay = done.stdout.splitlines()[-2:]
    found = re.fullmatch(r"CPU of the router: (\S+) µs a token \(at most 10\)", cost)
    assert found is not None and float(found[1]) > 0
    found = re.fullmatch(r"first byte later at p99: (\S+) ms \(at most 1\)", delay)
    assert found is not None
    assert done.returncode in (0, 1)  # whether both are within their limits


def test_a_short_soak_run_leaves_nothing_behind() -> None:
    done = run_program("soak.py", "--minutes", 0.05)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    assert "Traceback" not in done.stderr


def bench(script: str, *options: object, run: Run = run_script) -> list[str]:
    """The lines that a benchmark prints of the demo model's dimensions, on the CPU."""
    result = run(script, "--device", "cpu", "--num-pages", 300, *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search("demo with random weights in float32, on (2 x )?CPU", result.stdout)
    return result.stdout.splitlines()


def figures(lines: list[str]) -> dict[str, list[str]]:
    """The cells of a table's rows, without commas in numbers, by the first of each."""
    rows = [line.strip("│").replace(",", "").split("│") for line in lines if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_prefill_benchmark_counts_operations() -> None:
    lines = bench("bench_prefill.py", "--num", 3, "--length", 50, "--peak", 2)
    assert "prefix cache naive" in lines[1]
    assert "3 requests, 50 tokens in, 1 out, greedy, all at once, repetition 2" in lines[-6]
    assert [line[:13].strip() for line in lines[-5:]] == [
        *("seconds", "prompt tok/s", "TFLOP", "TFLOP/s", "share of peak")
    ]
    assert lines[-1].endswith("of 2.000 TFLOP/s, as given")


def test_the_prefill_benchmark_measures_the_peak_unless_given() -> None:
    assert bench("bench_prefill.py", "--num", 1, "--length", 9)[-1].endswith("measured here")


def test_the_shared_prefix_benchmark_compares_the_caches() -> None:
    options = ("--num", 6, "--prefix", 64, "--unique", 10, "--output", 2)
    lines = bench("bench_shared_prefix.py", *options, "--max-prefill-length", 74)
    table = figures(lines)
    assert list(table) == ["radix", "naive"]
    # One request a step: the later ones find four pages of the first one.
    assert table["radix"][3] != "0.0%" and table["naive"][3] == "0.0%"
    radix, naive = (float(row[1]) for row in table.values())
    assert lines[-1].startswith("radix has ") and lines[-1].endswith("throughput of naive")
    assert float(lines[-1].split()[2]) == pytest.approx(radix / naive, abs=0.02, rel=0.02)


def test_the_pipeline_benchmark_shows_how_long_each_stage_waits() -> None:
    table = figures(bench("bench_pipeline.py", "--num", 8, "--pp", 2, run=run_program))
    assert list(table) == ["0", "1"]
    for rank, whole, middle, step_ms in table.values():
        assert rank == "0" and float(step_ms) > 0
        assert 0 < float(whole.rstrip("%")) < 100 and 0 < float(middle.rstrip("%")) < 100


def test_the_speculation_benchmark_compares_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_by_clock(monkeypatch)
    options = ("--batch-size", "1,2", "--output-len", 24, "--requests", 3)
    file = tmp_path / "figures.json"
    lines = bench("bench_speculation.py", *options, "--draft-acceptance", 1, "--json", file)
    assert any(line.startswith("speculation ngram: up to 3 drafts") for line in lines)
    batches = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    assert [row[0].strip() for row in batches] == ["1", "2", "3"]
    for row in batches:
        off, on, ratio = (float(cell.replace(",", "")) for cell in row[1:4])
        assert off > 0 and on / off == pytest.approx(ratio, rel=0.02)
    shown = json.loads(file.read_text())
    assert list(shown) == ["off", "on"]
    assert shown["off"]["offline"]["draft_acceptance"] is None
    # Drafts behind an end do not count.
    found = [*shown["on"]["batches"].values(), shown["on"]["offline"]]
    assert all(0.5 < each["draft_acceptance"] <= 1 for each in found)
    assert all(1 < each["tokens_per_step"] <= 4 for each in found)


@pytest.mark.parametrize("arrivals", [(), ("--poisson",)])
def test_the_mixed_benchmark_compares_the_times_between_tokens(arrivals: tuple[str, ...]) -> None:
    steady = ("--streams", 2, "--steady-input", 8, "--steady-output", 60, "--seconds", 0.5)
    arriving = ("--rate", 50, "--input", 5, 30, "--output", 3, *arrivals)
    lines = bench("bench_mixed.py", *steady, *arriving)
    table = figures(lines)
    assert list(table) == ["without", "with"]
    for p50, p99, longest, *_ in table.values():
        assert 0 < float(p50) <= float(p99) <= float(longest)
    assert table["without"][-1] == "0" and int(table["with"][-1]) > 0
    ratio = float(table["with"][1]) / float(table["without"][0])
    assert lines[-1].endswith("times the median without")
    assert float(lines[-1].split()[5]) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("bench_prefill.py", ("--attn", "oh"), "bench_prefill.py: --attn oh: allowed: auto"),
        ("bench_shared_prefix.py", ("--num", "0"), "0: allowed: a number above 0"),
        ("bench_mixed.py", ("--input", "5", "4"), "LOW is above HIGH"),
        ("bench_mixed.py", ("--rate", "often"), "invalid number value: 'often'"),
        ("bench_transfer.py", ("--pages", "0"), "0: allowed: a number above 0"),
    ],
)
def test_a_benchmark_script_refuses_an_invalid_value(
    script: str, options: tuple[str, ...], said: str
) -> None:
    result = run_script(script, *options)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_benchmark_of_a_restart_compares_both_engines() -> None:
    lines = bench("bench_restart.py", "--num", 2, "--prefix", 64, "--host-cache", 0.01)
    table = figures(lines)
    assert list(table) == ["first", "second"]
    for first, p50, *_ in table.values():
        assert float(first) > 0 and float(p50) > 0
    assert table["first"][2] == "0.0%"
    assert any(line.endswith("GB on disk") for line in lines)


def test_the_benchmark_of_transfers_compares_what_carries_pages() -> None:
    done = run_script("bench_transfer.py", "--page-mb", 0.1, "--pages", 4, "--rounds", 1)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, *rows = done.stdout.splitlines()
    assert first == "4 pages of 0.1 MB, GB/s"
    names = [name.strip() for name, *_ in (re.split(r"\s{2,}", row) for row in rows)]
    assert names[:2] == ["socket, Unix", "socket, TCP"]  # and those of NIXL where it is installed
    assert names[-1] == "device, Unix"
    for row in rows:
        lowest, highest = map(float, row.split()[-2:])
        assert 0 <= lowest <= highest


@pytest.mark.parametrize("installed", [False, True])
def test_bench_embed_compares_vectors_of_the_same_texts(tmp_path: Path, installed: bool) -> None:
    """A module takes the place of the package, whose vectors are too far away to be ours."""
    make_pooled("qwen3", tmp_path)

    def load(folder: str, **options: object) -> object:
        vectors = np.full((4, 128), 2, np.float32)
        return SimpleNamespace(encode=lambda texts, **given: vectors[: len(texts)])

    module = ModuleType("sentence_transformers")
    module.__dict__["SentenceTransformer"] = load
    modules = {"sentence_transformers": module if installed else None}
    options = ("--num", 4, "--words", 2, 5, "--repeat", 1)
    with mock.patch.dict(sys.modules, modules):
        done = run_script("bench_embed.py", "--model", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert "4 texts of 2 to 5 words" in done.stdout
    assert re.search(r"^minisgl: [\d.,]+ texts/s, [\d,]+ tok/s", done.stdout, re.MULTILINE)
    assert ("minisgl is measured alone" in done.stdout) != installed
    told = re.search(r"largest difference of a number: (.+)", done.stdout)
    assert (told is not None) == installed
    assert told is None or 1 < float(told[1]) < 3


def test_bench_grammar_compiles_and_masks_twenty_constraints() -> None:
    done = run_script("bench_grammar.py", "--vocab-size", 2000)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2000 tokens; the first grammar after ")
    assert len(lines) == 1 + 1 + 20 + 1 + 2
    for summary in lines[-2:]:
        middle, at_90, most = map(float, summary.split()[-3:])
        assert 0 < middle <= at_90 <= most


def test_conversations_in_turns_are_loaded_from_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether loads pay is measured, which depends on what else the machine does."""
    monkeypatch.setattr(HostCopies, "measure", lambda self, compute_s: LoadRule(1e-6, 1.0))
    sizes = ("--conversations", 4, "--prefix", 64, "--unique", 4, "--output", 2, "--page-size", 16)
    options = ("--at-once", 1, "--stream-tokens", 8, "--host-cache", 0.1, "--num-pages", 12)
    options += ("--max-seq-len-override", 176)
    done = run_script("bench_shared_prefix.py", "--device", "cpu", *sizes, *options)
    assert (done.returncode, done.stderr) == (0, "")
    table = figures(done.stdout.splitlines())
    assert float(table["host"][2].rstrip("%")) > 50 > float(table["none"][2].rstrip("%"))
    assert float(table["loads"][0]) > 0 and float(table["offloads of the first round"][0]) > 0
    assert float(table["beside loads"][1]) > 0


def test_conversations_need_a_host_cache() -> None:
    done = run_script("bench_shared_prefix.py", "--conversations", 4)
    assert done.returncode == 2 and "--conversations needs --host-cache" in done.stderr


def test_bench_state_prefix_counts_the_requests_that_go_on_from_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3.5-tiny")))
    done = run_script("bench_state_prefix.py", tmp_path, "--device", "cpu", "--num", 5)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line[0] == "│"]
    assert [[cell.strip() for cell in row[:4]] for row in rows] == [
        ["1,500", "700", "3 of 5", "1,488"],
        ["1,600", "600", "3 of 5", "1,600"],
    ]
