"""Folders for processes whose sockets lie in them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty folder with a short path: those of sockets have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        yield Path(folder)
