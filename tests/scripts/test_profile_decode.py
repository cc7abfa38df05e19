"""What a kernel adds to a step whose launches overlap."""

from __future__ import annotations

import io

from profile_decode import Launch, added_us, table_of
from rich.console import Console

LAUNCHES = [
    Launch("gemm", 10, 30),
    Launch("norm", 20, 35),  # waited inside until 30
    Launch("gemm", 22, 33),  # within the one before
    Launch("gemm", 40, 50),
]


def test_a_kernel_counts_as_far_as_it_brings_the_end_of_the_work() -> None:
    assert added_us(LAUNCHES[::-1]) == {"gemm": [20, 0, 10], "norm": [5]}


def test_gaps_are_what_is_left_of_a_step() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as printed:
        console.print(table_of(LAUNCHES, 2))
    lines = printed.get().splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert rows == [
        ["gemm", "1.5", "15.0", "75.0%"],
        ["norm", "0.5", "2.5", "12.5%"],
        ["gaps", "", "2.5", "12.5%"],
        ["step", "", "20.0", ""],
    ]
