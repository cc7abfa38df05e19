"""`minisgl version`: what a bug report should name."""

from __future__ import annotations

import platform
from importlib import metadata

NAMED = ("minisgl", "torch", "transformers", "triton", "flashinfer-python", "flash-attn")


def version() -> int:
    """Print the versions of minisgl, Python and the packages that matter most."""
    print(f"python {platform.python_version()} on {platform.platform()}")
    for package in NAMED:
        print(f"{package} {_version_of(package)}")
    return 0


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
