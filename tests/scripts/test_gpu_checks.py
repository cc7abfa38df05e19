"""What a GPU must still show: the list, whose commands the programs take, and how it is run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_checks
import msgspec
import pytest
import typer
from bench_settings import sides_of
from dummy_config import DRAFTERS, MODELS, QUANTIZATIONS
from gpu_checks import (
    LIST,
    SHOWN,
    Check,
    Figure,
    Machine,
    Run,
    generation,
    read_checks,
    write_checks,
)
from support.folders import ROOT

from minisgl.attention.backends import BACKENDS
from minisgl.config import best_first
from minisgl.kernels.hardware import kernels_have_run
from minisgl_cli.main import app

H200 = Machine(
    gpu="NVIDIA H200", capability="9.0", gpus=2, memory_gb=150.0, torch="2.11.0", triton="3.6.0"
)
A100 = replace(H200, gpu="NVIDIA A100-SXM4-80GB", capability="8.0", gpus=1, memory_gb=85.0)
CHECKS = read_checks(LIST)
BY_NAME = {check.name: check for check in CHECKS}
SECONDS = Figure(name="s", find=r"took ([\d.,]+) s", expected={"H200": 10.0}, better="less")
RATE = Figure(name="tok/s", find=r"([\d.,]+) tok/s", expected={"H200": 2000.0}, better="more")


def check_of(name: str = "one", code: str = "pass", **more: object) -> Check:
    """A check whose command is Python code."""
    command = f"python -c {shlex.quote(code)}"
    fields = {"shows": "nothing", "command": command, "minutes": 0.1, "gpus": 1}
    return Check(name=name, **(fields | more))  # type: ignore[arg-type]


def run_of(date: str = "2026-01-01", verdict: str = "ok", capability: str = "9.0") -> Run:
    return Run(date=date, capability=capability, verdict=verdict)


# -- the list --------------------------------------------------------------------------------------


class ParsedError(Exception):
    """Ends a script when it has parsed its arguments, which are these."""


def parse_script(path: Path, words: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit if the script refuses them."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object) -> None:
        raise ParsedError(parse(self, *given))  # type: ignore[call-overload]

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [str(path), *words]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        pytest.raises(ParsedError) as ended,
    ):
        runpy.run_path(str(path), run_name="__main__")
    parsed = ended.value.args[0]
    assert isinstance(parsed, argparse.Namespace)
    return parsed


@cache
def commands() -> Any:
    return typer.main.get_command(app)


def parse_command(words: Sequence[str]) -> None:
    """Raises click's UsageError if `minisgl` refuses them."""
    group = commands()
    context = group.make_context("minisgl", list(words))
    name, command, rest = group.resolve_command(context, list(words))
    command.make_context(name, rest, parent=context)


def parse_tests(words: Sequence[str]) -> None:
    files = [word for word in words if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)
    assert [word for word in words if word not in files][:3] == ["-q", "-m", "gpu"]


