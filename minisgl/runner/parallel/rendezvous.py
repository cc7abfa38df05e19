"""The rendezvous through which ranks form a process group."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]


class Rendezvous(Protocol):
    """Provides a torch.distributed store to all ranks. Pickled with the RankSpec."""

    def store(self) -> Store:
        """Open the store that all ranks share."""
        ...

    def close(self) -> None:
        """Free what rank 0 has allocated. NCCL polls the store, and hangs if it disappears before
        the group is closed or the process ends."""
        ...


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A file in a private folder, for ranks on one machine. Unlike a socket, other users cannot
    write to it."""

    folder: Path

    @staticmethod
    def create() -> FileRendezvous:
        """Make a private folder for the file. Raises OSError if there is no temporary directory."""
        return FileRendezvous(Path(tempfile.mkdtemp(prefix="minisgl-ranks-")))

    def store(self) -> Store:
        # -1: the store does not delete the file.
        return FileStore(str(self.folder / "store"), -1)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
