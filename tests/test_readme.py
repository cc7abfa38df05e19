"""The READMEs' tables of options are what the dataclasses say."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.config import BenchConfig, LatencyConfig, ReportConfig
from minisgl.bench.online.config import LoadConfig
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig, option_names
from minisgl.server.config import ServerConfig
from minisgl_cli.chat.config import ChatConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CLI, BENCH = "cli/README.md", "minisgl/bench/README.md"


def test_the_first_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(README.partition("```python\n")[2].partition("```")[0])
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def row(spec: Field[Any]) -> str:
    names = ", ".join(f"`{name}`" for name in option_names(spec))
    unset = spec.default in (None, "", ())  # the help says what happens then
    value = ",".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    default = "" if unset else "off" if value is False else f"`{value}`"
    return f"| {names} | {default} | {spec.metadata['help']} |"


@pytest.mark.parametrize(
    ("file", "heading", "config"),
    [
        (CLI, "Engine", EngineConfig),
        ("README.md", "Server", ServerConfig),
        (CLI, "Chat", ChatConfig),
        (BENCH, "Benchmark", BenchConfig),
        (BENCH, "Latency", LatencyConfig),
        (BENCH, "Workload", WorkloadConfig),
        (BENCH, "Load", LoadConfig),
        (BENCH, "Report", ReportConfig),
    ],
)
def test_the_table_lists_every_option_as_it_is(file: str, heading: str, config: Any) -> None:
    section = (ROOT / file).read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    expected = [row(spec) for spec in fields(config)]
    assert rows == expected, "The table should be:\n" + "\n".join(expected)
