"""Where ranks exchange what they need to form a process group."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]


class Rendezvous(Protocol):
    """Known to every rank, so that it can be pickled."""

    def store(self) -> Store:
        """The store that all ranks share, as one rank opens it."""
        ...

    def close(self) -> None:
        """Free what rank 0 has allocated. NCCL, which polls the store, hangs if it goes before the
        group is closed or the process ends."""
        ...


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A file in a private folder, for ranks on one machine. A file has no socket that another user
    could write to."""

    folder: Path

    @staticmethod
    def create() -> FileRendezvous:
        """Raises OSError if there is no place for temporary files."""
        return FileRendezvous(Path(tempfile.mkdtemp(prefix="minisgl-ranks-")))

    def store(self) -> Store:
        # -1: the store does not delete the file by itself.
        return FileStore(str(self.folder / "store"), -1)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
