"""The shell scripts for setup and quickstart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
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


def fake_python(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)


def test_the_quickstart_ends_with_the_next_command(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("")
    fake_python(tmp_path / ".venv/bin/python", 'echo "ran $*"')
    (tmp_path / ".venv/installed").write_text(f"{tmp_path}\n")
    result = run("bash", tmp_path / "scripts/quickstart.sh", "--model", "a model")
    assert result.stderr == ""
    *_, ran, said = result.stdout.splitlines()
    assert ran == f"ran {tmp_path}/scripts/ask.py --model a model"
    assert said.startswith("Next, to talk to it: ")
    next_command = said.partition(": ")[2]
    (tmp_path / ".venv/bin/activate").write_text('minisgl() { echo "$# $*"; }\n')
    assert run("bash", "-c", next_command).stdout == "3 chat --model a model\n"


@pytest.mark.parametrize("reused", ["/usr/lib/python3/site-packages", ""])
def test_a_download_of_torch_is_said_only_where_there_will_be_one(
    tmp_path: Path, reused: str
) -> None:
    fake_python(
        tmp_path / ".venv/bin/python",
        f'case "$*" in *probe_python.py) echo "{reused}" ;; *hub*) echo "$*" ;; esac',
    )
    (tmp_path / "pyproject.toml").write_text('"torch>=1"')
    program = f"set -euo pipefail; root={tmp_path}; source {SCRIPTS}/venv.sh"
    result = run("bash", "-c", f"{program}; cpu_index_answers() {{ false; }}; ensure_venv")
    assert ("PyTorch alone is a download" in result.stderr) == (not reused)
    assert result.returncode == 0 and "Installing minisgl into" in result.stderr
    assert run(tmp_path / ".venv/bin/hf", "download", "a b").stdout == (
        "-m huggingface_hub.cli.hf download a b\n"
    )


@pytest.mark.parametrize(
    ("release", "requirement"),
    [("oldest", "torch==2.11"), ("newest", "torch>=2.11,<2.16"), ("2.13.1", "torch==2.13.1")],
)
def test_a_torch_is_named_by_its_place_in_the_range_or_its_number(
    tmp_path: Path, release: str, requirement: str
) -> None:
    (tmp_path / "pyproject.toml").write_text('  "torch>=2.11,<2.16",\n')
    program = f"set -euo pipefail; root={tmp_path}; source {SCRIPTS}/venv.sh"
    result = run("bash", "-c", f"{program}; torch_release {release}")
    assert result.stdout == f"{requirement}\n"


def test_installing_shows_each_download_and_nothing_else(tmp_path: Path) -> None:
    fake_python(
        tmp_path / "python",
        "echo 'Collecting torch'",
        "echo '  Downloading torch-2.13.0.whl (190.1 MB)'",
        "echo 'Installing collected packages: mpmath, torch'",
        "exit $CODE",
    )
    program = f"set -euo pipefail; root=/; source {SCRIPTS}/venv.sh; python={tmp_path}/python"
    for code in ("0", "3"):
        result = run("bash", "-c", f"{program}; pip_install torch", CODE=code)
        assert result.returncode == int(code)
        assert result.stdout == ""
        assert result.stderr.splitlines() == [
            "  Downloading torch-2.13.0.whl (190.1 MB)",
            "  Installing what was downloaded",
        ]