def parse(command: str, folder: Path) -> None:
    words = gpu_checks.command_line(command, folder)
    while words[0] == "env" or re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[0] == "minisgl":
        return parse_command(words[1:])
    assert words[0] == sys.executable
    if words[1] == "-m":
        return {"pytest": parse_tests, "minisgl": parse_command}[words[2]](words[3:])
    script, given = ROOT / words[1], words[2:]
    assert script.is_file()
    if not given:
        return None
    parsed = parse_script(script, given)
    if script.name == "bench_settings.py":
        for side in (side for verb in parsed.verb or [""] for side in sides_of(parsed, verb)):
            parse_command(["bench", *side.bench])
            if side.serve is not None:
                parse_command(["serve", *side.serve])
    if script.name == "bench_mixed.py":
        for options in parsed.served or ():
            parse_command(["serve", *shlex.split(options)])
    return None


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_listed_command_is_one_that_its_program_takes(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "write_tokenizer", lambda folder: None)
    parse(check.command, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "python -m minisgl bench --no-such-option",
        *(
            f"python scripts/bench/bench_settings.py {options}"
            for options in (
                "--side= --side= -- --no-such-option",
                "--side= --side=--no-such-option",
                "--side= --side= --served -- --no-such-option",
                "--side= --side='| --no-such-option' --served",
            )
        ),
        "python scripts/bench/bench_mixed.py --served=--no-such-option",
    ],
)
def test_a_wrong_option_of_minisgl_would_be_found(command: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        parse(command, tmp_path)


def test_a_wrong_option_of_a_script_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("python scripts/bench/bench_kernels.py expert", tmp_path)


def test_the_list_is_written_as_it_is_read(tmp_path: Path) -> None:
    write_checks(tmp_path / "list.json", CHECKS)
    assert (tmp_path / "list.json").read_text() == LIST.read_text()
    assert not list(tmp_path.glob("*.new"))


def test_every_check_is_named_once_and_has_figures_that_can_be_read() -> None:
    assert len(BY_NAME) == len(CHECKS)
    for check in CHECKS:
        assert 0 < check.minutes <= 30, check.name
        assert check.figures or check.hosts > 1, check.name
        for figure in check.figures:
            assert re.compile(figure.find).groups == 1, figure
            assert figure.better in (("less", "more") if figure.expected else (None,)), figure
        names = {figure.name for figure in check.figures}
        assert all(names >= set(run.figures) for run in check.runs.values()), check.name
        for model, _, kind in re.findall(r"\{([^{}:]+)(:(\w[\w-]*))?\}", check.command):
            assert model in MODELS | DRAFTERS
            assert kind in ("", "tokenizer", *QUANTIZATIONS)


def test_every_kernel_every_backend_and_every_gpu_test_is_in_a_check() -> None:
    covered = {name for check in CHECKS for name in check.covers}
    package = ROOT / "minisgl"
    assert all((package / name).is_file() for name in covered)
    kernels = [
        str(path.relative_to(package))
        for path in (package / "kernels").rglob("*.py")
        if "@triton.jit" in path.read_text() and path.name != "inlined.py"
    ]
    backends = ["flash_backend", "flashinfer_backend", "triton_attention"]
    wanted = {*kernels, *(f"attention/{name}.py" for name in backends)}
    assert wanted - covered == set()
    commands = " ".join(check.command for check in CHECKS)
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert path.name in commands


def has_shown(file: str, generation: str) -> bool:
    return any(
        run.verdict in SHOWN and run.capability.startswith(f"{generation}.")
        for check in CHECKS
        if file in check.covers
        for run in check.runs.values()
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_auto_takes_no_attention_that_has_not_run_on_hopper(phase: str) -> None:
    """torch is what it falls back to."""
    files = {
        "fi": "flashinfer_backend",
        "trtllm": "flashinfer_backend",
        "triton": "triton_attention",
    }
    declared = (backend.facts for backend in BACKENDS.values())
    order = [backend.name for backend in best_first(declared, phase)]
    before = order[: order.index("torch")]
    assert before and all(has_shown(f"attention/{files[name]}.py", "9") for name in before)
    assert not has_shown("attention/flash_backend.py", "9"), "then fa may come before torch"


def test_where_our_kernels_are_preferred_no_test_has_failed_last() -> None:
    failed = [
        (check.name, gpu)
        for check in CHECKS
        for gpu, run in check.runs.items()
        if check.name.startswith("tests-") and run.verdict == "failed"
        if kernels_have_run((int(generation(run)), 0))
    ]
    assert failed == [], "mend them, or let hardware.py take that generation back"


def test_where_auto_prefers_our_kernels_one_check_has_shown_each() -> None:
    """For what kernels_have_run says of Hopper."""
    for file in ("linear/stream_kernel.py", "linear/burst_kernel.py", "linear/fp8/fp8_kernel.py"):
        assert has_shown(f"kernels/{file}", "9")
    assert has_shown("distributed/peers.py", "9")


# -- figures and verdicts --------------------------------------------------------------------------


def test_a_figure_is_the_last_number_that_is_found() -> None:
    assert RATE.read("repetition 1: 900.5 tok/s\nrepetition 2: 1,234.5 tok/s") == 1234.5
    assert RATE.read("nothing") is None


@pytest.mark.parametrize(
    ("gpu", "code", "output", "verdict", "why"),
    [
        ("NVIDIA H200", 0, "took 10.4 s\n1,950 tok/s", "ok", None),
        ("NVIDIA H200", 0, "took 5 s\n9,000 tok/s", "ok", None),
        ("NVIDIA H200", 0, "took 10.6 s\n1,950 tok/s", "worse", "s 10.6 instead of 10"),
        ("NVIDIA H200", 0, "took 9 s\n1,800 tok/s", "worse", "tok/s 1800 instead of 2000"),
        ("NVIDIA H100 80GB HBM3", 0, "took 99 s\n1 tok/s", "ran", None),
        ("NVIDIA H200", 0, "took 10 s", "failed", "its output has no tok/s"),
        ("NVIDIA H200", 1, "took 9 s\nValueError: x", "failed", "exit code 1: ValueError: x"),
        ("NVIDIA H200", None, "took 9 s", "cut off", "its time limit was reached"),
    ],
)
def test_a_verdict_compares_with_what_is_expected_of_this_gpu(
    gpu: str, code: int | None, output: str, verdict: str, why: str | None
) -> None:
    found = gpu_checks.judge(check_of(figures=[SECONDS, RATE]), gpu, code, output)
    assert (found[0], found[2]) == (verdict, why)


# -- the order -------------------------------------------------------------------------------------


def test_what_never_ran_comes_first_and_then_what_ran_longest_ago() -> None:
    checks = [
        check_of("new", runs={"NVIDIA H200": run_of("2026-03-01")}),
        check_of("old", runs={"NVIDIA H200": run_of("2026-01-01")}),
        check_of("failed", runs={"NVIDIA H200": run_of("2026-03-01", "failed")}),
        check_of("elsewhere", runs={"NVIDIA A100": run_of("2026-03-01", capability="8.0")}),
        check_of("never"),
        check_of("again", runs={"NVIDIA H200": run_of("2026-03-01")}, again="it changed"),
        check_of("many", gpus=4),
        check_of("large", memory_gb=200),
        check_of("package", needs=["no_such_module"]),
        check_of("hosts", hosts=2),
    ]
    order = [check.name for check in gpu_checks.in_order(checks, H200)]
    assert order == ["never", "again", "failed", "elsewhere", "old", "new"]
    reasons = [check.why_not(H200) for check in checks[-4:]]
    assert reasons == [
        "needs 4 GPUs",
        "needs a GPU of 200 GB",
        "needs no_such_module",
        "needs 2 hosts",
    ]


def test_a_gpu_of_another_generation_begins_with_what_was_not_shown_there() -> None:
    both = {"NVIDIA H200": run_of(), "NVIDIA A100": run_of(capability="8.0")}
    checks = [check_of("both", runs=both), check_of("hopper", runs={"NVIDIA H200": run_of()})]
    assert [check.name for check in gpu_checks.in_order(checks, A100)] == ["hopper", "both"]
    assert [check.name for check in gpu_checks.in_order(checks, H200)] == ["both", "hopper"]


def test_the_time_that_a_check_took_replaces_the_estimate() -> None:
    check = check_of(minutes=2)
    assert check.seconds(H200) == 120
    check.runs["NVIDIA H200"] = msgspec.structs.replace(run_of(), seconds=50.0)
    assert check.seconds(H200) == pytest.approx(55)
    assert check.seconds(A100) == 120
    check.runs["NVIDIA H200"] = msgspec.structs.replace(run_of(verdict="failed"), seconds=1.0)
    assert check.seconds(H200) == 120


# -- a run -----------------------------------------------------------------------------------------


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "found", classmethod(lambda cls: H200))


def run_list(tmp_path: Path, checks: Sequence[Check], *options: str) -> int:
    file = tmp_path / "list.json"
    write_checks(file, checks)
    given = ["--file", str(file), "--folder", str(tmp_path / "work"), "--commit", "abc"]
    return gpu_checks.main([*given, *options])


@pytest.mark.usefixtures("on_h200")
def test_a_run_fills_in_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        check_of("good", "print('took 10.1 s')", figures=[SECONDS], again="it changed"),
        check_of("bad", "import sys; print('before'); sys.exit('oh no')"),
    ]
    assert run_list(tmp_path, checks) == 1
    good, bad = read_checks(tmp_path / "list.json")
    run = good.runs["NVIDIA H200"]
    assert (run.verdict, run.figures, run.capability, run.gpus) == ("ok", {"s": 10.1}, "9.0", 2)
    assert (run.torch, run.triton, run.commit, good.again) == ("2.11.0", "3.6.0", "abc", None)
    assert run.seconds is not None and run.date.startswith("20")
    assert bad.runs["NVIDIA H200"].why == "exit code 1: oh no"
    printed = capsys.readouterr().out
    assert "good: ok | s 10.1" in printed
    assert "bad: failed | exit code 1: oh no\n          before\n          oh no\n" in printed
    assert "2 of 2 checks ran; 0 did not fit" in printed


