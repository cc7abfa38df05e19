"""Loading weights: which files are read, what becomes of their tensors, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, spec_named

from minisgl.errors import (
    CheckpointError,
)
from minisgl.models.hub import safetensors_files
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config


def load(
    folder: Path, dtype: torch.dtype = torch.float32, layers: range | None = None
) -> torch.nn.Module:
    return load_model(
        read_model_config(folder),
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=16,
        layers=layers,
    )


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(spec_named("qwen3"), tmp_path)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_checkpoint(dataclasses.replace(spec_named("qwen3"), sharded=False), tmp_path)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_merged_weights_are_the_concatenated_parts(single: Path) -> None:
    model = load(single)
    tensors = load_file(single / "model.safetensors")
    for merged, parts in (
        (
            "layers.1.self_attn.qkv_proj",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        ("layers.2.mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        layer = f"model.layers.{merged.split('.')[1]}"
        expected = torch.cat([tensors[f"{layer}.{part}.weight"] for part in parts])
        assert torch.equal(model.get_parameter(f"{merged}.weight"), expected)
    assert not any(weight.requires_grad for weight in model.parameters())


def test_weights_are_cast_while_loading(single: Path) -> None:
    half = load(single, torch.bfloat16)
    for name, weight in load(single).named_parameters():
        assert torch.equal(half.get_parameter(name), weight.bfloat16())
    assert half.rotary_tables[0].dtype == torch.float32


def test_each_stage_checks_its_own_tensors_and_those_of_no_stage(single: Path) -> None:
    first, last = range(2), range(2, 3)
    own = "model.layers.1.mlp.up_proj.weight"
    edit(single, lambda tensors: tensors.pop(own))
    with pytest.raises(CheckpointError, match=r"lacks weights: layers\.1\.mlp\.up_proj\.weight"):
        load(single, layers=first)
    load(single, layers=last)
    edit(single, lambda tensors: tensors.update({"model.layers.2.oh": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"does not take: model\.layers\.2\.oh"):
        load(single, layers=last)
    edit(single, lambda tensors: tensors.update({"model.layers.3.oh": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"does not take: model\.layers\.3\.oh"):
        load(single, layers=first)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    first, *_, last = safetensors_files(sharded)
    assert first.name < last.name
    last.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {last.name}"):
        load(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="weight_map"):
        load(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../weights.safetensors",
        "below/weights.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "below\\weights.safetensors",
        "a\0b",
        None,
        7,
        ["x"],
    ],
)
def test_weights_outside_of_the_model_folder_are_not_read(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    for place in (tmp_path, folder / "below"):
        save_file({"w": torch.ones(1)}, place / "weights.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        safetensors_files(folder)


def test_weights_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blobs" / "abc", tmp_path / "snapshots" / "def"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(1)}, blob)
    shard = folder / "model-00001-of-00001.safetensors"
    shard.symlink_to("../../blobs/abc")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": shard.name}}))
    assert safetensors_files(folder) == [shard]


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(single)


def test_a_truncated_weights_file_is_named(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(single)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second, *_ = safetensors_files(sharded)
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(CheckpointError, match="twice"):
        load(sharded)


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"lacks weights: layers\.1\.self_attn\.q_norm\.weight\."),
        (lambda t: t.update({NORM: torch.ones(3)}), r"\[3\]; the config asks for \[128\]"),
        (
            lambda t: t.update({NORM: torch.ones(128, dtype=torch.int16)}),
            r"q_norm\.weight has the dtype I16; expected F32",
        ),
        (lambda t: t.update(surplus=torch.ones(3)), r"does not take: surplus \(F32\)"),
        (lambda t: t.update({f"x{i}": torch.ones(1) for i in range(9)}), "and 5 more"),
        (lambda t: t.update({"lm_head.weight": torch.ones(499, 128)}), "lm_head.* differs"),
    ],
)
def test_missing_extra_and_misshapen_weights_are_refused(
    single: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    edit(single, change)
    with pytest.raises(CheckpointError, match=message):
        load(single)


def test_known_redundant_tensors_are_ignored(single: Path) -> None:
    expected = load(single)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(64)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(single, add)
    for name, weight in load(single).named_parameters():
        assert torch.equal(weight, expected.get_parameter(name))


def test_a_missing_untied_lm_head_is_refused(tmp_path: Path) -> None:
    make_checkpoint(spec_named("llama"), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks weights: lm_head\.weight"):
        load(tmp_path)
