"""What processes that do untrusted work for this one have in common."""

from __future__ import annotations

import resource
from pathlib import Path
from struct import Struct
from typing import IO

LENGTH = Struct("!Q")  # precedes every message


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """None where the other side has ended."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    message = pipe.read(length)
    return message if len(message) == length else None


def limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes beyond what it has."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux; other limits remain
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
