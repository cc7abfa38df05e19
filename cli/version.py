"""`minisgl version`: what a bug report should name."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

NAMED = ("minisgl", "torch", "transformers", "triton", "flashinfer-python", "flash-attn")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# The backends depend on the model a little; most have such heads.
HEAD_DIM, GROUP = 128, 4


def version() -> int:
    """Print the versions of minisgl, Python and the packages that matter most.

    Then the hardware, and the attention backends that run on it.
    """
    print(f"python {platform.python_version()} on {platform.platform()}")
    for package in NAMED:
        print(f"{package} {_version_of(package)}")
    try:
        for line in _hardware():
            print(line, flush=True)
    except Exception as error:  # what is broken is what the report is about
        print(f"hardware unknown, {type(error).__name__}: {error}")
    return 0


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _hardware() -> Iterator[str]:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"cpu {os.cpu_count()} cores, {memory_bytes / 2**30:.1f} GiB of memory"
    if DRIVER_FILE.is_file():
        yield f"driver {DRIVER_FILE.read_text().splitlines()[0].removeprefix('NVRM version: ')}"

    import torch

    from minisgl.attention.backends import available_backends

    capability = None
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        yield f"cuda {torch.version.cuda}"
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            yield (
                f"gpu {index} {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, "
                f"compute capability {gpu.major}.{gpu.minor}"
            )
    else:
        yield "gpu none that PyTorch can use"
    found = available_backends(capability, HEAD_DIM, GROUP)
    yield f"attention prefill {', '.join(found.prefill)}; decode {', '.join(found.decode)}"
    for name, reason in found.missing.items():
        yield f"attention without {name}: {reason}"
