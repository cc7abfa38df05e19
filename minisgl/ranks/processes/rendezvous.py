"""The rendezvous through which ranks form a process group."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A file without a name, for ranks on one machine: it ends with them, however they end. Unlike
    a socket, other users cannot write to it. Can be pickled only while a process is being spawned,
    which inherits the file."""

    # Its number, which stays open: NCCL polls the store, and stores write to it when they end.
    file: int

    @classmethod
    def make(cls) -> FileRendezvous:
        """Raises OSError."""
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (DupFd(self.file),)

    def store(self) -> Store:
        """Open the store that all ranks share."""
        # -1: the store does not delete the file.
        return FileStore(f"/proc/self/fd/{self.file}", -1)


def _inherited(end: Any) -> FileRendezvous:
    return FileRendezvous(end.detach())


@dataclass(frozen=True, slots=True)
class TcpRendezvous:
    """A store that node 0 serves to ranks on several machines. Unlike the connections between
    nodes, those to the store are not authenticated."""

    host: str  # IP address
    port: int

    def store(self) -> Store:
        return TCPStore(self.host, self.port, is_master=False)


# Provides a torch.distributed store to all ranks. Pickled with the RankSpec.
Rendezvous = FileRendezvous | TcpRendezvous


def serve_store(host: str) -> tuple[Store, TcpRendezvous]:
    """Serve a store at a free port of an IP address, for as long as it is referenced. Raises
    OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        # Left to itself, the store would listen on every address of the machine.
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, TcpRendezvous(host, port)
