"""The benchmark scripts: what they print, not how fast they are."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from bench_settings import median_of
from gpu_checks import LIST, read_checks
from support import forked_replicas
from support.folders import SCRIPTS
from support.forked_programs import Running, minisgl, prepared

from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream

BENCH_SCRIPTS = SCRIPTS / "bench"
CHECKS = {check.name: check for check in read_checks(LIST)}
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
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


class Server(Running):
    """What bench_settings.py needs of a `subprocess.Popen` of `minisgl serve`. It is forked, and so
    is what it starts."""

    def __init__(self, arguments: list[str], environment: dict[str, str], said: int) -> None:
        """said: a file for what it prints."""
        files = [os.open(os.devnull, os.O_RDONLY), os.dup(said), os.dup(said)]
        lead = os.setsid
        super().__init__(
            prepared(forked_replicas.run, arguments, environment, None, files, lead=lead), files
        )

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """The limit is that of the test."""
        return super().wait()


def compare_settings(*options: object) -> subprocess.CompletedProcess[str]:
    """Runs bench_settings.py here, and each `minisgl` that it starts as a forked process."""
    run_other = subprocess.run

    def run_forked(command: list[object], **given: Any) -> subprocess.CompletedProcess[str]:
        if command[1:3] != ["-m", "minisgl"]:
            return run_other(command, **given)
        done = minisgl(*command[3:])
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        if given.get("check"):
            done.check_returncode()
        return done

    with forked_servers() as said, mock.patch.object(subprocess, "run", run_forked):
        done = run_script("bench_settings.py", *options)
        said.seek(0)
        done.stderr += said.read().decode()
        return done


@contextlib.contextmanager
def forked_servers() -> Iterator[IO[bytes]]:
    """The file of what those print that bench_settings.py starts meanwhile."""

    def serve(command: list[str], env: dict[str, str]) -> Server:
        assert command[1:3] == ["-m", "minisgl"]
        return Server(command[3:], env, said.fileno())

    with tempfile.TemporaryFile() as said, mock.patch.object(subprocess, "Popen", serve):
        yield said


SMALL = "--device cpu --num-pages 300 --load-format dummy"


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            "http-0.6b",
            f"--side=offline --side=serve --verb= -- {SMALL} --num-requests 4 --output-len 8",
        ),
        (
            "replicas-2",
            "--served --verb 'serve --output-len 8' --side='--num-requests 2' "
            "--side='--num-requests 4 | LOG_LEVEL=ERROR --replicas 2 --router-processes 1' "
            "-- --device cpu",
        ),
    ],
    ids=["http", "replicas"],
)
def test_settings_are_compared_with_the_first(check: str, words: str) -> None:
    done = compare_settings(*shlex.split(words))
    assert done.returncode == 0, done.stderr
    if "LOG_LEVEL" in words:  # of the environment of the second server alone
        assert done.stderr.count("INFO minisgl is loading its libraries") == 1
    [ratio] = read_figures(check, done.stdout).values()
    a, b, shown = figures(done.stdout.splitlines())["output tok/s"]
    assert float(b) / float(a) == pytest.approx(ratio, abs=0.002)
    assert float(shown) == ratio


def test_settings_are_compared_in_several_benchmarks() -> None:
    verbs = ("--verb", "latency --batch-size 1,8", "--verb", "offline --num-requests 3")
    sides = ("--side=", "--side=--speculative ngram --draft-acceptance 1")
    options = (*SMALL.split(), "--output-len", 6)
    done = compare_settings(*verbs, *sides, "--", *options)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = {figure.name: figure for figure in CHECKS["speculation-8b"].figures}
    found = [
        wanted[name].read(done.stdout) for name in ("TPOT at 1, on / off", "TPOT at 8, on / off")
    ]
    ratios = re.findall(r"TPOT p50 ms.*│ +([\d.]+) │\n", done.stdout)
    assert found == [float(ratio) for ratio in ratios[:2]]
    offline = re.findall(r"output tok/s +│.*│ +([\d.]+) │\n", done.stdout)[-1]
    assert wanted["256 requests, on / off"].read(done.stdout) == float(offline)


def test_a_host_cache_is_compared_where_prefixes_fit_the_device_and_where_not() -> None:
    verbs = ("--verb", "offline --num-prefixes 4", "--verb", "offline --num-prefixes 1")
    sides = ("--side=", "--side=--host-cache 0.1", "--")
    workload = "--workload shared-prefix --prefix-len 64 --input-len 4 --output-len 2 --repeat 1"
    options = "--device cpu --load-format dummy --num-requests 8 --max-concurrency 1 --page-size 16"
    options += " --num-pages 12 --max-seq-len-override 176"
    done = compare_settings(*verbs, *sides, *workload.split(), *options.split())
    assert (done.returncode, done.stderr) == (0, "")
    outside, inside = re.findall(r"total tok/s +│.*│ +([\d.]+) │\n", done.stdout)
    ttft, _ = re.findall(r"TTFT p50 ms +│.*│ +([\d.]+) │\n", done.stdout)
    assert [*read_figures("host-cache-8b", done.stdout).values()] == [
        float(outside),
        float(ttft),
        float(inside),
    ]


def test_sides_share_a_folder_that_is_deleted_at_the_end(tmp_path: Path) -> None:
    options = ("--host-cache", 0.01, "--disk-cache", "TEMP", "--num-requests", 1, "--output-len", 2)
    sides = ("--folder", tmp_path, "--side=", "--side=", "--")
    done = compare_settings(*sides, *SMALL.split(), "--input-len", 64, *options)
    assert (done.returncode, done.stderr) == (0, "")
    first_token = CHECKS["restart-14b"].figures[0]
    assert first_token.name == "first token, ms"
    _, ms, _ = figures(done.stdout.splitlines())["TTFT p50 ms"]
    assert first_token.read(done.stdout) == float(ms)
    assert [*tmp_path.iterdir()] == []


def test_versions_take_turns_and_the_first_to_fail_ends_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for version, code in (("a", 0), ("b", 0), ("c", 3)):
        program = f"""
