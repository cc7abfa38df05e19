"""Writes the tables of measured figures in the README files from scripts/bench/measurements.toml,
and that of the tests which ran on GPUs from gpu_checks.json beside it.

python scripts/tools/figures.py --write    # after a change of one of the files
python scripts/tools/figures.py --check    # exit code 1, and the tables that differ

A table stands in its page between <!-- figures: NAME --> and <!-- end of figures -->. One with rows
has those rows; in them {figure} is a figure, and {figure.0} its first value. One without has a row
for each figure that names it. A table with sittings names them above; any other has a last column
that says for each row when it was measured, and of which commit. One with `checks` is that of
gpu_checks.py --list --only CHECKS.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pages import ROOT, as_table, write_or_check

sys.path.append(str(ROOT / "scripts" / "bench"))

from gpu_checks import LIST, listed, named, read_checks

DATA = LIST.with_name("measurements.toml")

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
    sittings: tuple[str, ...] = ()  # all figures are of them
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
            return listed(named(read_checks(LIST), [table.checks]))
        own = [figure for figure in self.figures.values() if figure.table == name]
        rows = [*table.rows] or [[it.what, it.command, f"{{{it.name}}}", it.limit] for it in own]
        head = [*table.columns] or LISTED
        lines = [self._line(name, table, row, len(head)) for row in rows]
        if not table.sittings:
            head = [*head, "measured"]
        if not table.rows and not any(line[3] for line in lines):  # no share of a limit
            head, *lines = [[*line[:3], *line[4:]] for line in (head, *lines)]
        above = " ".join(self.sittings[each].text(whole=True) for each in table.sittings)
        return (above and f"{above}\n\n") + as_table(head, lines)

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
            if figure.sitting not in (table.sittings or [figure.sitting]):
                wanted = " and ".join(table.sittings)
                raise FiguresError(f"table {name} is of {wanted}, {figure.name} is not")
            if table.machine not in ("", sitting.machine):
                raise FiguresError(f"table {name} is of {table.machine}, {figure.name} is not")
            self._shown.add(figure.name)
            sittings[sitting.text(whole=False)] = None
            return figure.text(found[2])

        cells = [FIELD.sub(text, cell) for cell in row]
        return cells if table.sittings else [*cells, "; ".join(sittings)]

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


def main() -> int:
    def written() -> dict[Path, str]:
        measurements = Measurements(DATA.read_text())
        return {
            ROOT / page: measurements.written(page, (ROOT / page).read_text())
            for page in measurements.pages()
        }

    try:
        return write_or_check(__doc__, written)
    except FiguresError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
