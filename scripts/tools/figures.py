"""Writes the tables of measured figures in the README files from scripts/bench/measurements.toml,
and that of the tests which ran on GPUs from gpu_checks.json beside it.

python scripts/tools/figures.py --write    # after a change of one of the files
python scripts/tools/figures.py --check    # exit code 1, and the tables that differ

A table stands in its page between <!-- figures: NAME --> and <!-- end of figures -->. One with rows
has those rows; in them {figure} is a figure, and {figure.0} its first value. One without has a row
for each figure that names it. A table of one sitting says so above; any other has a last column
that says for each row when it was measured, and of which commit. One with `checks` has a row for
each check of that name, with its last run on each kind of GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "scripts" / "bench" / "measurements.toml"
CHECKS = DATA.with_name("gpu_checks.json")

BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- end of figures -->\n", re.DOTALL)
FIELD = re.compile(r"\{([^{}]+?)(?:\.(\d+))?\}")  # a figure, or one of its values
LISTED = ["what", "command", "figure", "of the hardware's limit"]


class FiguresError(Exception):
    """The data or a page is not as it should be; the message says what and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """A machine, a day and a state of the code."""

    date: date
    commit: str
    machine: str
    software: str

    def text(self, *, whole: bool) -> str:
        noted = self.commit != "not noted"
        if not whole:
            return f"{self.date}, `{self.commit}`" if noted else f"{self.date}"
        commit = f"commit `{self.commit}`" if noted else "commit not noted"
        return f"Measured on {self.date} on {self.machine}: {self.software}, {commit}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement: values with a unit, or a text where they need words."""

    name: str
    sitting: str
    what: str
    command: str
    values: list[int | str] | None = None  # with a point as text, to keep the digits of the file
    unit: str = ""
    figure: str = ""
    limit: str = ""  # its share of the hardware's limit
    table: str = ""  # the list that has a row for it

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.figure) or bool(self.values) != bool(self.unit):
            raise FiguresError(f"figure {self.name}: give values and a unit, or a figure")

    def text(self, index: str | None = None) -> str:
        """All values, or the one of an index."""
        if self.figure and index is None:
            return self.figure
        values = self.values or []
        chosen = values if index is None else values[int(index) :][:1]
        if not chosen:
            raise FiguresError(f"figure {self.name} has {len(values)} values")
        shown = (f"{value:,}" if isinstance(value, int) else value for value in chosen)
        return f"{' / '.join(shown)} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    page: str  # from the root of the checkout
    sitting: str = ""  # all figures are of it
    machine: str = ""  # all figures are of it
    columns: tuple[str, ...] = ()
    rows: tuple[list[str], ...] = ()
    checks: str = ""  # their names, with * for any