@pytest.mark.usefixtures("on_h200")
def test_the_file_has_each_result_before_the_next_check_begins(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    code = f"import json; print('took', len(json.load(open({str(file)!r}))[0]['runs']), 's')"
    reads = check_of("second", code, figures=[SECONDS])
    assert run_list(tmp_path, [check_of("first"), reads]) == 0
    assert read_checks(file)[1].runs["NVIDIA H200"].figures == {"s": 1.0}


@pytest.mark.usefixtures("on_h200")
def test_checks_that_do_not_fit_are_left_for_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [check_of("long", minutes=30), check_of("short")]
    assert run_list(tmp_path, checks, "--minutes", "20") == 0
    long, short = read_checks(tmp_path / "list.json")
    assert short.runs and not long.runs
    assert "1 of 2 checks ran; 1 did not fit" in capsys.readouterr().out


@pytest.mark.usefixtures("on_h200")
def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    meets = "import os, time\nopen('{0}', 'w')\nwhile not os.path.exists('{1}'): time.sleep(0.01)"
    here, there = tmp_path / "here", tmp_path / "there"
    checks = [check_of("a", meets.format(here, there)), check_of("b", meets.format(there, here))]
    assert run_list(tmp_path, checks, "--jobs", "2") == 0
    assert all(check.runs for check in read_checks(tmp_path / "list.json"))


@pytest.mark.usefixtures("on_h200")
def test_only_named_checks_run(tmp_path: Path) -> None:
    checks = [check_of("tests-a"), check_of("tests-b"), check_of("other")]
    assert run_list(tmp_path, checks, "--only", "tests-*") == 0
    assert [bool(check.runs) for check in read_checks(tmp_path / "list.json")] == [
        True,
        True,
        False,
    ]
    with pytest.raises(SystemExit, match="--only x: no check has this name"):
        run_list(tmp_path, checks, "--only", "x")


def test_without_a_gpu_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "PROBE", "raise RuntimeError('no GPU here')")
    with pytest.raises(SystemExit, match=r"needs a GPU .* no GPU here"):
        run_list(tmp_path, [check_of()])


