"""Lets command-line agents complete a turn with one tool call against minisgl's server.

    .venv/bin/python scripts/tools/try_agents.py [NAME ...]

No model is needed: the engine is scripted. It asks for the contents of a file with the agent's own
tool, and answers with what it then reads there. The agents are packages of npm, installed with
what they need into a temporary folder (some hundred megabytes), which is their home too.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent.parent / "tests"))
from support.scripted_engine import ScriptedEngine, qwen
from support.serving import served

FILE = "word.txt"
QUESTION = f"Which word is in the file {FILE}? Answer with the word."
LIMIT_S = 300
KEY = "a-key"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A command-line agent. `{url}` in its arguments and variables is the server's address."""

    package: str  # of npm, with its version
    command: str  # its program, below node_modules
    arguments: Sequence[str]  # before the question
    variables: Mapping[str, str] = field(default_factory=dict)
    tool: str  # that runs a command line
    tool_arguments: Callable[[str], Mapping[str, Any]]  # for a command line


AGENTS = {
    "codex": Agent(
        package="@openai/codex@0.169.0",
        command=".bin/codex",
        arguments=(
            *("exec", "--skip-git-repo-check", "-s", "read-only", "-m", "scripted"),
            *("-c", "model_provider=minisgl", "-c", 'model_providers.minisgl.name="minisgl"'),
            *("-c", 'model_providers.minisgl.base_url="{url}/v1"'),
            *("-c", 'model_providers.minisgl.wire_api="responses"'),
            *("-c", 'model_providers.minisgl.env_key="MINISGL_KEY"'),
        ),
        variables={"MINISGL_KEY": KEY},
        tool="exec_command",
        tool_arguments=lambda line: {"cmd": line},
    ),
    "claude": Agent(
        package="@anthropic-ai/claude-code@2.1.197",
        command="@anthropic-ai/claude-code-linux-x64/claude",  # the wrapper needs install scripts
        arguments=("--allowedTools", "Bash", "-p"),
        variables={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": "scripted",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        tool="Bash",
        tool_arguments=lambda line: {"command": line, "description": "Read a file"},
    ),
}


class ReadingEngine(ScriptedEngine):
    """Calls a tool until the conversation has the word, and then says it."""

    def __init__(self, call: str, word: str) -> None:
        super().__init__(qwen())
        self._call = call
        self._word = word
        self.num_calls = 0

    def submit(self, prompt_token_ids: Sequence[int], *arguments: Any, **options: Any) -> Any:
        known = self._word in self.tokenizer.decode(prompt_token_ids)
        self.num_calls += not known
        self.answers = [self._word if known else self._call]
        return super().submit(prompt_token_ids, *arguments, **options)


def try_agent(agent: Agent, folder: Path) -> None:
    """Raises AssertionError, or CalledProcessError, if the turn is not completed."""
    home = folder / "home"
    work = folder / "work"
    home.mkdir()
    work.mkdir()
    environment = {**os.environ, "HOME": str(home), "npm_config_cache": str(folder / "npm")}
    subprocess.run(
        ["npm", "install", "--ignore-scripts", "--loglevel=error", agent.package],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    word = secrets.token_hex(8)
    (work / FILE).write_text(f"{word}\n")
    arguments = json.dumps(agent.tool_arguments(f"cat {FILE}"))
    call = f'<tool_call>\n{{"name": "{agent.tool}", "arguments": {arguments}}}\n</tool_call>'
    call = f"<think>\nI have to look.\n</think>\n\nOne moment.{call}"

    async def start() -> ReadingEngine:
        return ReadingEngine(call, word)

    with served(start, api_key=(KEY,), served_model_name=("scripted",)) as server:
        environment |= {
            name: value.replace("{url}", server.url) for name, value in agent.variables.items()
        }
        command = [str(folder / "node_modules" / agent.command)]
        command += [argument.replace("{url}", server.url) for argument in agent.arguments]
        done = subprocess.run(
            [*command, QUESTION],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0 and word in done.stdout, done.stdout + done.stderr
        assert server.engine.num_calls == 1, f"{server.engine.num_calls} calls"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    # Without `choices`: Python 3.11 looks for the empty list among them.
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(AGENTS)}")
    names = parser.parse_args().names or [*AGENTS]
    if unknown := {*names} - {*AGENTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(AGENTS)}")
    num_failed = 0
    for name in names:
        agent = AGENTS[name]
        with tempfile.TemporaryDirectory() as folder:
            try:
                try_agent(agent, Path(folder))
            except (AssertionError, subprocess.SubprocessError) as error:
                num_failed += 1
                print(f"FAIL  {agent.package}: {error}", flush=True)
            else:
                print(f"ok    {agent.package}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
