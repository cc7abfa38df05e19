"""What this process may use of its machine: memory and cores of the CPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# The limits of memory of a container, in version 2 and 1 of control groups.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """The memory of this machine, or what the control group of this process may use of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another version, or "max"
            total = min(total, int(Path(path).read_text()))
    return total


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]
