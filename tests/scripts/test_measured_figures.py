"""The measured figures: what their file may say, and that the pages say the same."""

from __future__ import annotations

import re

import figures
import pytest
from figures import DATA, FiguresError, Measurements
from gpu_checks import LIST, read_checks
from support.folders import ROOT

SMALL = """
[sittings.day]
date = 2026-11-27
commit = "7a9b669"
machine = "one GPU"
software = "torch 2.11.0"

[sittings.night]
date = 2026-11-28
commit = "not noted"
machine = "two GPUs"
software = "torch 2.11.0"

[tables.list]
page = "page.md"

[tables.rows]
page = "page.md"
sittings = ["day"]
columns = ["", "time", "first"]
rows = [["model", "{tpot}", "{tpot.0} at best"]]

[[figures]]
name = "tpot"
table = "list"
sitting = "day"
what = "time per token"
command = "`bench`"
values = [7.770, 8.056]
unit = "ms"

[[figures]]
name = "rate"
table = "list"
sitting = "night"
what = "tokens a second"
command = "`bench`"
values = [26444]
unit = "tok/s"
"""
PAGE = """Before.

<!-- figures: list -->
<!-- end of figures -->
Between.

<!-- figures: rows -->
| old |
<!-- end of figures -->
After.
"""
WRITTEN = """Before.

<!-- figures: list -->
| what | command | figure | measured |
|---|---|---|---|
| time per token | `bench` | 7.770 / 8.056 ms | 2026-11-27, `7a9b669` |
| tokens a second | `bench` | 26,444 tok/s | 2026-11-28 |
<!-- end of figures -->
Between.

<!-- figures: rows -->
Measured on 2026-11-27 on one GPU: torch 2.11.0, commit `7a9b669`.

| | time | first |
|---|---|---|
| model | 7.770 / 8.056 ms | 7.770 ms at best |
<!-- end of figures -->
After.
"""
# What counts as a figure of speed in prose.
SPEED = re.compile(r"\d ?(ms|µs|tok/s|tokens/s|tokens a second|GB/s|TB/s|TFLOP)\b")
BLOCK = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)


def test_tables_are_written_from_the_data_with_the_digits_that_it_has() -> None:
    measurements = Measurements(SMALL)
    assert measurements.pages() == ["page.md"]
    assert measurements.written("page.md", PAGE) == WRITTEN
    assert measurements.written("page.md", WRITTEN) == WRITTEN


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('table = "list"\nsitting = "night"', 'sitting = "night"', "figure rate is in no table"),
        ('table = "list"', 'table = "lost"', "figure tpot: there is no table lost"),
        ('sitting = "night"', 'sitting = "noon"', "figure rate: there is no sitting noon"),
        ("{tpot}", "{rate}", "table rows is of day, rate is not"),
        ("{tpot}", "{tpt}", "table rows: there is no figure tpt"),
        ("{tpot.0}", "{tpot.2}", "figure tpot has 2 values"),
        ('"{tpot}", ', "", "table rows: model has 2 cells"),
        ('unit = "ms"', "", "figure tpot: give values and a unit, or a figure"),
        ('unit = "ms"', 'unit = "ms"\nfigure = "7 ms"', "give values and a unit, or a figure"),
        ('name = "rate"', 'name = "tpot"', "two figures are named tpot"),
        ("[tables.list]", '[tables.list]\nmachine = "one GPU"', "is of one GPU, rate is not"),
    ],
)
def test_data_that_contradicts_itself_is_refused(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(FiguresError, match=re.escape(message)):
        Measurements(SMALL.replace(old, new, 1))


def test_a_table_of_two_sittings_names_both_above() -> None:
    both = SMALL.replace('sittings = ["day"]', 'sittings = ["day", "night"]')
    rate = '[["model", "{tpot}", "{tpot.0} at best"]]', '[["model", "{tpot}", "{rate}"]]'
    table = Measurements(both.replace(*rate)).texts["rows"]
    above, _, rows = table.partition("\n\n")
    assert above == (
        "Measured on 2026-11-27 on one GPU: torch 2.11.0, commit `7a9b669`. "
        "Measured on 2026-11-28 on two GPUs: torch 2.11.0, commit not noted."
    )
    assert rows.splitlines()[2:] == ["| model | 7.770 / 8.056 ms | 26,444 tok/s |"]


def test_a_page_that_lacks_a_table_is_refused() -> None:
    page = PAGE.replace("<!-- figures: rows -->", "")
    with pytest.raises(FiguresError, match=r"page.md has the tables \['list'\]; it should have"):
        Measurements(SMALL).written("page.md", page)


def test_the_pages_have_the_tables_of_the_data() -> None:
    measurements = Measurements(DATA.read_text())
    assert "README.md" in measurements.pages()
    for page in measurements.pages():
        text = (ROOT / page).read_text()
        remedy = "run `python scripts/tools/figures.py --write`"
        assert text == measurements.written(page, text), remedy


def test_the_script_names_pages_that_differ_and_writes_them(
    tmp_path: figures.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "page.md", tmp_path / "data.toml"
    page.write_text(PAGE)
    data.write_text(SMALL)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "DATA", data)

    def run(way: str) -> int:
        monkeypatch.setattr("sys.argv", ["figures.py", way])
        return figures.main()

    assert run("--check") == 1
    assert capsys.readouterr().out == f"{page}: differs\n"
    assert page.read_text() == PAGE
    assert run("--write") == 0
    assert page.read_text() == WRITTEN
    assert run("--check") == 0


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *("cli/README.md", "minisgl/bench/README.md", "minisgl/kernels/README.md"),
        *("minisgl/models/README.md", "minisgl/ray/README.md", "minisgl/router/README.md"),
    ],
)
def test_figures_of_speed_stand_in_the_tables_and_nowhere_else(page: str) -> None:
    prose = BLOCK.sub("", (ROOT / page).read_text())
    assert [line for line in prose.splitlines() if SPEED.search(line)] == []


def test_what_a_gpu_must_show_of_the_front_page_is_what_that_page_says() -> None:
    pages = (ROOT / "README.md", ROOT / "minisgl/bench/README.md")
    blocks = [block for page in pages for block in BLOCK.findall(page.read_text())]
    shown = {float(found) for found in re.findall(r"\d+\.?\d*", "".join(blocks).replace(",", ""))}
    checks = [check for check in read_checks(LIST) if check.shows.startswith("front page: ")]
    expected = {
        (check.name, figure.name, value)
        for check in checks
        for figure in check.figures
        for value in figure.expected.values()
        if not figure.name.startswith("times ")  # the page has what they are the quotient of
    }
    assert len(checks) > 5
    assert {(*names, value) for *names, value in expected if value not in shown} == set()


def test_a_table_of_checks_is_the_list_of_those_with_its_names() -> None:
    measurements = Measurements(DATA.read_text())
    [table] = [name for name, table in measurements.tables.items() if table.checks]
    names = [check.name for check in read_checks(LIST) if check.name.startswith("tests-")]
    rows = measurements.texts[table].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == names
