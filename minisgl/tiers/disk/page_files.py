"""Pages of the KV cache in files of one folder, which processes of one host share.

A file holds a run of pages of one rank of one model: a header with the key and the checksum of each
page, then the pages. It is written under another name and renamed, and never changed after that. No
file is synced to the disk: one that a crash has torn fails its checks, and is removed. The time of
last modification says when a page of it was last used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from minisgl.kvcache.page_keys import KEY_BYTES

logger = logging.getLogger(__name__)

MAGIC = b"minisgl KV 1\n\0\0\0"
ALIGNMENT = 4096  # of the first page in its file
REFRESH_S = 5.0  # between looks at what other processes have done
RETRY_S = 30.0  # after an error, before anything is written again
STALE_S = 600.0  # age at which a file that nobody has finished is removed
FEW_FILES = 256  # such a folder is listed before each file
KEPT_PART = 0.95  # of the allowed bytes, which remain after an eviction
MAX_PAGES = 1 << 16  # in a file

_HEAD = struct.Struct("<16sIQ32s")  # magic, number of pages, bytes of a page, fingerprint
_ENTRY = struct.Struct(f"<{KEY_BYTES}sI")  # key, CRC-32 of the page
_CRC = struct.Struct("<I")  # of the header before it
_NAME = re.compile(r"(?P<model>[0-9a-f]{32})-[0-9a-f]{24}\.minisgl-kv(?P<unfinished>\.part)?")


@dataclass(frozen=True, slots=True)
class _Page:
    """Where a page is."""

    name: str
    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _File:
    """What a listing of the folder says of a file."""

    name: str
    model: str
    unfinished: bool
    num_bytes: int
    used_s: float


def _header_size(num_pages: int) -> int:
    size = _HEAD.size + num_pages * _ENTRY.size + _CRC.size
    return size + -size % ALIGNMENT


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _read_all(descriptor: int, into: memoryview, offset: int) -> bool:
    """Fill `into`; False if the file ends before."""
    while into:
        count = os.preadv(descriptor, [into], offset)
        if not count:
            return False
        into, offset = into[count:], offset + count
    return True


class PageFiles:
    """The pages of one rank of one model, in a folder with those of others. Thread-safe.

    No method raises for a broken disk: a page that cannot be written is not there, and one that
    cannot be read is a miss.
    """

    def __init__(self, folder: Path, fingerprint: bytes, page_bytes: int, max_bytes: int) -> None:
        """fingerprint: 32 bytes, different for each rank. max_bytes: of all files in the folder,
        whoever has written them."""
        self.page_bytes = page_bytes
        self._folder = folder
        self._fingerprint = fingerprint
        self._model = fingerprint.hex()[:32]
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # of the four below
        self._pages: dict[bytes, _Page] = {}
        self._keys: dict[str, tuple[bytes, ...]] = {}  # by file
        self._num_bytes = 0  # in the folder, as far as it is known
        self._complaints: set[str] = set()
        self._listed: tuple[int, ...] = ()  # what the folder looked like when it was last read
        self._retry_s = 0.0  # when the disk may be written again after an error
        self._closed = threading.Event()
        self._evicting = threading.Lock()
        self.refresh()
        threading.Thread(target=self._watch, name="minisgl-disk-cache", daemon=True).start()

    def holds(self, key: bytes) -> bool:
        """Whether a page is probably there: reading may find it gone or damaged. No I/O."""
        return key in self._pages

    def forget(self, keys: Sequence[bytes]) -> None:
        """Hold these pages no longer, whatever is on disk. No I/O."""
        with self._lock:
            for key in keys:
                self._pages.pop(key, None)

    def leave_memory(self, keys: Sequence[bytes]) -> None:
        """Let the system forget the contents of files, so that they are read from the disk."""
        for name in self._names(keys):
            with contextlib.suppress(OSError), open(self._folder / name, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files with these pages."""
        for name in self._names(keys):
            self._remove_file(name)

    def _names(self, keys: Sequence[bytes]) -> set[str]:
        return {place.name for key in keys if (place := self._pages.get(key)) is not None}

    def close(self) -> None:
        self._closed.set()

    # -- writing -----------------------------------------------------------------------------------

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Store a run of pages in a file; returns its bytes, 0 if it could not be. Blocks."""
        started = time.monotonic()
        if started < self._retry_s:
            return 0
        header = self._header(keys, pages)
        num_bytes = len(header) + len(pages) * self.page_bytes
        try:
            if not self._make_room(num_bytes):
                return 0
            name = f"{self._model}-{secrets.token_hex(12)}.minisgl-kv"
            self._write_file(name, [memoryview(header), *pages])
        except OSError as error:
            self._complain("write", error)
            self._retry_s = time.monotonic() + RETRY_S
            return 0
        with self._lock:
            if started >= self._retry_s:  # else another thread's error came later than the start
                self._complaints.discard("write")
            self._num_bytes += num_bytes
            self._enter(name, header)
        return num_bytes

    def _header(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> bytes:
        head = [_HEAD.pack(MAGIC, len(keys), self.page_bytes, self._fingerprint)]
        head += [_ENTRY.pack(key, zlib.crc32(page)) for key, page in zip(keys, pages, strict=True)]
        packed = b"".join(head)
        packed += _CRC.pack(zlib.crc32(packed))
        return packed + bytes(-len(packed) % ALIGNMENT)

    def _write_file(self, name: str, parts: Sequence[memoryview]) -> None:
        unfinished = self._folder / f"{name}.part"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                for part in parts:
                    _write_all(descriptor, part)
            finally:
                os.close(descriptor)
            os.rename(unfinished, self._folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    # -- reading -----------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Fill the views with what `write` got; returns the number of pages in front of the first
        that is not there, or is damaged. Blocks."""
        if not all(key in self._pages for key in keys):  # another rank may just have written them
            self.refresh()
        num_read = 0
        places = [self._pages.get(key) for key in keys]
        targets = zip(places, into, strict=True)
        for name, group in groupby(targets, key=lambda pair: pair[0].name if pair[0] else None):
            if name is None:
                break
            run = [(place, view) for place, view in group if place is not None]
            done = self._read_file(name, run)
            num_read += done
            if done < len(run):
                break
        return num_read

    def _read_file(self, name: str, run: Sequence[tuple[_Page, memoryview]]) -> int:
        """Read pages of one file; returns how many are good. A damaged file is removed."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # evicted by another process
                self._complain("read", error)
            self._drop(name)
            return 0
        try:
            for done, (place, view) in enumerate(run):
                whole = _read_all(descriptor, view, place.offset)
                if not whole or zlib.crc32(view) != place.checksum:
                    self._remove_damaged(name)
                    return done
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        except OSError as error:
            self._complain("read", error)
            self._drop(name)
            return 0
        finally:
            os.close(descriptor)
        return len(run)

    def _remove_damaged(self, name: str) -> None:
        logger.warning("A file of the disk cache is damaged, and was removed: %s", name)
        self._remove_file(name)

    def _remove_file(self, name: str) -> None:
        self._drop(name)
        with contextlib.suppress(OSError):
            os.unlink(self._folder / name)

    # -- the index ---------------------------------------------------------------------------------

    def _enter(self, name: str, header: bytes) -> None:
        """Take the pages of a file into the index; `header` is sound."""
        num_pages = _HEAD.unpack_from(header)[1]
        keys: list[bytes] = []
        for index in range(num_pages):
            key, checksum = _ENTRY.unpack_from(header, _HEAD.size + index * _ENTRY.size)
            offset = _header_size(num_pages) + index * self.page_bytes
            self._pages[key] = _Page(name, offset, checksum)
            keys.append(key)
        self._keys[name] = tuple(keys)

    def _drop(self, name: str) -> None:
        """Forget the pages of a file."""
        with self._lock:
            for key in self._keys.pop(name, ()):
                place = self._pages.get(key)
                if place is not None and place.name == name:
                    del self._pages[key]

    def _watch(self) -> None:
        while not self._closed.wait(REFRESH_S):
            self.refresh()

    def refresh(self) -> None:
        """Look for what other processes have written and removed. Blocks."""
        try:
            found = self._folder.stat()
            looks = (found.st_mtime_ns, found.st_ino)
            if looks == self._listed:
                return
            files = list(self._list())
        except OSError as error:
            self._complain("read", error)
            return
        ours = {file.name for file in files if file.model == self._model and not file.unfinished}
        with self._lock:
            known = set(self._keys)
            self._num_bytes = sum(file.num_bytes for file in files)
        for name in known - ours:
            if not (self._folder / name).exists():  # it may have come after the listing
                self._drop(name)
        for name in ours - known:
            self._learn(name)
        # A change within the clock's resolution of the last one does not show.
        settled = time.time_ns() - looks[0] > 2_000_000_000
        self._listed = looks if settled else ()

    def _learn(self, name: str) -> None:
        """Read the header of a file that somebody else has written, or this process before."""
        try:
            with open(self._folder / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = self._read_header(file.read(_HEAD.size), file.read)
        except FileNotFoundError:
            return
        except OSError as error:
            self._complain("read", error)
            return
        if header is None or size != len(header) + _HEAD.unpack_from(header)[1] * self.page_bytes:
            self._remove_damaged(name)
            return
        with self._lock:
            self._enter(name, header)

    def _read_header(self, head: bytes, read: Callable[[int], bytes]) -> bytes | None:
        """The header that begins with `head`; None if it is none, or of another model."""
        if len(head) < _HEAD.size:
            return None
        magic, num_pages, page_bytes, fingerprint = _HEAD.unpack(head)
        if (magic, page_bytes, fingerprint) != (MAGIC, self.page_bytes, self._fingerprint):
            return None
        if num_pages > MAX_PAGES:
            return None
        header = head + read(_header_size(num_pages) - len(head))
        end = _HEAD.size + num_pages * _ENTRY.size
        if len(header) != _header_size(num_pages):
            return None
        (checksum,) = _CRC.unpack_from(header, end)
        return header if zlib.crc32(header[:end]) == checksum else None

    # -- the bound ---------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        """Remove files, least recently used first, until `num_bytes` more fit."""
        if num_bytes > self._max_bytes:
            return False
        # Others may have filled much of a small folder since it was listed; to list it is cheap.
        is_small = self._max_bytes < FEW_FILES * num_bytes
        if not is_small and self._num_bytes + num_bytes <= self._max_bytes:
            return True
        with self._evicting:
            files = sorted(self._list(), key=lambda file: file.used_s)
            total = sum(file.num_bytes for file in files)
            aim = min(KEPT_PART * self._max_bytes, self._max_bytes - num_bytes)
            now = time.time()
            if total + num_bytes > self._max_bytes:
                for file in files:
                    if total <= aim:
                        break
                    if file.unfinished and now - file.used_s < STALE_S:
                        continue
                    with contextlib.suppress(FileNotFoundError):  # another process was faster
                        os.unlink(self._folder / file.name)
                    total -= file.num_bytes
                    self._drop(file.name)
            with self._lock:
                self._num_bytes = total
        return total + num_bytes <= self._max_bytes

    def _list(self) -> Iterator[_File]:
        """The files of this format in the folder: all else is left alone."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                unfinished = match["unfinished"] is not None
                if unfinished and time.time() - found.st_mtime > STALE_S:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                    continue
                yield _File(entry.name, match["model"], unfinished, found.st_size, found.st_mtime)

    def _complain(self, doing: str, error: OSError) -> None:
        """Log the first of a row of errors."""
        with self._lock:
            if doing in self._complaints:
                return
            self._complaints.add(doing)
        code = errno.errorcode.get(error.errno or 0, "")
        logger.warning(
            "The disk cache cannot %s files in %s: %s %s; what it would hold is computed instead.",
            doing,
            self._folder,
            code,
            error.strerror,
        )
