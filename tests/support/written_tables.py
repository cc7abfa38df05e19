"""Scripts that write a table into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def check_writing(script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a module of scripts/tools, of one PAGE with its table(), says whether the page
    differs, and brings it up to date. folder: for a page of the test."""
    page, name = folder / "page.md", f"{script.__name__}.py"
    begin, end = f"<!-- table of scripts/tools/{name} -->\n", "<!-- its end -->\n"
    page.write_text(f"Before.\n{begin}old\n{end}After.\n")
    monkeypatch.setattr(script, "PAGE", page)
    for way, code in (("--check", 1), ("--write", 0), ("--check", 0)):
        monkeypatch.setattr("sys.argv", [name, way])
        assert script.main() == code
    assert page.read_text() == f"Before.\n{begin}{script.table()}{end}After.\n"