import sys
open({str(log)!r}, "a").write("{version}" + " ".join(sys.argv[1:-1]) + ";")
open(sys.argv[-1], "w").write('{{"figures": {{}}}}')
sys.exit({code} if open({str(log)!r}).read().count("{version}bench") > 1 else 0)
"""
        (tmp_path / version / "minisgl").mkdir(parents=True)
        (tmp_path / version / "minisgl" / "__init__.py").touch()
        (tmp_path / version / "minisgl" / "__main__.py").write_text(program)
    versions = [word for version in "abc" for word in ("--version", tmp_path / version)]
    done = run_program("bench_settings.py", *versions, "--rounds", 3, "--", "--model", "x")
    assert done.returncode == 3
    ran = [f"{version}bench offline --model x --json" for version in "abcabc"]
    assert log.read_text().split(";")[:-1] == ran


def test_the_median_of_reports_keeps_what_all_have() -> None:
    reports = [
        {"commit": str(i), "batches": [{"num": 8, "tpot_s": time_s}], f"only in {i}": 1.0}
        for i, time_s in enumerate((3.0, 1.0, 2))
    ]
    assert median_of(reports) == {"commit": "0", "batches": [{"num": 8, "tpot_s": 2}]}


def test_a_side_that_fails_ends_the_comparison_with_its_error() -> None:
    done = compare_settings("--side=", "--side=", "--", "--device", "no")
    assert (done.returncode, done.stderr) == (
        2,
        "minisgl: --device no: allowed: auto, cuda or cpu\n",
    )


@pytest.mark.parametrize("served", [False, True])
def test_the_mixed_benchmark_compares_the_times_between_tokens(served: bool) -> None:
    steady = ("--streams", 2, "--steady-input", 8, "--steady-output", 60, "--seconds", 0.5)
    arriving = ("--rate", 50, "--input", 5, 30, "--output", 3)
    if served:
        with forked_servers():
            done = run_script("bench_mixed.py", *steady, *arriving, "--served=--device cpu")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "served with --device cpu"
    else:
        lines = bench("bench_mixed.py", *steady, *arriving)
    table = figures(lines)
    assert list(table) == ["without", "with"]
    for p50, p99, _, p999, longest, *_ in table.values():
        assert 0 < float(p50) <= float(p99) <= float(p999) <= float(longest)
    assert table["without"][-2:] == ["0", "-"] and int(table["with"][-2]) > 0
    ratio = float(table["with"][1]) / float(table["without"][1])
    assert float(table["with"][2]) == pytest.approx(ratio, abs=0.02, rel=0.02)
    assert read_figures("mixed-0.6b", "\n".join(lines))["p99, ms"] == float(table["with"][1])


def test_arriving_prompts_follow_the_prefixes_in_turns() -> None:
    prompts: list[list[int]] = []
    submit = AsyncEngine.submit

    def record(self: AsyncEngine, prompt: list[int], *given: Any, **options: Any) -> OutputStream:
        prompts.append(prompt)
        return submit(self, prompt, *given, **options)

    steady = ("--streams", 1, "--steady-input", 8, "--steady-output", 60, "--seconds", 0.5)
    arriving = ("--rate", 50, "--input", 5, 5, "--output", 1, "--prefixes", 2, "--prefix-len", 40)
    with mock.patch.object(AsyncEngine, "submit", record):
        lines = bench("bench_mixed.py", *steady, *arriving)
    first, second, *others = (prompt for prompt in prompts if len(prompt) > 8)
    assert len(first) == len(second) == 40 and len(others) > 2
    for prompt, prefix in zip(others, cycle([first, second]), strict=False):
        assert prompt[:40] == prefix and len(prompt) == 45
    assert read_figures("host-cache-itl-14b", "\n".join(lines))


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


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("bench_mixed.py", ("--attn", "oh"), "bench_mixed.py: --attn oh: allowed: auto"),
        ("bench_mixed.py", ("--streams", "0"), "0: allowed: a number above 0"),
        ("bench_settings.py", ("--side=",), "argument --side: give two or more"),
        ("bench_settings.py", ("--side=", "--side=|--replicas 2"), "need --served"),
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


def read_figures(check: str, output: str) -> dict[str, float]:
    """The figures that a check of a GPU reads; all of them must be there."""
    found = {figure.name: figure.read(output) for figure in CHECKS[check].figures}
    assert None not in found.values(), found
    return {name: value for name, value in found.items() if value is not None}
