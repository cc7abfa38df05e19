"""scripts/tools/stress_tests.py on a folder of a few small tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.folders import SCRIPTS

TESTS = """
import pathlib
import pytest

HERE = pathlib.Path(__file__).parent

def note(name):
    with (HERE.parent / "order.txt").open("a") as order:
        order.write(f"{pathlib.Path(__file__).stem}.{name}\\n")

@pytest.mark.parametrize("number", range(8))
def test_passes(number):
    note(number)

def test_fails_once():
    marker = HERE.parent / f"{pathlib.Path(__file__).stem}.failed"
    first = not marker.exists()
    marker.touch()
    assert not first

@pytest.mark.skip(reason="shows in the table")
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tools = tmp_path / "scripts" / "tools"
    tools.mkdir(parents=True)
    shutil.copy(SCRIPTS / "tools" / "stress_tests.py", tools)
    (tmp_path / "tests").mkdir()
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / "tests" / name).write_text(TESTS)
    return tmp_path


def stress(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, checkout / "scripts/tools/stress_tests.py", checkout / "results"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def test_each_run_has_a_row_and_what_failed_is_counted_by_kind(checkout: Path) -> None:
    code, lines = stress(checkout, "--loaded", "2", "--shuffled", "1", "--shards", "2")
    seed = json.loads((checkout / "results" / "seeds.json").read_text())["shuffled-1"]
    assert code == 1
    table = lines[lines.index("| run | seed | passed | skipped | failed |") + 2 :]
    assert sorted(table[:2]) == ["| loaded 1 |  | 16 | 2 | 2 |", "| loaded 2 |  | 18 | 2 | 0 |"]
    assert table[2:] == [
        f"| shuffled 1 | {seed} | 18 | 2 | 0 |",
        "",
        "| failed | loaded | shuffled |",
        "|---|---|---|",
        "| tests.test_one::test_fails_once | 1 | 0 |",
        "| tests.test_two::test_fails_once | 1 | 0 |",
    ]


def test_a_second_call_runs_only_the_shards_that_have_no_result(checkout: Path) -> None:
    stress(checkout, "--loaded", "0", "--shuffled", "1", "--shards", "2")
    first = (checkout / "order.txt").read_text()
    (checkout / "results" / "shuffled-1-01.xml").unlink()
    code, lines = stress(checkout, "--loaded", "0", "--shuffled", "1", "--shards", "2")
    again = (checkout / "order.txt").read_text().removeprefix(first).splitlines()
    assert [line for line in lines if "ended with" in line] == [
        "shuffled-1-01: pytest ended with 0"
    ]
    assert len({line.split(".")[0] for line in again}) == 1  # one file of the two
    assert len(again) == 8
    assert code == 1  # the failure of the other shard is kept


def test_a_seed_gives_one_order_and_it_is_not_that_of_the_file(checkout: Path) -> None:
    arguments = ("--loaded", "0", "--shuffled", "1", "--shards", "1")
    stress(checkout, *arguments)
    first = (checkout / "order.txt").read_text().splitlines()
    (checkout / "results" / "shuffled-1-00.xml").unlink()
    stress(checkout, *arguments)
    assert (checkout / "order.txt").read_text().splitlines() == first * 2
    assert first != sorted(first)


def test_what_is_no_failure_of_a_test_counts_too(checkout: Path) -> None:
    (checkout / "tests" / "test_two.py").write_text(
        "import os\n\ndef test_ends():\n    os._exit(3)\n"
    )
    arguments = ("--loaded", "0", "--shuffled", "1", "--shards", "1", "--", "tests/test_two.py")
    code, lines = stress(checkout, *arguments)
    assert code == 1
    assert lines[-1] == "| shuffled-1-00::ended with 3 | 0 | 1 |"


def test_arguments_of_pytest_choose_the_tests(checkout: Path) -> None:
    arguments = ("--loaded", "0", "--shuffled", "1", "--", "tests/test_one.py", "-k", "passes")
    code, lines = stress(checkout, *arguments)
    assert code == 0
    assert lines[-1].endswith("| 8 | 0 | 0 |")
