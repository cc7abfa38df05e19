"""The links between the pages of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.folders import ROOT

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = (".github", "cli", "minisgl", "scripts", "tests")
PAGES = [ROOT / "README.md", *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page have as targets of links."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    text = CODE.sub("", FENCE.sub("", page.read_text()))
    wrong = []
    for link in LINK.findall(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []
