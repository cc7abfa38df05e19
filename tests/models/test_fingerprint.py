"""Fingerprints of checkpoints, and of the form in which their KV is kept."""

from __future__ import annotations

import dataclasses
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.config import EngineConfig, ResolvedConfig, resolve
from minisgl.errors import CheckpointError
from minisgl.models import fingerprint
from minisgl.models.config import ModelConfig
from minisgl.models.fingerprint import weights_fingerprint
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.runner.setup import Setup

SIZE = 3_000_000  # bytes of a tensor


@pytest.fixture(autouse=True)
def own_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(folder: Path, **changes: tuple[int, int]) -> Path:
    """changes: for a tensor, the slice of it that differs."""
    folder.mkdir()
    tensors = {
        "a.weight": torch.arange(SIZE, dtype=torch.int64).to(torch.uint8),
        "b.weight": torch.ones(SIZE, dtype=torch.uint8),
        "k_scale": torch.tensor(0.5),
    }
    for name, (start, end) in changes.items():
        tensors[name.replace("_weight", ".weight")].view(-1)[start:end] += 1
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_checkpoints_of_the_same_sizes_differ(tmp_path: Path) -> None:
    same = [weights_fingerprint(checkpoint(tmp_path / name)) for name in "ab"]
    assert same[0] == same[1]
    changed = [
        checkpoint(tmp_path / "c", a_weight=(SIZE // 2, SIZE // 2 + 1)),
        checkpoint(tmp_path / "d", b_weight=(SIZE // 2 - 10, SIZE // 2 + 10)),
        checkpoint(tmp_path / "e", a_weight=(0, 1)),
        checkpoint(tmp_path / "f", k_scale=(0, 1)),
    ]
    found = {same[0], *map(weights_fingerprint, changed)}
    assert len(found) == 1 + len(changed)


def test_any_byte_counts_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 1 << 20)
    place = checkpoint(tmp_path / "a") / "model.safetensors"
    data = place.read_bytes()
    found = {weights_fingerprint(tmp_path / "a")}
    for at in range(0, len(data), 700_001):
        place.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found.add(weights_fingerprint(tmp_path / "a"))
    assert len(found) == 1 + len(range(0, len(data), 700_001))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been read, in a world where no file has changed in the last seconds."""
    files: list[Path] = []
    hash = fingerprint._hash
    monkeypatch.setattr(
        fingerprint, "_hash", lambda path, size: files.append(path) or hash(path, size)
    )
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(1 << 60))
    return files


def test_a_file_is_read_once_and_again_when_it_was_written(
    tmp_path: Path, hashed: list[Path]
) -> None:
    place = checkpoint(tmp_path / "a") / "model.safetensors"
    first = weights_fingerprint(tmp_path / "a")
    assert weights_fingerprint(tmp_path / "a") == first
    assert hashed == [place]
    stat = place.stat()
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as copies keep it
    assert weights_fingerprint(tmp_path / "a") != first
    assert hashed == [place, place]


def test_a_digest_of_a_file_that_has_just_changed_is_not_kept(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 1 << 60)
    place = checkpoint(tmp_path / "a") / "model.safetensors"
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "a")
    assert hashed == [place, place]


def test_of_several_ranks_one_reads_a_file(tmp_path: Path, hashed: list[Path]) -> None:
    checkpoint(tmp_path / "a")
    with ThreadPoolExecutor(4) as ranks:
        found = set(ranks.map(weights_fingerprint, [tmp_path / "a"] * 4))
    assert len(found) == len(hashed) == 1


def test_without_a_folder_for_digests_the_file_is_read_each_time(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "a")
    first = weights_fingerprint(tmp_path / "a")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "a") == first
    assert len(hashed) == 3


def test_where_the_disk_for_digests_is_full_the_file_is_read_each_time(
    tmp_path: Path, hashed: list[Path]
) -> None:
    place = checkpoint(tmp_path / "a") / "model.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow
    try:
        first, second = weights_fingerprint(tmp_path / "a"), weights_fingerprint(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert hashed == [place, place]
    assert first == second == weights_fingerprint(tmp_path / "a")
    weights_fingerprint(tmp_path / "a")
    assert len(hashed) == 3


def test_a_user_without_a_home_reads_the_file_each_time(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user")
    checkpoint(tmp_path / "a")
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "a")
    assert len(hashed) == 2


def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = checkpoint(tmp_path / "a") / "model.safetensors"
    hash = fingerprint._hash

    def grow(path: Path, size: int) -> bytes:
        found = hash(path, size)
        with path.open("ab") as file:
            file.write(b"x")
        return found

    monkeypatch.setattr(fingerprint, "_hash", grow)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        weights_fingerprint(tmp_path / "a")
    monkeypatch.undo()
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", place.stat().st_size + 1)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        fingerprint._hash(place, place.stat().st_size + 1)


def options(**given: object) -> ResolvedConfig:
    facts = read_model_config(DEMO_FOLDER).facts()
    config = EngineConfig(device="cpu", **given)  # type: ignore[arg-type]
    return resolve(config, facts, device_facts(facts), overlap=True)


def test_what_the_numbers_depend_on_is_in_the_fingerprint(tmp_path: Path) -> None:
    model = read_model_config(DEMO_FOLDER)
    folders = [checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", a_weight=(0, 9))]

    plain = options()

    def of(
        config: ResolvedConfig = plain, model: ModelConfig = model, folder: Path = folders[0]
    ) -> bytes:
        return Setup(config, model, folder).fingerprint()

    rope = dataclasses.replace(model.rope, type="yarn", factor=2.0)
    found = [
        of(),
        of(folder=folders[1]),
        of(options(dtype="float32")),
        of(options(dtype="bfloat16")),
        of(options(page_size=32)),
        of(options(load_format="dummy")),
        of(options(kv_cache_dtype="fp8")),
        of(model=dataclasses.replace(model, rope=rope)),
        of(model=model.by_request()),
        of(dataclasses.replace(options(), tp=2)),
        of(dataclasses.replace(options(), device="cuda")),
    ]
    assert len(set(found)) >= len(found) - 1  # one of the dtypes is the model's own
    assert of() == of(options(max_running_requests=7, num_pages=99), model)
    assert of(options(load_format="dummy")) == of(options(load_format="dummy"), folder=folders[1])
