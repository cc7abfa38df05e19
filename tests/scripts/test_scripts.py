"""The scripts that a person runs first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.folders import SCRIPTS

from minisgl.models.hub import DEMO_NOTE


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=environment or None,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_quickstart_ask_starts_a_server_prints_its_answer_and_stops_it() -> None:
    result = run(sys.executable, SCRIPTS / "ask.py", "--device", "cpu", "--num-pages", "64")
    assert result.returncode == 0, result.stderr
    _, _, conversation = result.stdout.partition("\n> ")
    _, *answer, last_line = conversation.splitlines()
    known = "minisgl is a compact and fast inference engine for language models."
    assert "".join(answer) == known
    assert DEMO_NOTE in result.stdout
    assert DEMO_NOTE in result.stderr  # where the server says it
    assert last_line == "The server has stopped."


def test_quickstart_ask_reports_why_the_server_did_not_start() -> None:
    result = run(sys.executable, SCRIPTS / "ask.py", "--dtype", "int3")
    assert result.returncode == 2
    assert result.stderr.startswith("minisgl: --dtype int3: allowed: ")


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh", "venv.sh"])
def test_the_shell_scripts_have_valid_syntax(script: str) -> None:
    assert run("bash", "-n", SCRIPTS / script).returncode == 0


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "there is no python3"),
        ('[ "$1" = -V ] && echo Python 3.9.2 || exit 1', "python3 is Python 3.9.2"),
    ],
)
def test_without_a_supported_python_the_setup_says_so(
    tmp_path: Path, python: str | None, said: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if python is not None:
        (tools / "python3").write_text(f"#!{tools / 'bash'}\n{python}\n")
        (tools / "python3").chmod(0o755)
    shutil.copytree(SCRIPTS, tmp_path / "scripts")  # beside which there is no .venv
    result = run(tools / "bash", tmp_path / "scripts" / "quickstart.sh", PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr == f"minisgl needs Python 3.11 or 3.12 on the PATH ({said}).\n"


def test_the_python_probe_accepts_this_python_and_finds_its_torch() -> None:
    result = run(sys.executable, SCRIPTS / "probe_python.py")
    assert result.returncode == 0
    assert any((Path(folder) / "torch").is_dir() for folder in result.stdout.splitlines())


# -- benchmarks: what they print, not how fast ----------------------------------------------------


def bench(script: str, *options: object) -> list[str]:
    """The lines that a benchmark prints of the demo model's dimensions, on the CPU."""
    result = run(
        sys.executable,
        SCRIPTS / "bench" / script,
        "--device",
        "cpu",
        "--num-pages",
        "300",
        *options,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "demo with random weights in float32, on CPU" in result.stdout
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
    ],
)
def test_a_benchmark_script_refuses_an_invalid_value(
    script: str, options: tuple[str, ...], said: str
) -> None:
    result = run(sys.executable, SCRIPTS / "bench" / script, *options)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
