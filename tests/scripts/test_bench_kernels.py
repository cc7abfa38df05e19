"""The timers of kernels, without a GPU: their tables, what they print, and what reads that. The
kernels themselves run in kernels/test_timed_kernels.py."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import bench_kernels
import pytest
import torch
from bench_kernels import SUBJECTS, chosen, parsed, tiles_of
from gpu_checks import LIST, Check, read_checks
from kernel_timer import Call, Case, Problem, Report, changed
from rank_kernels import ROWS, cases

from minisgl.bench.peak import Peak
from minisgl.distributed.communicator import SINGLE_RANK
from minisgl.kernels.tuning import ExpertTiles, ManyTiles

SCRIPT = "python scripts/bench/bench_kernels.py "
CHECKS = [check for check in read_checks(LIST) if check.command.startswith(SCRIPT)]
PEAK = Peak(bytes_per_s=1e12, operations_per_s=2e12, fp8_operations_per_s=4e12)


def clock(calls: Sequence[Call], rounds: int) -> float:
    """Seconds of a call, which takes as many milliseconds as it returns."""
    return sum(float(call()) for call in calls) / len(calls) / 1e3  # type: ignore[arg-type]


def printed(cases: Iterator[Case] | list[Case], **options: object) -> list[str]:
    lines: list[str] = []
    Report(PEAK, clock=clock, write=lines.append, **options).run(cases)  # type: ignore[arg-type]
    return lines


def of_command(check: Check) -> Iterator[Case]:
    given = parsed(shlex.split(check.command.removeprefix(SCRIPT)))
    for subject in given.subjects:
        if subject == "collectives":
            yield from cases(SINGLE_RANK, SINGLE_RANK, given.rows or ROWS)
        else:
            yield from chosen(subject, given)


def any_problem() -> Problem:
    """By each of the names that checks read."""
    names = ("minisgl", "triton", "unsplit", "fi", "cuBLAS")
    return Problem(calls={name: lambda: [lambda: 2.0] for name in names}, num_bytes=1e9)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_finds_each_of_its_figures_in_one_row(check: Check) -> None:
    kernels = parsed(shlex.split(check.command.removeprefix(SCRIPT))).kernels
    rows = printed([Case(case.name, any_problem) for case in of_command(check)], kernels=kernels)
    for figure in check.figures:
        values = [value for row in rows if (value := figure.read(row)) is not None]
        expected = {"µs": 2000.0, "TB/s": 0.5, "TFLOP/s": 0.0}[figure.name.rpartition(" ")[2]]
        assert values == [expected], figure.find


@pytest.mark.parametrize("subject", SUBJECTS)
def test_cases_have_names_of_their_own_that_fit_their_column(subject: str) -> None:
    names = [case.name for case in SUBJECTS[subject](None)]
    assert len(set(names)) == len(names) > 0
    assert max(map(len, names)) <= 56


def test_rows_have_times_limits_and_rates() -> None:
    problem = Problem(
        calls={"ours": lambda: [lambda: 1.0, lambda: 3.0], "other": lambda: [lambda: 8.0]},
        num_bytes=1e9,
        operations=4e9,
        repeats=2,
    )
    first, second = (row.split() for row in printed([Case("case", lambda: problem)])[1:])
    assert first == ["case", "ours", "1000.00", "2000.00", "200%", "1.00", "4"]
    assert second == ["case", "other", "4000.00", "2000.00", "50%", "0.25", "1"]


@pytest.mark.parametrize(("in_fp8", "limit_s"), [(False, 2e-3), (True, 1e-3)])
def test_the_limit_is_that_of_bytes_or_of_operations(in_fp8: bool, limit_s: float) -> None:
    problem = Problem(calls={}, num_bytes=0.5e9, operations=4e9, in_fp8=in_fp8)
    assert problem.limit_s(PEAK) == limit_s
    assert Problem(calls={}, num_bytes=3e9, operations=1.0).limit_s(PEAK) == 3e-3


def test_a_wrong_result_is_marked_and_padding_is_not_compared() -> None:
    expected = torch.tensor([[1.0], [2.0], [9.0]])
    results = {"right": [1, 2, torch.nan], "close": [1, 2.001, 0], "wrong": [1, 2.1, 9]}
    calls = {
        name: partial(list, [partial(torch.tensor, [[number] for number in found])])
        for name, found in results.items()
    }
    problem = Problem(calls=calls, expected=expected, num_rows=2)
    lines: list[str] = []
    report = Report(None, clock=lambda calls, rounds: 1.0, write=lines.append)
    assert not report.run([Case("case", lambda: problem)])
    assert [line.endswith("WRONG") for line in lines[1:]] == [False, False, True]


def test_what_fails_has_its_reason_in_its_row_and_the_others_their_times() -> None:
    def fail() -> Sequence[Call]:
        raise ImportError("no such package\nmore")

    problem = Problem(calls={"lost": fail, "ours": lambda: [lambda: 1.0]})
    lost, ours = printed([Case("case", lambda: problem)])[1:]
    assert lost.split(maxsplit=2) == ["case", "lost", "no such package"]
    assert ours.split()[2] == "1000.00"
    with pytest.raises(ImportError):
        printed([Case("case", lambda: problem)], passed_over=())


def test_a_case_that_cannot_be_made_says_why_and_the_next_is_timed() -> None:
    def fail() -> Problem:
        raise ValueError("this GPU has no FP8")

    ours = Problem(calls={"ours": lambda: [lambda: 1.0]})
    lines = printed([Case("one", fail), Case("two", lambda: ours)])[1:]
    assert [line.split()[:2] for line in lines] == [["one", "this"], ["two", "ours"]]
    with pytest.raises(ValueError):
        printed([Case("one", fail)], passed_over=())


def test_all_combinations_of_tiles_are_tried_and_the_best_are_printed() -> None:
    now = ManyTiles(ExpertTiles(64, 16, 128, 4, 3), ExpertTiles(64, 16, 128, 4, 3))
    tried: list[ManyTiles] = []

    def tiled(tiles: ManyTiles) -> Sequence[Call]:
        tried.append(tiles)
        if tiles.inner.block_n == 32:
            raise RuntimeError("out of memory")
        result = torch.tensor([float(tiles.inner.num_stages)])
        return [lambda: result if tiles.outer.block_m == 99 else torch.tensor([3.0])]

    problem = Problem(calls={}, tiles=lambda: now, tiled=tiled)
    choice = dict(map(tiles_of, ["inner.block_n=32,64", "inner.num_stages=2,3", "outer.block_m=8"]))
    rows = printed([Case("case", lambda: problem)], tiles=choice)
    assert len(tried) == 1 + 2 * 2 and tried[-1].outer.block_m == 8
    assert [row[:6] for row in rows[1:]] == ["  not ", "  not ", "  in u", "    30", "    30"]
    assert rows[-1].endswith("µs  inner.block_n=64 inner.num_stages=3 outer.block_m=8")
    rows = printed([Case("case", lambda: problem)], tiles={**choice, "outer.block_m": [99]})
    assert "  wrong: inner.block_n=64 inner.num_stages=2 outer.block_m=99" in rows


def test_a_field_that_tiles_have_not_is_refused() -> None:
    tiles = ExpertTiles(64, 16, 128, 4, 3)
    both = ManyTiles(tiles, tiles)
    for of, field in ((tiles, "blockn"), (tiles, "block_n.x"), (both, "inner"), (both, "block_n")):
        with pytest.raises(SystemExit, match=f"--tiles {field}: allowed of {type(of).__name__}: "):
            changed(of, field, 32)
    assert changed(both, "inner.block_n", 32) == ManyTiles(ExpertTiles(32, 16, 128, 4, 3), tiles)


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "experts", "--tiles", "block_n=32,64"])
    assert bench_kernels.main() == 1
    assert capsys.readouterr().err == "bench_kernels.py needs a GPU.\n"


@pytest.mark.parametrize("tiles", ["block_n", "block_n=", "=3", "block_n=a,b"])
def test_tiles_without_numbers_are_refused(tiles: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(["linear", "--tiles", tiles])
    assert f"{tiles}: allowed: FIELD=N,N" in capsys.readouterr().err


def test_collectives_are_compared_before_they_are_timed() -> None:
    for case in cases(SINGLE_RANK, SINGLE_RANK, [3]):
        for make_calls in case.make().calls.values():
            for call in make_calls():
                call()
