"""Fingerprints of checkpoints, and of the form in which their KV is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.config import EngineConfig, ResolvedConfig, resolve
from minisgl.errors import CheckpointError
from minisgl.models.config import ModelConfig
from minisgl.models.fingerprint import weights_fingerprint
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.runner.model_fingerprint import model_fingerprint

SIZE = 3_000_000  # bytes of the largest tensor: more than the samples cover


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


def test_a_broken_header_is_a_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="cannot be read"):
        weights_fingerprint(tmp_path)


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
        return model_fingerprint(config, model, folder)

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
        of(dataclasses.replace(options(), tp=2)),
        of(dataclasses.replace(options(), device="cuda")),
    ]
    assert len(set(found)) >= len(found) - 1  # one of the dtypes is the model's own
    assert of() == of(options(max_running_requests=7, num_pages=99), model)
    assert of(options(load_format="dummy")) == of(options(load_format="dummy"), folder=folders[1])