def test_the_list_is_shown_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [check_of("a", again="it changed"), check_of("b", runs={"NVIDIA H200": run_of()})]
    assert run_list(tmp_path, checks, "--list") == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| a | nothing | 1 | 0.1 | never; again: it changed |",
        "| b | nothing | 1 | 0.1 | NVIDIA H200, 2026-01-01: ok |",
    ]


SLEEPING_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
)


def test_a_check_that_takes_too_long_ends_with_every_process_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, limit_s = tmp_path / "log", 1234.0

    class Late(subprocess.Popen[bytes]):
        """Its time is over when it has told of its child."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != limit_s:
                return super().wait(timeout)
            while not log.read_bytes().endswith(b"\n"):
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_checks.subprocess, "Popen", Late)
    code = f"{SLEEPING_CHILD}time.sleep(600)"
    assert gpu_checks.run_group([sys.executable, "-c", code], log, limit_s, "") is None
    wait_for_end(int(log.read_text()))


def test_a_process_that_a_check_leaves_behind_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert gpu_checks.run_group([sys.executable, "-c", SLEEPING_CHILD], log, 200.0, "") == 0
    wait_for_end(int(log.read_text()))


def wait_for_end(pid: int) -> None:
    """A killed process may be a zombie until whoever adopted it asks for it."""
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)


def test_models_in_a_command_become_folders(tmp_path: Path) -> None:
    plain, packed, named = gpu_checks.command_line(
        "{Qwen3-0.6B} {Qwen3-14B:int4} {Qwen3-0.6B:tokenizer}", tmp_path
    )
    assert json.loads(Path(plain, "config.json").read_text()) == MODELS["Qwen3-0.6B"]
    assert "quantization_config" in json.loads(Path(packed, "config.json").read_text())
    assert {file.name for file in Path(named).iterdir()} > {"config.json", "tokenizer.json"}


def test_a_check_runs_the_checkout_whatever_is_installed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import minisgl, minisgl_cli; print(minisgl.__file__, minisgl_cli.__file__)"
    path = gpu_checks.python_path()
    assert gpu_checks.run_group([sys.executable, "-c", code], log, 120.0, path) == 0
    package, cli = log.read_text().split()
    assert Path(package).parent == ROOT / "minisgl"
    assert os.path.samefile(Path(cli).parent, ROOT / "cli")
