"""Describes the machine and the software of a measurement."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from minisgl import __version__
from minisgl.config import usable_cores

PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "flash-attn")
FOLDER = Path(__file__).parent
TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the installation of this process."""

    measured_at: str  # with the time zone
    platform: str
    cpu: str
    num_cpus: int  # that this process may use
    gpus: list[str] = field(default_factory=list)  # all of the machine: name, memory
    driver: str | None = None  # of NVIDIA
    cuda: str | None = None  # that torch was built for
    versions: dict[str, str]
    commit: str | None = None  # of a checkout; with "+changes" where it is not what runs

    @classmethod
    def found(cls) -> Environment:
        import torch

        smi = _gpus()
        return cls(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            platform=platform.platform(),
            cpu=_cpu_name(),
            num_cpus=len(usable_cores()),
            gpus=[f"{name}, {memory}" for name, _, memory in smi],
            driver=smi[0][1] if smi else None,
            cuda=torch.version.cuda,
            versions=versions(),
            commit=checkout_commit(FOLDER),
        )

    def describe(self) -> str:
        """One line for the terminal."""
        parts = [*dict.fromkeys(self.gpus)] or [self.cpu]
        parts += [f"driver {self.driver}"] if self.driver else []
        parts += [f"CUDA {self.cuda}"] if self.cuda else []
        parts += [f"commit {self.commit}"] if self.commit else []
        return ", ".join(parts)


def versions() -> dict[str, str]:
    """The versions of Python, minisgl and the installed packages among PACKAGES."""
    # An editable installation names the version of minisgl with which it was made.
    found = {"python": platform.python_version(), "minisgl": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def checkout_commit(folder: Path) -> str | None:
    """The commit of the repository of `folder`; None outside of one (an installed package)."""
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    # A package that is installed below some other checkout is no part of it.
    if commit is None or _output("git", "-C", str(folder), "ls-files", ".") in (None, ""):
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _gpus() -> list[list[str]]:
    """Name, driver and memory of each GPU."""
    query = "--query-gpu=name,driver_version,memory.total"
    listed = _output("nvidia-smi", query, "--format=csv,noheader")
    rows = [line.split(", ") for line in (listed or "").splitlines()]
    return [row for row in rows if len(row) == 3]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str | None:
    """The output of a program; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
