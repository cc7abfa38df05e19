"""The programs in scripts/examples run unchanged and print the documented output."""

from __future__ import annotations

import runpy
import sys

import pytest
from support.folders import SCRIPTS

EXAMPLES = SCRIPTS / "examples"
PRINTED = {
    "offline_batch.py": ["What is 17 + 25? 17 + 25 = 42. (stop)", "p-l-a-n-e-t"],
    "offline_chat.py": ["You live in Turin.", "tokens cached"],
    "async_engine.py": ["What is 17 + 25? 17 + 25 = 42.", "minisgl is a"],
    "openai_client.py": [
        "The capital of France is Paris.",
        "minisgl is a compact and fast",
        "'1' ",
    ],
    "structured.py": [
        "regex: 17 + 25 = 42",
        "schema: Capital(country=",
        "openai: Capital(country=",
    ],
}


ELSEWHERE = {"grpo.py", "trl_on_cpu.py"}  # in test_trl.py, since they need TRL


def test_every_example_is_tested_and_listed_in_the_readme() -> None:
    examples = {path.name for path in EXAMPLES.glob("*.py")}
    assert examples == PRINTED.keys() | ELSEWHERE
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in examples)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_its_answers(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for expected in PRINTED[name]:
        assert expected in printed
