"""How much memory there is for this process."""

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
