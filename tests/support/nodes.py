"""Nodes of one engine on this machine, as processes of their own, and a network between them.

They are forked from one process with torch, as are the ranks that scripts start; those of servers
are spawned.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from support.forked_programs import Program, Running, prepared
from support.forked_ranks import forked_ranks, forked_ranks_of

from minisgl_cli.start import main

TOKEN = "a secret of the tests"


class Node:
    """A process in a session of its own, and its log."""

    def __init__(
        self, folder: Path, program: Program, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = folder / f"node-{len(list(folder.glob('node-*')))}.log"
        given = {**os.environ, "MINISGL_CLUSTER_TOKEN": TOKEN, **(env or {})}
        with self._log.open("w") as log:
            nothing, errors = os.open(os.devnull, os.O_RDWR), os.dup(log.fileno())
            files = [nothing, nothing, errors]
            self.process = Running(
                prepared(program, arguments, given, None, files, lead=os.setsid), files
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pids(self) -> list[int]:
        """The living processes of the session, apart from the first, and its forked ranks."""
        of_session = [pid for pid in session_of(self.process.pid) if pid != self.process.pid]
        return [*of_session, *forked_ranks_of(self.process.pid)]

    def rank(self) -> int:
        """The process of the only rank that the node has started."""
        [rank] = [
            pid for pid in self.pids() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return rank

    def kill(self) -> None:
        for pid in session_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def session_of(session: int) -> list[int]:
    """The processes of a session that are no zombies."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which may have spaces: state, parent, group, session.
            fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def node(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Node]:
    """`minisgl serve` on a CPU, with these options."""
    started = Node(folder, main, "serve", "--device", "cpu", *options, env=env)
    try:
        yield started
    finally:
        started.kill()


@contextlib.contextmanager
def script(file: Path) -> Iterator[Node]:
    """A script, whose log is beside it."""
    started = Node(file.parent, partial(run_script, str(file)))
    try:
        yield started
    finally:
        started.kill()


def run_script(file: str) -> int:
    with forked_ranks():
        runpy.run_path(file, run_name="__main__")
    return 0


class Network:
    """Carries connections to another address, until it is cut: then it drops everything without a
    word, in both directions, and keeps the connections open."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self._target = target
        self._cut = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody listens yet
                    near.close()
                    continue
                self._open += near, far
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._cut.is_set():
                    sink.sendall(data)
            if not self._cut.is_set():
                sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def network(host: str, target: tuple[str, int]) -> Iterator[Network]:
    found = Network(host, target)
    try:
        yield found
    finally:
        found.close()
