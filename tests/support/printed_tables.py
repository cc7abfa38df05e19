"""Tables that the benchmarks print."""

from __future__ import annotations


def cells(printed: str) -> list[list[str]]:
    """The rows of a table, without its heading."""
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
