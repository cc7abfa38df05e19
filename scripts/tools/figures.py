"""Writes the tables of measured figures in the README files from scripts/bench/measurements.toml,
and that of the tests which ran on GPUs from gpu_checks.json beside it.

python scripts/tools/figures.py --write    # after a change of these files
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
from collections.abc import Iterator
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
LISTED = ("what", "command", "figure", "of the hardware's limit")


class FiguresError(Exception):
    """The data or a page is not as it should be; the message says what and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """A machine, a day and a state of the code."""

    date: date
    commit: str
    machine: str
    software: str

    @property
    def short(self) -> str:
        return f"{self.date}, `{self.commit}`" if self.is_noted else f"{self.date}"

    @property
    def long(self) -> str:
        commit = f"commit `{self.commit}`" if self.is_noted else "commit not noted"
        return f"Measured on {self.date} on {self.machine}: {self.software}, {commit}."

    @property
    def is_noted(self) -> bool:
        return self.commit != "not noted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement: values with a unit, or a text where they need words."""

    name: str
    sitting: str
    what: str
    command: str
    values: tuple[int | str, ...] = ()  # with a point as text, to keep the digits of the file
    unit: str = ""
    figure: str = ""
    limit: str = ""  # its share of the hardware's limit
    table: str = ""  # the list that has a row for it

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.figure) or bool(self.values) != bool(self.unit):
            raise FiguresError(f"figure {self.name}: give values and a unit, or a figure")

    def text(self, index: str | None = None) -> str:
        """All values, or the one of an index."""
        if self.figure:
            if index is not None:
                raise FiguresError(f"figure {self.name} is a text: {{{self.name}.{index}}}")
            return self.figure
        chosen = self.values if index is None else self.values[int(index) :][:1]
        if not chosen:
            raise FiguresError(f"figure {self.name} has {len(self.values)} values")
        shown = (f"{value:,}" if isinstance(value, int) else value for value in chosen)
        return f"{' / '.join(shown)} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    page: str  # from the root of the checkout
    sitting: str = ""  # all figures are of it
    machine: str = ""  # all figures are of it
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    checks: str = ""  # their names, with * for any


