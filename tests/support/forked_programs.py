"""`minisgl` as a process that is forked from one with torch, which it would else import anew.

It has arguments, an environment, output and an exit code of its own, as `python -m minisgl` has.
How the interpreter starts the command is left to tests that start it so.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from support.forked_ranks import fork_server

from minisgl_cli.start import main


def minisgl(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> CompletedProcess[str]:
    """Run `minisgl ARGUMENTS` in the folder and capture what it prints."""
    command = [*map(str, arguments)]
    with TemporaryDirectory() as printed:
        files = [Path(printed, name) for name in ("stdout", "stderr")]
        given = (command, dict(environment or os.environ), folder or Path.cwd(), files)
        process = fork_server().Process(target=_run, args=given)
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = (file.read_text() for file in files)
    return CompletedProcess(command, process.exitcode, out, err)


def _run(
    arguments: list[str], environment: dict[str, str], folder: Path, files: Sequence[Path]
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    gc.freeze()  # what is there already: a benchmark collects what it has not made
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["minisgl", *arguments]
    sys.exit(main())
