"""The way in at the head of minisgl/README.md: its files and their lines."""

from __future__ import annotations

import re

from support.folders import ROOT

PAGE = (ROOT / "minisgl/README.md").read_text()
SECTION = PAGE.partition("## The way in\n")[2].partition("\n## ")[0]
ROW = re.compile(r"\| (\d+) \| \[`(.+)`\]\((.+)\) \| ([\d,]+) \| .+ \|")
ROWS = ROW.findall(SECTION)
PARTS = re.compile(r"(?:from|import) (minisgl\.parts\S*)")
MOST_LINES = 4000
MOST_FILES = 18


def test_the_way_in_counts_the_lines_of_its_files() -> None:
    counted = [(name, f"{num_lines(name):,}") for _, name, *_ in ROWS]
    printed = [(name, lines) for _, name, _, lines in ROWS]
    assert printed == counted, "minisgl/README.md: correct the lines of these files"
    total = sum(num_lines(name) for name, _ in counted)
    assert f"they have {total:,} lines" in SECTION, "minisgl/README.md: correct the sum"


def test_the_way_in_numbers_and_links_its_files() -> None:
    assert [number for number, *_ in ROWS] == [str(number) for number in range(1, len(ROWS) + 1)]
    assert all(name == target for _, name, target, _ in ROWS)
    assert SECTION.count(".py`](") == len(ROWS), "a row has another form"


def test_the_way_in_stays_short() -> None:
    assert 0 < len(ROWS) <= MOST_FILES
    assert sum(num_lines(name) for _, name, *_ in ROWS) <= MOST_LINES


def test_the_way_in_imports_no_part() -> None:
    """A part is known there by its interface alone."""
    known = {"minisgl.parts.device_part"}
    found = {
        (name, imported)
        for _, name, *_ in ROWS
        for imported in PARTS.findall((ROOT / "minisgl" / name).read_text())
    }
    assert {imported for _, imported in found} <= known, found


def num_lines(name: str) -> int:
    return len((ROOT / "minisgl" / name).read_text().splitlines())
