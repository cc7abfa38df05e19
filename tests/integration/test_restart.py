"""The whole engine with a disk behind its host tier, started twice: the tokens are those of
transformers, and the second engine finds what the first has computed."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cache_kinds import (
    FEW,
    FULL,
    LENGTHS,
    NUM_SHARED,
    STATE_CACHE,
    STATES,
    WINDOWED,
    case_of,
)
from support.fp8_kv import fp8_case
from support.killed_engines import killed_while_writing
from support.parity import Case, batch, complete, count_excused, greedy, load_engine
from support.slow_lanes import SlowLane
from support.tensor_parallel import EVERYTHING, short_case_of, shortened

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine, startup
from minisgl.errors import ConfigError
from minisgl.kvcache.copies import LoadRule
from minisgl.runner import load
from minisgl.tiers.disk.page_files import PageFiles
from minisgl.tiers.tiers import Tiers

HOST_GB = 0.01


@pytest.fixture(autouse=True)
def reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model as small as these they never do."""
    monkeypatch.setattr(Tiers, "measure_disk", lambda self, host: LoadRule(0.0, 1.0))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Tiers", functools.partial(Tiers, make_lane=SlowLane))


def serve(case: Case, folder: Path, rounds: int = 1, *, alone: bool = False, **options: Any) -> int:
    """Runs the case's prompts on an engine of its own, together or each alone; returns the prompt
    tokens from disk."""

    async def run() -> int:
        everything = {**EVERYTHING, "host_cache": HOST_GB, "disk_cache": str(folder), **options}
        async with AsyncEngine(load_engine(case.folder, **everything)) as engine:
            for _ in range(rounds):
                params = [greedy(len(run.token_ids)) for run in case.runs]
                jobs = [*zip(case.prompts, params, strict=True)]
                if alone:
                    outputs = [await complete(engine, *job) for job in jobs]
                else:
                    outputs = await batch(engine, case.prompts, params)
                await count_excused(engine, case, outputs)
                engine.audit()
            counters = engine.stats().counters
            assert counters.num_host_tokens + counters.num_disk_tokens <= counters.num_cached_tokens
            return counters.num_disk_tokens

    return asyncio.run(run())


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("name", ["llama3", "glm-flash"])
def test_a_restarted_engine_finds_its_prefixes(name: str, tmp_path: Path) -> None:
    case, folder = short_case_of(name), tmp_path / "kv"
    assert serve(case, folder) == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(folder))
    written = files(folder)
    assert serve(case, folder) > 0
    assert set(written) <= set(files(folder))
    # One that keeps nothing in memory for long takes it from there, too.
    page_gb = load_engine(case.folder).model.kv_bytes_per_token("float32") * 4e-9
    assert serve(case, folder, rounds=2, host_cache=20 * page_gb) > 0
    assert serve(case, folder, page_size=8, num_pages=16) == 0  # other pages


@pytest.mark.usefixtures("slow")
def test_pages_in_fp8_on_slow_lanes_outlive_the_engine(tmp_path: Path) -> None:
    case = shortened(fp8_case("llama3", scaled=True))
    assert serve(case, tmp_path) == 0
    assert serve(case, tmp_path) > 0


@pytest.mark.parametrize("option", ["tp", "pp"])
def test_each_of_two_ranks_finds_its_part(option: str, tmp_path: Path) -> None:
    case = short_case_of("llama3")
    assert serve(case, tmp_path, **{option: 2}) == 0
    assert serve(case, tmp_path, **{option: 2}) > 0
    assert len({file.name[:32] for file in files(tmp_path)}) == 2


