"""gpt-oss: its logits and tokens against transformers, mistakes that these show, and its config."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import MODELS
from safetensors.torch import load_file, save_file
from support.checkpoints import TOLERANCE, Case, make_case, spec_named
from support.native_models import load_native, logits_error
from support.parity import FEW_PAGES, case_of, check
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.config import ModelFacts
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.moe.reference import Clamped
from minisgl.models.config import NativeConfig
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

GROSS = 1000 * TOLERANCE


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(spec_named("gpt-oss"), tmp_path_factory.mktemp("gpt-oss"))


def config_of(folder: Path) -> NativeConfig:
    config = read_model_config(folder)
    assert isinstance(config, NativeConfig)
    return config


def load(folder: Path, config: NativeConfig | None = None) -> CausalLM:
    return load_native(CausalLM, config or config_of(folder), folder)


def error(case: Case, model: CausalLM, *, page_size: int = 16, **cut: int) -> float:
    config = config_of(case.folder)
    return logits_error(case, model, config, page_size=page_size, **cut)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({}, id="whole"),
        pytest.param({"chunk": 7}, id="chunks"),
        pytest.param({"prefill": 61, "chunk": 20}, id="prompt-then-decode"),
    ],
)
def test_logits_match_transformers(case: Case, page_size: int, cut: Mapping[str, int]) -> None:
    assert error(case, load(case.folder), page_size=page_size, **cut) < TOLERANCE


def test_ranks_with_cached_prefixes_give_the_tokens_of_transformers() -> None:
    """With one page table; for stages, and ranks that divide requests, see test_window_pages.py."""
    check_with_aborts(short_case_of("gpt-oss"), tp=2)


def test_chunks_and_retraction_change_no_token() -> None:
    check(case_of("gpt-oss"), **FEW_PAGES, max_prefill_length=7)


# -- mistakes -------------------------------------------------------------------------------------


def _in_config(**changes: Any) -> Callable[[NativeConfig], NativeConfig]:
    return lambda config: dataclasses.replace(config, **changes)


def _experts(**changes: Any) -> Callable[[NativeConfig], NativeConfig]:
    def change(config: NativeConfig) -> NativeConfig:
        assert config.experts is not None
        return dataclasses.replace(config, experts=dataclasses.replace(config.experts, **changes))

    return change


def _rope(**changes: Any) -> Callable[[NativeConfig], NativeConfig]:
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, **changes)
    )


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(_in_config(windows=(None, None, None)), id="no-window"),
        pytest.param(_in_config(windows=(21, None, 21)), id="a-longer-window"),
        pytest.param(_in_config(windows=(None, 20, None)), id="the-other-layers"),
        pytest.param(_experts(clamped=None), id="silu"),
        pytest.param(_experts(clamped=Clamped(limit=7.0, alpha=1.702)), id="limit"),
        pytest.param(_experts(clamped=Clamped(limit=1.5, alpha=1.0)), id="alpha"),
        pytest.param(_experts(normalize=False), id="softmax-of-all"),
        pytest.param(_rope(truncate=True), id="truncated-yarn"),
        pytest.param(_rope(attention_factor=1.0), id="no-attention-factor"),
    ],
)
def test_a_wrong_config_is_detected(
    case: Case, mistake: Callable[[NativeConfig], NativeConfig]
) -> None:
    assert error(case, load(case.folder, mistake(config_of(case.folder)))) > GROSS


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.sinks",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.bias",
        "mlp.gate.bias",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
    ],
)
def test_a_tensor_that_is_left_out_is_detected(case: Case, name: str) -> None:
    model = load(case.folder)
    for layer in model.layers.values():
        layer.get_parameter(name).zero_()
    assert error(case, model) > GROSS


def test_gates_and_ups_that_are_not_in_turn_are_detected(case: Case) -> None:
    model = load(case.folder)
    for layer in model.layers.values():
        for kind in ("gate_up_proj", "gate_up_proj_bias"):
            weight = layer.get_parameter(f"mlp.experts.{kind}")
            gates, ups = weight.clone().chunk(2, dim=1)
            weight.copy_(torch.stack((gates, ups), dim=2).flatten(1, 2))
    assert error(case, model) > GROSS


# -- the checkpoint -------------------------------------------------------------------------------


def test_every_tensor_of_the_experts_is_needed_and_no_other(case: Case, tmp_path: Path) -> None:
    [file] = case.folder.glob("*.safetensors")
    weights = load_file(file)
    for kind in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        name = f"layers.1.mlp.experts.{kind}"
        _write(case.folder, tmp_path, {k: v for k, v in weights.items() if not k.endswith(name)})
        with pytest.raises(CheckpointError, match=f"lacks weights: {name}"):
            load(tmp_path)
    more = {"model.layers.1.mlp.experts.1.up_proj.weight": torch.zeros(1)}
    _write(case.folder, tmp_path, weights | more)
    with pytest.raises(CheckpointError, match="does not take"):
        load(tmp_path)


def _write(source: Path, target: Path, weights: dict[str, torch.Tensor]) -> None:
    shutil.copy(source / "config.json", target)
    save_file(weights, target / "model.safetensors", {"format": "pt"})


# -- the config -----------------------------------------------------------------------------------


def read(folder: Path, **changes: Any) -> NativeConfig:
    kinds = ["sliding_attention", "full_attention"] * 12
    values = MODELS["gpt-oss-20b"] | {"layer_types": kinds} | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    return config_of(folder)


def test_the_published_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.windows == (128, None) * 12 and config.sinks
    assert config.qkv_bias and config.o_bias and config.dtype == "bfloat16"
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_chosen) == (32, 4)
    assert config.experts.clamped == Clamped(limit=7.0, alpha=1.702)
    assert config.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert not config.rope.truncate and config.rope.theta == 150_000
    facts: ModelFacts = config.facts()
    assert facts.attention[0].extras() == ("sliding windows", "attention sinks")
    assert all(map(facts.can_divide, (1, 2, 4, 8)))


def test_what_the_config_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    whole = read(tmp_path)
    short = read(
        tmp_path,
        rope_scaling=None,
        layer_types=None,
        swiglu_limit=None,
        attention_bias=None,
    )
    assert short == whole


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 33}, CheckpointError, "33 experts for each token"),
        ({"swiglu_limit": 0}, CheckpointError, "swiglu_limit is 0"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, **changes)
