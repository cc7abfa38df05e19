"""Messages from the parent process to its children, through their standard input.

It stays open as long as the parent lives, so that its end tells a child that the parent is gone,
however it ended. Configurations travel there too, since others can read command lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from minisgl.subprocesses import LENGTH

INPUT = 0  # the number of standard input
PARENT = os.getppid()
# Between the end of the parent and that of a child that does not end by itself.
ORPHAN_SECONDS = 10.0

Message = TypeVar("Message")


async def start_child(
    command: Sequence[str], environment: dict[str, str], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a process with a lifeline, in a session of its own: Ctrl-C is for the parent."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,
    )


async def end_children(children: Sequence[asyncio.subprocess.Process], seconds: float) -> None:
    """Ask all of them to end, and kill those that have not after so long."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
    waiting = [asyncio.ensure_future(child.wait()) for child in children]
    if waiting:
        await asyncio.wait(waiting, timeout=seconds)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    await asyncio.gather(*waiting)


def tell(child: asyncio.subprocess.Process, message: Any) -> None:
    """Send a message of any type that msgspec encodes. A child that has ended misses it."""
    assert child.stdin is not None
    encoded = msgspec.msgpack.encode(message)
    if not child.stdin.is_closing():
        child.stdin.write(LENGTH.pack(len(encoded)) + encoded)


def hear(kind: type[Message]) -> Message | None:
    """The next message of the parent; None at its end. Blocks."""
    head = _read(LENGTH.size)
    if head is None:
        return None
    message = _read(LENGTH.unpack(head)[0])
    return None if message is None else msgspec.msgpack.decode(message, type=kind)


def _read(size: int) -> bytes | None:
    # Not through sys.stdin: its lock would be held when the interpreter ends.
    data = b""
    while len(data) < size:
        piece = os.read(INPUT, size - len(data))
        if not piece:
            return None
        data += piece
    return data


def end_with_parent(
    listen: Callable[[], object], patience_s: float, sockets: Sequence[str]
) -> None:
    """Call `listen` in a thread until it returns None, and end this process then.

    patience_s: how long a clean end may take. sockets: of this process, in the private folder.
    """

    def watch() -> None:
        while listen() is not None:
            pass
        # A process that is draining already is killed by the signal.
        _remove(sockets)
        os.kill(os.getpid(), signal.SIGTERM)
        # The thread does not keep the process alive.
        threading.Event().wait(patience_s + ORPHAN_SECONDS)
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def remove_sockets(*paths: str) -> None:
    """Remove what this process has in the private folder; without a parent the folder, too."""
    _remove(paths, with_folder=os.getppid() != PARENT)


def _remove(paths: Sequence[str], *, with_folder: bool = True) -> None:
    with contextlib.suppress(OSError):
        for path in paths:
            Path(path).unlink(missing_ok=True)
        if with_folder:  # fails while others have files there
            Path(paths[0]).parent.rmdir()
