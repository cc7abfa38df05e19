"""A fingerprint of a checkpoint's weights: every byte counts, and is read once per machine."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path

from minisgl.errors import CheckpointError
from minisgl.models.hub import safetensors_files

DIGEST_BYTES = 32  # of SHA-256, for which processors have instructions
PIECE_BYTES = 16 << 20
MAX_THREADS = 16  # each holds a piece
# A file system's clock has ticks, so that a file may change twice within one time of change.
SETTLED_NS = 2_000_000_000


def weights_fingerprint(folder: Path) -> bytes:
    """32 bytes that differ between checkpoints any of whose weights differ.

    Hashes every byte of the weights, once per machine: digests are kept in
    ${XDG_CACHE_HOME:-~/.cache}/minisgl/digests. Blocks; thread-safe. Raises CheckpointError.
    """
    digest = sha256()
    for path in safetensors_files(folder):
        try:
            digest.update(_file_digest(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return digest.digest()


@dataclass(frozen=True)
class _Identity:
    """What tells a file from any other, and from itself with other bytes.

    The time of the last change, unlike that of modification, cannot be set or copied.
    """

    path: str
    device: int
    inode: int
    size: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> _Identity:
        found = path.stat()
        where = os.path.realpath(path)
        return _Identity(where, found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Whether a later change of the file is sure to have another time."""
        return time.time_ns() - self.changed_ns > SETTLED_NS


def _file_digest(path: Path) -> bytes:
    """The digest of a file, from the folder of digests if it is there."""
    identity = _Identity.of(path)
    name = sha256(repr(identity).encode()).hexdigest()
    with _kept_digest(name) as kept:
        if kept is not None and len(known := kept.read()) == DIGEST_BYTES:
            return known
        settled = identity.is_settled
        digest = _hash(path, identity.size)
        if _Identity.of(path) != identity:
            raise CheckpointError(f"{path} has changed while it was read.")
        if kept is not None and settled:
            with suppress(OSError):  # where the disk is full, the file is read again the next time
                kept.truncate(0)
                kept.write(digest)
        return digest


@contextmanager
def _kept_digest(name: str) -> Iterator[FileIO | None]:
    """The file for a digest, locked, so that of several ranks one hashes and the others wait.

    It is empty where there is no digest yet. None where files cannot be kept.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with ExitStack() as opened:
        try:
            folder = Path(home).expanduser() / "minisgl" / "digests"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = opened.enter_context((folder / name).open("a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
        except (OSError, RuntimeError):  # the latter where a user has no home
            yield None
        else:
            yield file


def _hash(path: Path, size: int) -> bytes:
    """The digest of the digests of the file's pieces, which threads compute."""
    with path.open("rb") as file:

        def piece(start: int) -> bytes:
            data = os.pread(file.fileno(), PIECE_BYTES, start)
            if len(data) != min(PIECE_BYTES, size - start):
                raise CheckpointError(f"{path} has changed while it was read.")
            return sha256(data).digest()

        digest = sha256(size.to_bytes(8, "little"))
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            for part in threads.map(piece, range(0, size, PIECE_BYTES)):
                digest.update(part)
    return digest.digest()
