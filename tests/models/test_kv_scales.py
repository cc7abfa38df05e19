"""The scales of an FP8 KV cache: every name under which they occur, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import Spec, make_checkpoint, spec_named
from support.fp8_kv import add_tensors
from support.parity import load_engine
from torch import Tensor

from minisgl.config import UNSCALED, AttentionSpec, KVScales
from minisgl.errors import CheckpointError, MinisglError, UnsupportedModelError
from minisgl.models import kv_scales
from minisgl.models.hub import SINGLE_FILE, safetensors_files
from minisgl.models.kv_scales import is_kv_scale, with_kv_scales
from minisgl.models.registry import read_model_config

HYBRID = Spec("hybrid", "Qwen3_5ForCausalLM", num_layers=2, extra={"full_attention_interval": 2})
ATTN = "model.layers.{}.self_attn."
# Of k and of v: the same name where one scale serves both.
NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(spec_named("llama"), tmp_path / "checkpoint")


def scales_of(folder: Path) -> tuple[KVScales, ...] | None:
    return with_kv_scales(read_model_config(folder), folder).kv_scales


def of_both_layers(
    names: tuple[str, str] = NAMES[0], make: Callable[[float], Tensor] = torch.tensor
) -> dict[str, Tensor]:
    return {
        ATTN.format(layer) + name: make(0.5 + layer + (name == names[1]) / 8)
        for layer in range(2)
        for name in names
    }


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_every_name_is_read_and_no_weight(names: tuple[str, str], folder: Path) -> None:
    add_tensors(folder, of_both_layers(names))
    k = 0.625 if names[0] == names[1] else 0.5
    assert scales_of(folder) == (KVScales(k, 0.625), KVScales(k + 1, 1.625))
    engine = load_engine(folder)
    assert engine.config.kv_dtype == "float8_e4m3fn"
    assert [layer.scales for layer in engine.runner._computation.states] == list(
        scales_of(folder) or ()
    )
    assert load_engine(folder, kv_cache_dtype="model").config.kv_dtype == "float32"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_scales_of_the_text_part_of_a_model_that_sees(prefix: str, folder: Path) -> None:
    stored = of_both_layers().items()
    add_tensors(folder, {prefix + name.removeprefix("model."): scale for name, scale in stored})
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were opened, in order."""
    names: list[str] = []

    def counting(file: Path, **options: Any) -> Any:
        names.append(file.name)
        return safe_open(file, **options)

    monkeypatch.setattr(kv_scales, "safe_open", counting)
    return names


def test_the_index_says_which_files_are_opened(folder: Path, opened: list[str]) -> None:
    keys, values = ({n: t for n, t in of_both_layers().items() if kind in n} for kind in "kv")
    add_tensors(add_tensors(folder, keys, "some"), values, "more")
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))
    assert opened == ["some.safetensors", "more.safetensors"]
    # Of no file of the checkpoint, as copies of the weights in another layout are.
    save_file({ATTN.format(0) + "k_scale": torch.tensor(7.0)}, folder / "consolidated.safetensors")
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))


def test_without_scales_in_the_index_no_file_is_opened(tmp_path: Path, opened: list[str]) -> None:
    folder = make_checkpoint(replace(spec_named("llama"), sharded=True), tmp_path)
    assert len(safetensors_files(folder)) > 3
    assert scales_of(folder) is None
    assert opened == []


def test_an_index_may_name_scales_that_are_nowhere(folder: Path) -> None:
    add_tensors(folder, of_both_layers())
    save_file({"other": torch.zeros(1)}, folder / "scales.safetensors")
    with pytest.raises(CheckpointError, match=r"scales\.safetensors cannot be read: .*k_scale"):
        scales_of(folder)


def test_without_an_index_the_header_says_what_the_file_has(
    tmp_path: Path, opened: list[str]
) -> None:
    folder = make_checkpoint(replace(spec_named("llama"), sharded=False), tmp_path)
    file = folder / SINGLE_FILE
    assert scales_of(folder) is None
    save_file(load_file(file) | of_both_layers(), file, {"format": "pt"})
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))
    assert opened == [SINGLE_FILE] * 2


def test_layers_that_keep_a_state_have_no_scales(tmp_path: Path) -> None:
    folder = make_checkpoint(HYBRID, tmp_path)
    layers = read_model_config(folder).facts().layers
    attends = [isinstance(spec, AttentionSpec) for spec in layers]
    assert len(set(attends)) == 2
    names = [ATTN.format(i) + f"{kind}_scale" for i in range(len(layers)) for kind in "kv"]
    scales = {name: torch.tensor(0.5) for name in names if attends[int(name.split(".")[2])]}
    add_tensors(folder, scales)
    assert scales_of(folder) == tuple(KVScales(0.5, 0.5) if own else UNSCALED for own in attends)
    scales.popitem()
    add_tensors(folder, scales)
    with pytest.raises(CheckpointError, match=r"lacks layers\.\d+\.self_attn\.v_scale"):
        scales_of(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_scale_is_a_number_or_a_list_of_one(dtype: torch.dtype, folder: Path) -> None:
    add_tensors(folder, of_both_layers(make=lambda value: torch.tensor([value], dtype=dtype)))
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))


def test_without_scales_the_cache_stays_as_it_is(folder: Path) -> None:
    assert scales_of(folder) is None
    assert load_engine(folder).config.kv_dtype == "float32"


