"""Pages of the KV cache in files: what is found, what is refused, what is removed."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.resolving import resolved

from minisgl.config import StateSpec
from minisgl.errors import ConfigError
from minisgl.tiers.disk import page_files
from minisgl.tiers.disk.disk_cache import check_folder, open_store
from minisgl.tiers.disk.page_files import PageFiles

PAGE = 1000
MODEL = bytes(range(32))
KEYS = [bytes([index]) * 32 for index in range(100)]


def store(folder: Path, model: bytes = MODEL, max_bytes: int = 1 << 30) -> PageFiles:
    files = PageFiles(folder, model, PAGE, max_bytes)
    files.close()  # the thread that looks again; `refresh` is called instead
    return files


def page(index: int) -> memoryview:
    return memoryview(bytes([index, 255 - index]) * (PAGE // 2))


def put(files: PageFiles, *indices: int) -> int:
    return files.write([KEYS[index] for index in indices], [page(index) for index in indices])


def get(files: PageFiles, *indices: int) -> int:
    """The number of pages that were read; all of them are right."""
    into = [memoryview(bytearray(PAGE)) for _ in indices]
    count = files.read([KEYS[index] for index in indices], into)
    for index, view in list(zip(indices, into, strict=True))[:count]:
        assert view == page(index)
    return count


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_another_rank_has_just_written_is_read(tmp_path: Path) -> None:
    """As the index of rank 0 may say before this one has looked again."""
    first, second = store(tmp_path), store(tmp_path)
    assert put(first, 0, 1, 2)
    assert not second.holds(KEYS[1])
    assert get(second, 1, 2) == 2


def test_states_in_another_form_are_in_other_files(tmp_path: Path) -> None:
    config = resolved(host_cache=1.0, disk_cache=str(tmp_path))
    plain = StateSpec(((4, 8, 8),), ("float32",), num_heads=4, row_sizes=(64,))
    for states in ([plain, plain], [plain.for_runs(4)], []):
        files = open_store(config, states, MODEL, 0, PAGE)
        files.close()
        assert not any(files.holds(key) for key in KEYS[:3])
        assert put(files, 0, 1, 2)
    again = open_store(config, [plain, plain], MODEL, 0, PAGE)
    again.close()
    assert again.holds(KEYS[0])


def test_pages_are_found_in_any_order_and_by_other_processes(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path)
    assert put(first, 0, 1, 2) and put(first, 3, 4)
    assert get(first, 4, 3, 0, 2) == 4
    assert get(first, 1, 9, 2) == 1  # up to the first that is missing
    assert not second.holds(KEYS[0])
    second.refresh()
    assert get(second, 0, 1, 2, 3, 4) == 5
    assert get(store(tmp_path), 0, 1, 2, 3, 4) == 5
    assert get(store(tmp_path, model=bytes(32)), 0) == 0
    first.forget([KEYS[1]])
    assert not first.holds(KEYS[1]) and first.holds(KEYS[2])


@pytest.mark.parametrize("place", ["magic", "count", "key", "checksum", "page", "end", "empty"])
def test_a_damaged_file_is_a_miss_and_removed(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(store(tmp_path), 0, 1)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    offsets = {"magic": 0, "count": 16, "key": 65, "checksum": 93, "page": len(content) - 7}
    if place in offsets:
        content[offsets[place]] ^= 4
    path.write_bytes(content[: {"end": -1, "empty": 0}.get(place, len(content))])
    with caplog.at_level(logging.WARNING):
        files = store(tmp_path)
        assert get(files, 0, 1) < 2
    assert caplog.text.count("damaged") == 1 and not names(tmp_path)
    assert get(files, 1) == 0
    assert put(files, 0, 1) and get(files, 0, 1) == 2


def test_a_file_that_shrinks_or_goes_is_a_miss(tmp_path: Path) -> None:
    files = store(tmp_path)
    put(files, 0, 1)
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 1)
    assert get(files, 0, 1) == 1 and not names(tmp_path)
    put(files, 2)
    for other in tmp_path.iterdir():
        other.unlink()
    assert get(files, 2) == 0 and not files.holds(KEYS[2])
    put(files, 3)
    for other in tmp_path.iterdir():
        other.unlink()
    files.refresh()
    assert not files.holds(KEYS[3])


def test_the_least_recently_used_files_make_way(tmp_path: Path) -> None:
    size = put(store(tmp_path), 0)
    files = store(tmp_path, max_bytes=4 * size)
    for used, index in ((1000, 0), (1001, 1), (1002, 2), (1003, 3)):
        if index:
            put(files, index)
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 2000:
                os.utime(path, (0, used))
    assert get(files, 0) == 1  # used now
    put(files, 4)
    assert [files.holds(KEYS[index]) for index in range(5)] == [True, False, True, True, True]
    other = store(tmp_path, model=bytes(32), max_bytes=4 * size)
    put(other, 5)  # of another model, in the same bound
    files.refresh()
    assert not files.holds(KEYS[2])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * size
    assert put(store(tmp_path, max_bytes=size // 2), 6) == 0  # larger than all that is allowed


def test_a_small_folder_keeps_its_bound_though_another_process_fills_it(tmp_path: Path) -> None:
    for name in ("one", "both"):
        (tmp_path / name).mkdir()
    size = put(store(tmp_path / "one"), 0)
    files, other = (store(tmp_path / "both", model, 2 * size) for model in (MODEL, bytes(32)))
    for number in range(6):
        assert put((files, other)[number % 2], number) == size
        written = sum(path.stat().st_size for path in (tmp_path / "both").iterdir())
        assert written <= 2 * size


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    put(store(tmp_path), 0)
    (ours,) = names(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{ours}.bak").write_text("mine")
    (tmp_path / ours.replace(".", "x.")).write_text("mine")
    stale, fresh = (tmp_path / ours.replace(ours[-20:-11], c * 9) for c in "ab")
    for path, age in ((stale, 2 * page_files.STALE_S), (fresh, 0)):
        path = path.with_name(path.name + ".part")
        path.write_bytes(b"x" * 9000)
        os.utime(path, (time.time() - age,) * 2)
    files = store(tmp_path, max_bytes=6000)
    put(files, 1)
    left = names(tmp_path)
    assert {"notes.txt", f"{ours}.bak", ours.replace(".", "x.")} <= left
    assert stale.name + ".part" not in left and fresh.name + ".part" in left


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_errors_of_the_disk_are_one_line_each_and_leave_no_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = store(tmp_path)
    put(files, 0)
    write, preadv, broken = os.write, os.preadv, [True]

    def few(descriptor: int, data: memoryview) -> int:
        if broken and len(data) < PAGE:  # in the middle of a page
            raise OSError(code, os.strerror(code))
        return write(descriptor, data[:700])

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", few)
    with caplog.at_level(logging.WARNING):
        assert put(files, 1, 2) == put(files, 3) == 0
        assert len(names(tmp_path)) == 1
        monkeypatch.setattr(os, "preadv", fail)
        assert get(files, 0) == get(files, 0) == 0
    assert caplog.text.count("cannot write files") == 1
    assert caplog.text.count("cannot read files") == 1
    assert errno.errorcode[code] in caplog.text
    monkeypatch.setattr(os, "preadv", preadv)
    broken.clear()
    assert put(files, 1, 2) == 0  # not at once
    clock = time.monotonic() + page_files.RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    assert put(files, 1, 2) and get(files, 1, 2) == 2


def test_a_write_that_began_before_an_error_does_not_end_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = store(tmp_path)
    write_file = files._write_file
    outcomes = iter([False, True, False])  # of three threads' writes, each begun within the former

    def write(name: str, parts: Sequence[memoryview]) -> None:
        good = next(outcomes)
        if (index := begin.pop()) < 3:
            put(files, index)
        if not good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(name, parts)

    begin = [3, 2, 1]
    monkeypatch.setattr(files, "_write_file", write)
    with caplog.at_level(logging.WARNING):
        assert put(files, 0) == 0
    assert caplog.text.count("cannot write files") == 1
    assert len(names(tmp_path)) == 1


WRITER = """
import sys
from pathlib import Path
from minisgl.tiers.disk.page_files import PageFiles
files = PageFiles(Path(sys.argv[1]), bytes(range(32)), 1000, int(sys.argv[2]))
data = [memoryview(bytes([i, 255 - i]) * 500) for i in range(100)]
round = 0
while True:
    for start in range(0, 100, 10):
        keys = [bytes([i]) * 32 for i in range(start, start + 10)]
        files.write(keys, data[start : start + 10])
        into = [memoryview(bytearray(1000)) for _ in keys]
        count = files.read(keys, into)
        assert all(into[i] == data[start + i] for i in range(count)), "a wrong page"
    if not round:
        print("ready", flush=True)
    round += 1
"""


def test_processes_that_are_killed_while_they_write_leave_only_whole_files(tmp_path: Path) -> None:
    """Three of them, which write, read and evict at once."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), "200000"]
    writers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        files = store(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            found = 0
            while not found and all(writer.poll() is None for writer in writers):
                # They evict all the time.
                files.refresh()
                found = sum(pool.map(lambda index: get(files, index), range(100)))
    finally:
        for writer in writers:
            writer.kill()
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, errors
        assert not errors
    assert found
    after = store(tmp_path, max_bytes=200_000)
    assert sum(get(after, index) for index in range(100))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3 * 200_000
    assert not [name for name in names(tmp_path) if "damaged" in name]


def test_a_folder_is_made_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "kv"
    config: Any = SimpleNamespace(disk_cache=str(folder))
    check_folder(config)
    assert folder.stat().st_mode & 0o777 == 0o700
    check_folder(config)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        check_folder(config)
    folder.chmod(0o700)
    with monkeypatch.context() as read_only:  # as of a file system; root may write all others
        read_only.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
        with pytest.raises(ConfigError, match="no files can be made in it"):
            check_folder(config)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user"):
        check_folder(config)
    (tmp_path / "file").write_text("")
    config.disk_cache = str(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        check_folder(config)
