"""Which tests have run in which environment: records of runs, and the script that reads them."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import environments
import pytest
from environments import Record, places
from support.folders import ROOT, SCRIPTS

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip()
@pytest.mark.skip
def test_is_never_asked(): pass
def test_has_no_fixture(broken): pass
"""
RECORDED = """
import sys
from pathlib import Path
import pytest
from support.record import Record
pytest.main([sys.argv[1], "-q"], [Record(Path(sys.argv[2]))])
"""


def python(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / each) for each in ("tests", "scripts/tools"))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_a_record_tells_tests_that_ran_from_others(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    file = tmp_path / "records" / "plain"
    done = python("-c", RECORDED, "test_some.py", file, folder=tmp_path)
    assert "1 failed, 1 passed, 2 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    [found] = environments.read_records(tmp_path / "records")
    assert found.name == "plain"
    assert found.about.startswith(f"{datetime.date.today()} Python 3.1") and "torch" in found.about
    assert found.ran == {"test_some.py::test_passes", "test_some.py::test_fails"}
    names = ("is_skipped", "is_never_asked", "has_no_fixture")
    assert found.skipped == {f"test_some.py::test_{name}" for name in names}


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_the_option_records_tests_of_all_processes_and_replaces_what_was_there(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tmp_path / "plain"
    file.write_text("# before\npassed tests/test_gone.py::test_gone\n")
    done = python("-m", "pytest", "-q", "--record", file, *options, "tests/test_shards.py")
    assert done.returncode == 0, done.stdout
    [found] = environments.read_records(tmp_path)
    ran = found.ran
    assert f"{len(ran)} passed" in done.stdout
    assert {test.partition("::")[0] for test in ran} == {"tests/test_shards.py"}


def test_a_test_has_the_environments_in_which_it_ran() -> None:
    records = [
        Record("plain", "", frozenset({"a.py::test_1"}), frozenset({"a.py::test_2"})),
        # b.py needs a package that is missing here.
        Record("ray", "", frozenset({"a.py::test_1", "b.py::test_1"}), frozenset({"b.py::test_2"})),
    ]
    assert places({"a.py", "b.py", "c.py"}, records) == {
        "a.py::test_1": ["plain", "ray"],
        "a.py::test_2": [],
        "b.py::test_1": ["ray"],
        "b.py::test_2": [],
        "c.py": [],
    }


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_test_that_has_run_nowhere_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str
) -> None:
    (tmp_path / "plain").write_text(f"# today\npassed a.py::test_1\n{outcome} a.py::test_2\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ray").write_text("# then\npassed a.py::test_1\n")
    records = environments.read_records(tmp_path)
    where = places(set(), records)
    num_missing = int(outcome == "skipped")
    assert environments.report(where, records) == num_missing
    printed = capsys.readouterr().out.splitlines()
    plain = f"| plain | {2 - num_missing} | {1 - num_missing} | today |"
    assert printed[2:4] == ["| other/ray | 1 | 0 | then |", plain]
    assert printed[5] == f"{num_missing} of 2 tests have run in no environment."
    assert printed[6:] == ["  a.py::test_2"] * num_missing


def test_every_environment_records_whole_runs_and_is_a_job_of_the_workflow() -> None:
    tools = SCRIPTS / "tools"
    commands = [each for each in tools.glob("try_*.sh") if "-m pytest" in each.read_text()]
    assert len(commands) >= 3
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert all(f"scripts/tools/{each.name}" in workflow for each in commands)
    for command in (SCRIPTS / "test.sh", *commands):
        assert re.search(r'\[ \$# -gt 0 \] \|\| set -- .*--record "?\.ran/', command.read_text())


def test_the_workflow_runs_scripts_that_there_are_also_for_the_wheel() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = re.findall(r"name: [^,]+, run: ([^ ,]+)(?: (\w+))?(?:,| })", workflow)
    assert len(jobs) == workflow.count("- { name: ")
    assert {name for name, _ in jobs if not (ROOT / name).is_file()} == set()
    torches = {torch for name, torch in jobs if name == "scripts/tools/try_wheel.sh"}
    assert torches == {"", "newest"}
    script = (SCRIPTS / "tools" / "try_wheel.sh").read_text()
    ran = set(re.findall(r"^ *minisgl (\w+)", script, re.MULTILINE))
    assert ran == {"version", "chat", "batch", "bench", "verify", "serve"}
