"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.http_server import held_port, tiny_model

__all__ = ["tiny_model"]


@pytest.fixture
def port() -> Iterator[int]:
    """For a server in a process of its own."""
    with held_port() as found:
        yield found