def test_another_checkpoint_of_the_same_sizes_finds_nothing(tmp_path: Path) -> None:
    """As after a fine-tune that took the place of its base."""
    case, folder = short_case_of("llama3"), tmp_path / "kv"
    copy = dataclasses.replace(case, folder=tmp_path / "model")
    shutil.copytree(case.folder, copy.folder)
    assert serve(copy, folder) == 0
    (path,) = copy.folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # in the last tensor, and almost nothing
    path.write_bytes(content)
    assert serve(copy, folder) == 0
    shutil.copy(case.folder / path.name, path)
    assert serve(copy, folder) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_an_unfit_folder_is_refused_before_weights_are_read(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for read in ("load_runner", "load_ranks"):
        monkeypatch.setattr(startup, read, lambda *spec: pytest.fail("weights are read"))
    options = EngineConfig(device="cpu", tp=tp, host_cache=HOST_GB, disk_cache=str(tmp_path))
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="it holds what prompts leave"):
        startup.load(options)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the folder cannot be used"):
        startup.load(dataclasses.replace(options, disk_cache=str(tmp_path / "file")))


def test_damaged_files_change_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = short_case_of("llama3")
    serve(case, tmp_path)
    for place, file in enumerate(files(tmp_path)):
        content = bytearray(file.read_bytes())
        content[-1 - place] ^= 1
        file.write_bytes(content)
    damaged = files(tmp_path)
    with caplog.at_level(logging.WARNING):
        serve(case, tmp_path)
    assert "damaged" in caplog.text
    assert not set(damaged) <= set(files(tmp_path))


# Number of files with a part of what the prompts of a small model leave in some 27, 77 and 51.
PART = {FULL: 15, WINDOWED: 55, STATES: 40}
# The tokens of which the disk has pages once all prompts were asked: of each up to its last page.
ALL = sum((length - 1) // 4 * 4 for length in LENGTHS) - (len(LENGTHS) - 1) * NUM_SHARED


def of_kind(kind: str) -> tuple[Case, dict[str, Any]]:
    """A small model, and options with which it gives pages up and takes snapshots."""
    sizes: dict[str, Any] = {"num_pages": 60, "max_running_requests": 4, "alone": True}
    return case_of(kind), FEW | sizes | (STATE_CACHE if kind == STATES else {})


@pytest.mark.parametrize("kind", [WINDOWED, STATES])
def test_damaged_files_of_windows_or_states_change_no_token(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, options = of_kind(kind)
    serve(case, tmp_path, **options)
    for file in files(tmp_path)[::2]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert serve(case, tmp_path, **options) < ALL
    assert "damaged" in caplog.text


@pytest.mark.parametrize("kind", PART)
def test_an_engine_that_is_killed_while_it_writes_leaves_what_is_whole(
    kind: str, tmp_path: Path
) -> None:
    case, options = of_kind(kind)
    given = {**EVERYTHING, "host_cache": HOST_GB, "disk_cache": str(tmp_path), **options}
    given.pop("alone")
    killed_while_writing(case, PART[kind], given)
    assert ".part" in {file.suffix for file in files(tmp_path)}
    assert 0 < serve(case, tmp_path, **options) < ALL
    assert serve(case, tmp_path, **options) == ALL


@pytest.mark.parametrize("kind", PART)
def test_a_disk_that_is_full_keeps_what_it_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case, options = of_kind(kind)
    write_file, left = PageFiles._write_file, [*range(PART[kind])]

    def write(self: PageFiles, name: str, parts: Sequence[memoryview]) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        write_file(self, name, parts)

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(PageFiles, "_write_file", write)
        assert serve(case, tmp_path, **options) == 0
    assert caplog.text.count("The disk cache cannot write files") == 1
    assert len(files(tmp_path)) == PART[kind]
    assert 0 < serve(case, tmp_path, **options) < ALL
    assert serve(case, tmp_path, **options) == ALL


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_is_one_line_in_the_log(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = short_case_of("llama3")

    def refuse(self: PageFiles, name: str, parts: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(PageFiles, "_write_file", refuse)
    with caplog.at_level(logging.WARNING):
        assert serve(case, tmp_path, rounds=2) == 0
    assert caplog.text.count("The disk cache cannot write files") == 1
    assert errno.errorcode[code] in caplog.text and not files(tmp_path)
