"""A record of a run: which tests have run, in which environment. scripts/tools/environments.py
reads it."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path

import pytest

PACKAGES = ("torch", "triton", "ray", "nixl", "trl")


class Record:
    """A plugin of pytest that writes a line for each test as it ends: its outcome, and its id.

    The first line begins with "#", and tells the day and the versions. A test that never began
    because its fixtures failed has the outcome "error".
    """

    def __init__(self, file: Path) -> None:
        """Replaces the record of an earlier run."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w")
        self._write(f"# {datetime.date.today()} {', '.join(versions())}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped:
            self._write(f"{report.outcome} {report.nodeid}")
        elif report.failed:
            self._write(f"error {report.nodeid}")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        print(line, file=self._file, flush=True)


def versions() -> list[str]:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found