class Measurements:
    """What the file says.

    Raises FiguresError if it names a sitting, a figure or a table that it lacks, if a table has a
    figure of another sitting or machine than its own, or if a figure is in no table.
    """

    def __init__(self, text: str) -> None:
        data = tomllib.loads(text, parse_float=str)
        self.sittings = {name: Sitting(**found) for name, found in data["sittings"].items()}
        self.tables = {name: Table(**_frozen(found)) for name, found in data["tables"].items()}
        self.figures: dict[str, Figure] = {}
        for found in data["figures"]:
            figure = Figure(**_frozen(found))
            if figure.name in self.figures:
                raise FiguresError(f"two figures are named {figure.name}")
            self.figures[figure.name] = figure
        self._shown: set[str] = set()
        self.texts = {name: self._text(name) for name in self.tables}
        for name, figure in self.figures.items():
            if figure.table and figure.table not in self.tables:
                raise FiguresError(f"figure {name}: there is no table {figure.table}")
            if name not in self._shown:
                raise FiguresError(f"figure {name} is in no table")

    def _text(self, name: str) -> str:
        table = self.tables[name]
        if table.checks:
            return checks_text(json.loads(CHECKS.read_text()), table.checks)
        rows = [*self._rows(name, table)]
        lines = [[*cells] for cells, _ in rows]
        head = [*(table.columns or LISTED)]
        if table.sitting:
            caption = f"{self.sittings[table.sitting].long}\n\n"
        else:
            caption = ""
            head.append("measured")
            for line, (_, figures) in zip(lines, rows, strict=True):
                line.append("; ".join(dict.fromkeys(self._sitting(it).short for it in figures)))
        if not table.rows and not any(line[3] for line in lines):  # no share of a limit
            for line in (head, *lines):
                del line[3]
        rule = f"|{'---|' * len(head)}\n"
        return caption + _row(head) + rule + "".join(map(_row, lines))

    def _rows(self, name: str, table: Table) -> Iterator[tuple[tuple[str, ...], list[Figure]]]:
        """The cells of each row, and its figures."""
        for cells in table.rows:
            if len(cells) != len(table.columns):
                raise FiguresError(f"table {name}: {cells[0]} has {len(cells)} cells")
            figures: list[Figure] = []
            yield tuple(self._filled(cell, name, figures) for cell in cells), figures
        if not table.rows:
            for figure in self.figures.values():
                if figure.table == name:
                    self._check(figure, name)
                    cells = (figure.what, figure.command, figure.text(), figure.limit)
                    yield cells, [figure]

    def _filled(self, cell: str, table: str, figures: list[Figure]) -> str:
        """The cell with its figures, which are appended to `figures`."""

        def text(found: re.Match[str]) -> str:
            figure = self.figures.get(found[1])
            if figure is None:
                raise FiguresError(f"table {table}: there is no figure {found[1]}")
            self._check(figure, table)
            figures.append(figure)
            return figure.text(found[2])

        return FIELD.sub(text, cell)

    def _check(self, figure: Figure, name: str) -> None:
        self._shown.add(figure.name)
        table, sitting = self.tables[name], self._sitting(figure)
        if table.sitting and figure.sitting != table.sitting:
            raise FiguresError(f"table {name} is of {table.sitting}, {figure.name} is not")
        if table.machine and sitting.machine != table.machine:
            raise FiguresError(f"table {name} is of {table.machine}, {figure.name} is not")

    def _sitting(self, figure: Figure) -> Sitting:
        try:
            return self.sittings[figure.sitting]
        except KeyError:
            message = f"figure {figure.name}: there is no sitting {figure.sitting}"
            raise FiguresError(message) from None

    def pages(self) -> list[str]:
        return sorted({table.page for table in self.tables.values()})

    def sources(self, page: str) -> list[Path]:
        """The files that the tables of a page come from."""
        of_checks = {bool(table.checks) for table in self.tables.values() if table.page == page}
        return [CHECKS if checks else DATA for checks in sorted(of_checks)]

    def written(self, page: str, text: str) -> str:
        """The text of a page with its tables as they should be."""
        there = BLOCK.findall(text)
        wanted = [name for name, table in self.tables.items() if table.page == page]
        if sorted(there) != sorted(wanted):
            raise FiguresError(f"{page} has the tables {there}; it should have {wanted}")

        def block(found: re.Match[str]) -> str:
            return f"<!-- figures: {found[1]} -->\n{self.texts[found[1]]}<!-- end of figures -->\n"

        return BLOCK.sub(block, text)


def checks_text(checks: list[dict[str, Any]], pattern: str) -> str:
    """A table of checks as gpu_checks.json has them, with their last run on each kind of GPU."""
    chosen = [check for check in checks if fnmatch(check["name"], pattern)]
    kinds = sorted({kind for check in chosen for kind in check.get("runs", {})})
    lines = [_row(["what it shows", "check", "GPUs", *kinds]), f"|{'---|' * (3 + len(kinds))}\n"]
    for check in chosen:
        runs = [check.get("runs", {}).get(kind) for kind in kinds]
        cells = [check["shows"], f"`{check['name']}`", str(check["gpus"]), *map(_run_text, runs)]
        lines.append(_row(cells))
    return "".join(lines)


def _run_text(run: dict[str, Any] | None) -> str:
    if run is None:
        return "never"
    ended = "passed" if run["verdict"] in ("ok", "ran") else f"**{run['verdict']}**"
    number = run.get("figures", {}).get("passed")
    told = ended if number is None else f"{number:g} {ended}"
    return f"{told}, {run['date'][:10]}, `{run['commit']}`"


def _row(cells: list[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"


def _frozen(found: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, for frozen dataclasses."""
    return {key: _tuple(value) for key, value in found.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--check", action="store_true", help="write nothing")
    way.add_argument("--write", action="store_true", help="write the tables")
    check = parser.parse_args().check
    try:
        measurements = Measurements(DATA.read_text())
        stale = []
        for page in measurements.pages():
            path = ROOT / page
            before = path.read_text()
            if (after := measurements.written(page, before)) != before:
                stale.append(page)
                if not check:
                    path.write_text(after)
    except FiguresError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    for page in stale:
        sources = " and ".join(str(it.relative_to(ROOT)) for it in measurements.sources(page))
        print(f"{page}: {'differs from' if check else 'written from'} {sources}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