def test_scales_of_queries_are_left_alone(folder: Path) -> None:
    queries = {ATTN.format(layer) + "q_scale": torch.ones(4, 1) for layer in range(2)}
    add_tensors(folder, of_both_layers() | queries)
    assert scales_of(folder) == (KVScales(0.5, 0.625), KVScales(1.5, 1.625))
    load_engine(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 0.0, 2.0**-127])
def test_a_scale_that_is_no_positive_number(value: float, folder: Path) -> None:
    name = ATTN.format(1) + "v_scale"
    file = folder / "scales.safetensors"
    add_tensors(folder, of_both_layers() | {name: torch.tensor(value)})
    with pytest.raises(CheckpointError, match=rf"{file}: {name} is {value:g}; .*above 0"):
        load_engine(folder)
    load_engine(folder, kv_cache_dtype="model")


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2, 1)], ids=str)
def test_scales_per_head_are_refused_by_name(shape: tuple[int, ...], folder: Path) -> None:
    name = ATTN.format(0) + "k_scale"
    add_tensors(folder, of_both_layers() | {name: torch.ones(shape)})
    with pytest.raises(UnsupportedModelError, match=rf"{name} has the shape \[.*2.*\]: .*per head"):
        load_engine(folder)
    load_engine(folder, kv_cache_dtype="model")


@pytest.mark.parametrize(
    "stored", [torch.ones(1, 1), torch.ones(0), torch.ones((), dtype=torch.int32)]
)
def test_a_scale_of_another_shape_or_dtype(stored: Tensor, folder: Path) -> None:
    name = ATTN.format(0) + "k_scale"
    add_tensors(folder, of_both_layers() | {name: stored})
    with pytest.raises(CheckpointError, match=rf"{name} is .* of the shape .*; expected F32"):
        load_engine(folder)


@pytest.mark.parametrize(
    "missing", ["model.layers.1.self_attn.v_scale", "model.layers.0.self_attn.k_scale"]
)
def test_a_missing_scale_is_named(missing: str, folder: Path) -> None:
    tensors = of_both_layers()
    del tensors[missing]
    add_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=f"lacks {missing.removeprefix('model.')}"):
        load_engine(folder)


def test_scales_that_contradict_each_other_or_have_no_layer(folder: Path) -> None:
    add_tensors(folder, of_both_layers())
    add_tensors(folder, {ATTN.format(0) + "kv_scale": torch.tensor(0.5)}, "others")
    with pytest.raises(CheckpointError, match="one contradicts the other"):
        load_engine(folder)
    add_tensors(folder, {ATTN.format(2) + "k_scale": torch.tensor(0.5)}, "others")
    with pytest.raises(CheckpointError, match=r"layers\.2\..* it has 2"):
        load_engine(folder)


def test_scales_of_layers_that_draft_are_left_aside(tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named("glm-flash"), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    names = [ATTN.format(layer) + f"{kind}_scale" for layer in range(4) for kind in "kv"]
    add_tensors(folder, {name: torch.tensor(0.5) for name in names})
    assert scales_of(folder) == (KVScales(0.5, 0.5),) * 3
    add_tensors(folder, {ATTN.format(4) + "k_scale": torch.tensor(0.5)}, "others")
    with pytest.raises(CheckpointError, match=r"layers\.4\..* it has 3"):
        scales_of(folder)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"strategy": "attn_head"}, "strategy 'attn_head'"),
        ({"num_bits": 4}, "num_bits 4"),
        ({"type": "int"}, "type 'int'"),
        ({"dynamic": True}, "dynamic True"),
        ({"symmetric": False}, "symmetric False"),
    ],
)
def test_other_formats_of_kv_caches_are_refused_by_name(
    scheme: dict[str, Any], said: str, folder: Path
) -> None:
    config = read_model_config(folder)
    path = folder / "config.json"
    fp8 = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    for kv_cache_scheme in (None, fp8, "static", "FP8"):
        quantization = {"quantization_config": {"kv_cache_scheme": kv_cache_scheme}}
        path.write_text(json.dumps(json.loads(path.read_text()) | quantization))
        assert with_kv_scales(config, folder) == config
    quantization = {"quantization_config": {"kv_cache_scheme": fp8 | scheme}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantization))
    with pytest.raises(UnsupportedModelError, match=f"kv_cache_scheme: {said} is not supported"):
        with_kv_scales(config, folder)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_the_scheme_is_read_from_either_field(field: str, folder: Path) -> None:
    path, config = folder / "config.json", read_model_config(folder)
    written = json.loads(path.read_text())
    int8 = {"num_bits": 8, "type": "int"}
    for scheme, said in ((int8, "type 'int' is not"), ("dynamic", "is 'dynamic'; expected .*'sta")):
        path.write_text(json.dumps(written | {field: {"kv_cache_scheme": scheme}}))
        with pytest.raises(MinisglError, match=f"{field}: kv_cache_scheme:? {said}"):
            with_kv_scales(config, folder)


def test_no_weight_passes_for_a_scale() -> None:
    for name in ("self_attn.k_proj.weight", "self_attn.k_proj.weight_scale", "mlp.k_scale"):
        assert not is_kv_scale(f"layers.0.{name}")
    assert not is_kv_scale("layers.0.self_attn.k_proj.v_scale")