class Measurements:
    """What the file says.

    Raises FiguresError if it names a sitting, a figure or a table that it lacks, if a table has a
    figure of another sitting or machine than its own, or if a figure is in no table.
    """

    def __init__(self, text: str) -> None:
        data = tomllib.loads(text, parse_float=str)
        self.sittings = {name: Sitting(**found) for name, found in data["sittings"].items()}
        self.tables = {name: Table(**found) for name, found in data["tables"].items()}
        self.figures: dict[str, Figure] = {}
        for figure in (Figure(**found) for found in data["figures"]):
            if figure.name in self.figures:
                raise FiguresError(f"two figures are named {figure.name}")
            if figure.sitting not in self.sittings:
                raise FiguresError(f"figure {figure.name}: there is no sitting {figure.sitting}")
            if figure.table and figure.table not in self.tables:
                raise FiguresError(f"figure {figure.name}: there is no table {figure.table}")
            self.figures[figure.name] = figure
        self._shown: set[str] = set()
        self.texts = {name: self._text(name, table) for name, table in self.tables.items()}
        if hidden := [name for name in self.figures if name not in self._shown]:
            raise FiguresError(f"figure {hidden[0]} is in no table")

    def _text(self, name: str, table: Table) -> str:
        if table.checks:
            return checks_text(json.loads(CHECKS.read_text()), table.checks)
        listed = [figure for figure in self.figures.values() if figure.table == name]
        rows = [*table.rows] or [[it.what, it.command, f"{{{it.name}}}", it.limit] for it in listed]
        head = [*table.columns] or LISTED
        lines = [self._line(name, table, row, len(head)) for row in rows]
        if not table.sitting:
            head = [*head, "measured"]
        if not table.rows and not any(line[3] for line in lines):  # no share of a limit
            head, *lines = [[*line[:3], *line[4:]] for line in (head, *lines)]
        above = f"{self.sittings[table.sitting].text(whole=True)}\n\n" if table.sitting else ""
        return above + as_table(head, lines)

    def _line(self, name: str, table: Table, row: list[str], num_cells: int) -> list[str]:
        """The row with its figures, and when they were measured unless the table says it."""
        if len(row) != num_cells:
            raise FiguresError(f"table {name}: {row[0]} has {len(row)} cells")
        sittings: dict[str, None] = {}

        def text(found: re.Match[str]) -> str:
            figure = self.figures.get(found[1])
            if figure is None:
                raise FiguresError(f"table {name}: there is no figure {found[1]}")
            sitting = self.sittings[figure.sitting]
            for wanted, has in ((table.sitting, figure.sitting), (table.machine, sitting.machine)):
                if wanted not in ("", has):
                    raise FiguresError(f"table {name} is of {wanted}, {figure.name} is not")
            self._shown.add(figure.name)
            sittings[sitting.text(whole=False)] = None
            return figure.text(found[2])

        cells = [FIELD.sub(text, cell) for cell in row]
        return cells if table.sitting else [*cells, "; ".join(sittings)]

    def pages(self) -> list[str]:
        return sorted({table.page for table in self.tables.values()})

    def written(self, page: str, text: str) -> str:
        """The text of a page with its tables as they should be."""
        there = BLOCK.findall(text)
        wanted = [name for name, table in self.tables.items() if table.page == page]
        if sorted(there) != sorted(wanted):
            raise FiguresError(f"{page} has the tables {there}; it should have {wanted}")
        return BLOCK.sub(lambda found: self._block(found[1]), text)

    def _block(self, name: str) -> str:
        return f"<!-- figures: {name} -->\n{self.texts[name]}<!-- end of figures -->\n"

    def stale(self, text: str) -> list[str]:
        """The tables of a page that differ, each with the file that it is written from."""
        return [
            f"{found[1]} of {(CHECKS if self.tables[found[1]].checks else DATA).name}"
            for found in BLOCK.finditer(text)
            if found[0] != self._block(found[1])
        ]


def checks_text(checks: list[dict[str, Any]], pattern: str) -> str:
    """A table of checks as gpu_checks.json has them, with their last run on each kind of GPU."""
    chosen = [check for check in checks if fnmatch(check["name"], pattern)]
    kinds = sorted({kind for check in chosen for kind in check.get("runs", {})})
    lines = []
    for check in chosen:
        runs = [_run_text(check.get("runs", {}).get(kind)) for kind in kinds]
        lines.append([check["shows"], f"`{check['name']}`", str(check["gpus"]), *runs])
    return as_table(["what it shows", "check", "GPUs", *kinds], lines)


def _run_text(run: dict[str, Any] | None) -> str:
    if run is None:
        return "never"
    ended = "passed" if run["verdict"] in ("ok", "ran") else f"**{run['verdict']}**"
    number = run.get("figures", {}).get("passed")
    told = ended if number is None else f"{number:g} {ended}"
    return f"{told}, {run['date'][:10]}, `{run['commit']}`"


def as_table(head: list[str], lines: list[list[str]]) -> str:
    """In Markdown."""
    top, *rows = (
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"
        for cells in (head, *lines)
    )
    return f"{top}|{'---|' * len(head)}\n{''.join(rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--check", action="store_true", help="write nothing")
    way.add_argument("--write", action="store_true", help="write the tables")
    check = parser.parse_args().check
    differ = False
    try:
        measurements = Measurements(DATA.read_text())
        for page in measurements.pages():
            before = (ROOT / page).read_text()
            after = measurements.written(page, before)
            for table in measurements.stale(before):
                differ = True
                print(f"{page}: {'differs from' if check else 'now has'} the table {table}")
            if not check:
                (ROOT / page).write_text(after)
    except FiguresError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
