"""Says in which environments each test has run: python scripts/tools/environments.py [FOLDER]

An environment is a set of packages, such as those of scripts/test.sh or scripts/tools/try_ray.sh.
Each of these commands writes a record of its last whole run into .ran/ of the checkout, by pytest's
option --record. A test counts as run if it passed or failed; a skipped one has not run. Exits with
1 if a test of a record, or a whole file of tests that need no GPU, has run nowhere.
"""

from __future__ import annotations

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


def places(files: set[str], records: list[Record]) -> dict[str, list[str]]:
    """The environments in which each test has run. Where a package is missing, whole files are
    skipped: a file without a test in any record stands for its tests."""
    known = {test for each in records for test in each.ran | each.skipped}
    wanted = known | (files - {*map(file_of, known)})
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
    records = read_records(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".ran")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    files = {file for file in files if not file.startswith("tests/gpu/")}
    return report(places(files, records), records)


if __name__ == "__main__":
    sys.exit(main())
