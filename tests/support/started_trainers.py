"""Trainers in processes of their own (sending_trainer.py): programs with a GPU, otherwise forked
from a process with torch, which each would else import anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from support import sending_trainer
from support.forked_programs import Running, prepared

from minisgl.distributed.addresses import GroupAddress


class Trainer(Protocol):
    def kill(self) -> None:
        """End it as the system does that lacks memory."""


class ForkedTrainer(Running):
    """It lives until `close`, unless it is killed before."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        given, self._told = os.pipe()
        files = [given, os.dup(1), os.dup(2)]
        run = partial(sending_trainer.main, *arguments)
        super().__init__(prepared(run, (), os.environ, None, files, lead=os.setsid), files)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._told)
        self.wait()


@contextmanager
def start_trainer(
    address: GroupAddress,
    folder: Path,
    stop_after: int = 1 << 30,
    packed_bytes: int = 0,
    device: str = "cpu",
) -> Iterator[Trainer]:
    """Send the tensors of a checkpoint, in the order of their names; it is killed after so many,
    else it lives until its standard input is closed. packed_bytes: not one by one, but in buckets
    that end when they have more bytes. device: that has them."""
    place = (address.master_port, address.world_size, address.group_name, address.backend)
    arguments = tuple(map(str, (*place, device, folder, stop_after, packed_bytes)))
    if device == "cpu":
        with closing(ForkedTrainer(arguments)) as forked:
            yield forked
    else:
        command = [sys.executable, sending_trainer.__file__, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as started:
            yield started
