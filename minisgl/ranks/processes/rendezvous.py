"""The rendezvous through which ranks form a process group."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A file in a private folder, for ranks on one machine. Unlike a socket, other users cannot
    write to it."""

    folder: Path

    def store(self) -> Store:
        """Open the store that all ranks share."""
        # -1: the store does not delete the file.
        return FileStore(str(self.folder / "store"), -1)

    def close(self) -> None:
        """Remove it. NCCL polls the store, and hangs if it disappears before the group is closed or
        the process ends."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class TcpRendezvous:
    """A store that node 0 serves to ranks on several machines. Unlike the connections between
    nodes, those to the store are not authenticated."""

    host: str  # IP address
    port: int

    def store(self) -> Store:
        return TCPStore(self.host, self.port, is_master=False)

    def close(self) -> None:
        """Free nothing: the store ends with the object that `serve_store` returns."""


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
