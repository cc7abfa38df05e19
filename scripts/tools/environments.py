"""Says in which environments each test has run: python scripts/tools/environments.py [FOLDER]

An environment is a set of packages, such as those of scripts/test.sh or scripts/tools/try_ray.sh.
Each of these commands writes a record of its last whole run into .ran/ of the checkout, by pytest's
option --record. A test counts as run if it passed or failed; a skipped one has not run. Tests that
need a GPU are not asked for. Exits with 1 if a test, or a whole file of tests, has run nowhere.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Record:
    """The last run in an environment, as tests/support/record.py writes it."""

    name: str
    about: str  # the day, and versions
    ran: frozenset[str]
    skipped: frozenset[str]  # or without its fixtures


def read_records(folder: Path) -> list[Record]:
    """The records below a folder, named by their paths in it."""
    records = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        about, *lines = file.read_text().splitlines()
        tests = [line.partition(" ") for line in lines]
        ran = frozenset(test for outcome, _, test in tests if outcome in ("passed", "failed"))
        skipped = frozenset(test for *_, test in tests) - ran
        name = file.relative_to(folder).as_posix()
        records.append(Record(name, about.removeprefix("# "), ran, skipped))
    return records


def collected(*files: str) -> set[str]:
    """The ids of the tests. Where a package is missing, whole files are skipped: only records know
    their tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"The tests cannot be collected:\n{found.stdout}{found.stderr}")
    return {line for line in found.stdout.splitlines() if "::" in line}


def places(tests: set[str], files: set[str], records: list[Record]) -> dict[str, list[str]]:
    """The environments in which each test has run. files: of tests of which none was collected; one
    of which no record knows a test stands for its tests."""
    known = {test for each in records for test in each.ran | each.skipped if file_of(test) in files}
    wanted = tests | known | (files - {*map(file_of, known)})
    return {test: [each.name for each in records if test in each.ran] for test in sorted(wanted)}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def report(where: dict[str, list[str]], records: list[Record]) -> int:
    """Prints a table, and what has run nowhere. Returns the exit code."""
    print("| environment | tests | only there | last run |\n|---|---|---|---|")
    for record in records:
        own = [names for names in where.values() if record.name in names]
        only = sum(len(names) == 1 for names in own)
        print(f"| {record.name} | {len(own)} | {only} | {record.about} |")
    missing = [test for test, names in where.items() if not names]
    print(f"\n{len(missing)} of {len(where)} tests have run in no environment.")
    for test in missing:
        print(f"  {test}")
    return int(bool(missing))


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".ran"
    tests, root = collected(), ROOT / "tests"
    files = {path.relative_to(ROOT).as_posix() for path in root.rglob("test_*.py")}
    files -= {file_of(test) for test in tests}
    files = {file for file in files if not file.startswith("tests/gpu/")}
    records = read_records(folder)
    return report(places(tests, files, records), records)


if __name__ == "__main__":
    sys.exit(main())
