"""The table of what works together, in the README of the command line, is what the code says."""

from __future__ import annotations

from pathlib import Path

import pairs
import pytest
from pages import with_table
from pairs import KINDS, OPTIONS, PAGE, Outcome, cell, table
from support.written_tables import check_writing

WORKS, GIVES_WAY, REFUSED = Outcome


def test_the_page_has_the_table_that_the_code_gives() -> None:
    page = PAGE.read_text()
    written = with_table(page, "pairs.py", table())
    assert page == written, "run `python scripts/tools/pairs.py --write`"


def test_there_is_one_cell_for_each_pair_and_each_reason_once() -> None:
    head, _, *lines = table().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert head.count("|") == 2 + len(KINDS) and len(rows) == len(OPTIONS)
    reasons = [line.partition(". ")[2] for line in lines if line and line[0].isdigit()]
    assert len({*reasons}) == len(reasons) > 0
    cells = [cell(name, kind) for name in OPTIONS for kind in KINDS]
    assert {each.why for each in cells} == {"", *reasons}
    assert all(bool(each.why) == (each.outcome is not WORKS) for each in cells)


@pytest.mark.parametrize(
    ("name", "kind", "outcome", "why"),
    [
        ("`--host-cache`", "full layers and states", WORKS, ""),
        ("`--host-cache`", "windowed layers alone", GIVES_WAY, "needs layers without a window"),
        ("`--roles`", "full and windowed layers", WORKS, ""),
        ("`--roles`", "full layers and states", WORKS, ""),
        ("`--pp --roles`", "full layers", WORKS, ""),
        ("`--dp-attention --roles`", "full layers", WORKS, ""),
        ("`--model-impl adopted`", "full layers and states", REFUSED, "the others keep a state"),
    ],
)
def test_a_cell_says_what_the_options_become(
    name: str, kind: str, outcome: Outcome, why: str
) -> None:
    found = cell(name, kind)
    assert found.outcome is outcome and why in found.why


def test_the_script_names_a_page_that_differs_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writing(pairs, tmp_path, monkeypatch)
