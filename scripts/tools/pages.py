"""What scripts share that write tables into pages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    top, *lines = (
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n" for cells in (head, *rows)
    )
    return f"{top}|{'---|' * len(head)}\n{''.join(lines)}"


def with_table(page: str, script: str, table: str) -> str:
    """The text of a page with what a script has between two comments of its own."""
    begin, end = f"<!-- table of scripts/tools/{script} -->\n", "<!-- its end -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{table}{end}{after}"


def write_or_check_table(
    description: str | None, page: Path, script: str, table: Callable[[], str]
) -> int:
    """The same for a page with a table of a script."""

    def written() -> dict[Path, str]:
        return {page: with_table(page.read_text(), Path(script).name, table())}

    return write_or_check(description, written)


def write_or_check(description: str | None, written: Callable[[], Mapping[Path, str]]) -> int:
    """Bring the pages to these texts, or say which differ, as the command line asks. Returns the
    exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--check", action="store_true", help="write nothing")
    way.add_argument("--write", action="store_true", help="write the tables")
    check, differ = parser.parse_args().check, False
    for page, text in written().items():
        if page.read_text() != text:
            differ = True
            print(f"{page}: {'differs' if check else 'written'}")
            if not check:
                page.write_text(text)
    return int(check and differ)
