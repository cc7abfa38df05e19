"""The shell scripts for setup and quickstart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import try_agents
from support.folders import SCRIPTS

from minisgl.models.hub import DEMO_NOTE


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=environment or None,
        capture_output=True,
        text=True,
    )


def test_quickstart_ask_starts_a_server_prints_its_answer_and_stops_it() -> None:
    result = run(sys.executable, SCRIPTS / "ask.py", "--device", "cpu", "--num-pages", "64")
    assert result.returncode == 0, result.stderr
    _, _, conversation = result.stdout.partition("\n> ")
    _, *answer, last_line = conversation.splitlines()
    known = "minisgl is a compact and fast inference engine for language models."
    assert "".join(answer) == known
    assert DEMO_NOTE in result.stdout
    assert DEMO_NOTE in result.stderr  # where the server says it
    assert last_line == "The server has stopped."


def test_quickstart_ask_reports_why_the_server_did_not_start() -> None:
    result = run(sys.executable, SCRIPTS / "ask.py", "--dtype", "int3")
    assert result.returncode == 2
    assert result.stderr.startswith("minisgl: --dtype int3: allowed: ")


def test_all_agents_are_tried_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(try_agents, "try_agent", lambda agent, folder: tried.append(agent))
    for names, expected in (([], ["codex", "claude"]), (["claude"], ["claude"])):
        tried.clear()
        monkeypatch.setattr(sys, "argv", ["try_agents.py", *names])
        assert try_agents.main() == 0
        assert tried == [try_agents.AGENTS[name] for name in expected]
    monkeypatch.setattr(sys, "argv", ["try_agents.py", "nobody"])
    with pytest.raises(SystemExit):
        try_agents.main()


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.sh")), ids=lambda script: script.name)
def test_the_shell_scripts_have_valid_syntax(script: Path) -> None:
    assert run("bash", "-n", script).returncode == 0


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "there is no python3"),
        ('[ "$1" = -V ] && echo Python 3.9.2 || exit 1', "python3 is Python 3.9.2"),
    ],
)
def test_without_a_supported_python_the_setup_says_so(
    tmp_path: Path, python: str | None, said: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if python is not None:
        (tools / "python3").write_text(f"#!{tools / 'bash'}\n{python}\n")
        (tools / "python3").chmod(0o755)
    shutil.copytree(SCRIPTS, tmp_path / "scripts")  # beside which there is no .venv
    result = run(tools / "bash", tmp_path / "scripts" / "quickstart.sh", PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr == f"minisgl needs Python 3.11 to 3.13 on the PATH ({said}).\n"


def test_the_python_probe_accepts_this_python_and_finds_its_torch() -> None:
    result = run(sys.executable, SCRIPTS / "probe_python.py")
    assert result.returncode == 0
    assert any((Path(folder) / "torch").is_dir() for folder in result.stdout.splitlines())
