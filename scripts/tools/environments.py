"""Says in which environments each test has run.

    python scripts/tools/environments.py           # a table, and the tests that have run in none
    python scripts/tools/environments.py --list    # each test, and where it has run

An environment is a set of packages, such as those of scripts/test.sh or scripts/tools/try_ray.sh.
Each of these commands writes a record of its last whole run into .ran/ of the checkout, by pytest's
option --record. A test counts as run if it passed or failed; a skipped one has not run. Tests that
need a GPU are not asked for. Exits with 1 if a test, or a whole file of tests, has run nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".ran"
GPU = "gpu"  # the mark, and the folder of tests
MAX_SHOWN = 40


@dataclass
class Collected:
    """A plugin of pytest that keeps the ids of all tests that it collects here.

    Where a package is missing, whole files are skipped: only records know their tests.
    """

    tests: set[str] = field(default_factory=set)
    gpu: set[str] = field(default_factory=set)  # tests that need one

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            (self.gpu if item.get_closest_marker(GPU) else self.tests).add(item.nodeid)


@dataclass(frozen=True)
class Record:
    """The last run in an environment."""

    name: str
    about: str  # the day, and versions
    ran: frozenset[str]
    skipped: frozenset[str]  # or without its fixtures


def collect(*files: str) -> Collected:
    """files: of the tests; all if none are given."""
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(["--collect-only", "-q", "-m", "", *files], [found])
    if code != pytest.ExitCode.OK:
        sys.exit(f"The tests cannot be collected:\n{printed.getvalue()}")
    return found


def read_records(folder: Path) -> list[Record]:
    """The records below a folder, named by their paths in it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [read_record(file.relative_to(folder).as_posix(), file) for file in files]


def read_record(name: str, file: Path) -> Record:
    """As tests/support/record.py writes it."""
    about, *lines = file.read_text().splitlines()
    ran: set[str] = set()
    others: set[str] = set()
    for line in lines:
        outcome, _, test = line.partition(" ")
        (ran if outcome in ("passed", "failed") else others).add(test)
    return Record(name, about.removeprefix("# "), frozenset(ran), frozenset(others))


def files_of_tests(root: Path) -> set[str]:
    """All but those of tests that need a GPU."""
    files = {file.relative_to(root) for file in (root / "tests").rglob("test_*.py")}
    return {file.as_posix() for file in files if file.parts[1] != GPU}


def places(collected: Collected, files: set[str], records: list[Record]) -> dict[str, list[str]]:
    """The environments in which each test has run. A file of which nobody knows a test stands for
    its tests."""
    skipped_here = files - files_of(collected.tests | collected.gpu)
    known = set().union(*(each.ran | each.skipped for each in records))
    tests = collected.tests | {test for test in known if file_of(test) in skipped_here}
    tests |= skipped_here - files_of(tests)
    return {test: [each.name for each in records if test in each.ran] for test in sorted(tests)}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def files_of(tests: set[str]) -> set[str]:
    return {file_of(test) for test in tests}


def print_table(where: dict[str, list[str]], records: list[Record], num_gpu: int) -> None:
    rows = [("environment", "tests", "only there", "last run")]
    for record in records:
        own = [names for names in where.values() if record.name in names]
        only = sum(len(names) == 1 for names in own)
        rows.append((record.name, str(len(own)), str(only), record.about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, count, only, about in rows:
        print(f"{name:{widths[0]}}  {count:>{widths[1]}}  {only:>{widths[2]}}  {about}")
    print(f"\n{len(where)} tests, and {num_gpu} that need a GPU.")


def print_missing(missing: list[str]) -> None:
    print(f"{len(missing)} tests have run in no environment.")
    for test in missing[:MAX_SHOWN]:
        print(f"  {test}")
    if len(missing) > MAX_SHOWN:
        print(f"  and {len(missing) - MAX_SHOWN} more; --list has all of them")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of the records")
    parser.add_argument("--list", action="store_true", help="each test, and where it has run")
    args = parser.parse_args()
    records = read_records(args.folder.resolve())
    os.chdir(ROOT)
    collected = collect()
    where = places(collected, files_of_tests(ROOT), records)
    if args.list:
        for test, names in where.items():
            print(f"{test}: {', '.join(names) or '-'}")
        return 0
    print_table(where, records, len(collected.gpu))
    missing = [test for test, names in where.items() if not names]
    print_missing(missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
