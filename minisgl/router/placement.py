"""What each replica gets of this machine: GPUs of its own, or cores of the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
SMI_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of the machine that one replica uses."""

    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES
    cores: tuple[int, ...] = ()  # of the CPU; empty: all

    def environment(self) -> dict[str, str]:
        """The variables that limit a process to its GPUs."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}


def shares(
    num_replicas: int, gpus_each: int, device: str, gpus: Sequence[str], cores: Sequence[int]
) -> list[Share]:
    """Divide `gpus`, or `cores` if there are no GPUs or `device` is cpu.

    Raises ConfigError if there are too few GPUs. With fewer cores than replicas, cores are shared.
    """
    if device == "cpu" or (device == "auto" and not gpus):
        size = max(1, len(cores) // num_replicas)
        starts = [index * size % len(cores) for index in range(num_replicas)]
        return [Share(cores=tuple(cores[start : start + size])) for start in starts]
    if not gpus:
        raise ConfigError("--device", device, "no GPU is visible here; allowed: auto or cpu")
    if len(gpus) < num_replicas * gpus_each:
        of = f" of {gpus_each} GPUs" if gpus_each > 1 else ""
        raise ConfigError(
            "--replicas",
            num_replicas,
            f"needs {num_replicas * gpus_each} GPUs, and there are {len(gpus)}; allowed: up to "
            f"{len(gpus) // gpus_each} replicas{of}",
        )
    return [
        Share(gpus=tuple(gpus[index * gpus_each : (index + 1) * gpus_each]))
        for index in range(num_replicas)
    ]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, by number or name. Does not load CUDA.

    A process that loads it would take memory of each GPU.
    """
    given = environment.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA ignores what follows a number that is none.
        ends = [place for place, name in enumerate(names) if name in ("", "-1")]
        return names[: ends[0]] if ends else names
    try:
        done = subprocess.run(
            ("nvidia-smi", "-L"), capture_output=True, text=True, timeout=SMI_SECONDS
        )
        count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        count = len([*Path("/dev").glob("nvidia[0-9]*")])
    return [str(index) for index in range(count)]
