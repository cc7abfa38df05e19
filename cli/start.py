"""The entry point of the command, which tells of an incomplete installation.

Imports nothing but Python's own modules, so that it works where a package is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

OWN = ("minisgl", "minisgl_cli")  # a module of ours that is missing is our mistake


def main() -> int:
    """Run the command. Returns the exit code."""
    try:
        from .main import main as run

        return run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OWN:
            raise
        print(f"minisgl: {missing(package)}", file=sys.stderr)
        return 1


def missing(package: str) -> str:
    """What to do where a package that minisgl depends on is missing."""
    checkout = Path(__file__).resolve().parents[1]
    target = f"-e {checkout}" if (checkout / "pyproject.toml").is_file() else "minisgl"
    return (
        f"The package {package} is missing, so this installation is incomplete. Install minisgl "
        f"again: {sys.executable} -m pip install {target}"
    )
