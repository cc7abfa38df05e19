"""The options of speculative decoding."""

from __future__ import annotations

from typing import Any

import pytest
from support.resolving import CPU, MODEL

from minisgl.config import EngineConfig, resolve
from minisgl.errors import ConfigError


def test_nothing_is_drafted_unless_told_to() -> None:
    config = resolve(EngineConfig(draft_tokens=7), MODEL, CPU, overlap=True)
    assert (config.speculative, config.num_drafts, config.max_run) == ("", 0, 1)


@pytest.mark.parametrize(
    ("drafts", "slots", "rows"), [(3, 256, 512), (3, 8, 32), (1, 1000, 512), (7, 1, 8)]
)
def test_steps_that_verify_drafts_have_a_limit_of_rows(drafts: int, slots: int, rows: int) -> None:
    options = EngineConfig(speculative="ngram", draft_tokens=drafts, max_running_requests=slots)
    config = resolve(options, MODEL, CPU, overlap=True)
    assert (config.speculative, config.num_drafts, config.max_run) == ("ngram", drafts, 1 + drafts)
    assert config.max_run_rows == rows


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"draft_tokens": 16}], ids=str)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**options)


def test_a_task_that_samples_nothing_drafts_nothing() -> None:
    options = EngineConfig(speculative="ngram", task="embed")
    with pytest.raises(ConfigError, match="samples no tokens"):
        resolve(options, MODEL, CPU, overlap=True)
