from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.grammars import VOCABULARIES, GrammarBench, open_bench


@pytest.fixture(scope="module", params=VOCABULARIES)
def any_bench(request: pytest.FixtureRequest) -> Iterator[GrammarBench]:
    """Of each vocabulary in turn."""
    with open_bench(request.param) as bench:
        yield bench


@pytest.fixture(scope="module")
def bench() -> Iterator[GrammarBench]:
    with open_bench("byte_level") as bench:
        yield bench
