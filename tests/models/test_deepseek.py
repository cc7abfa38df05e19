"""Attention over latents (DeepSeek-V2, V3, GLM-4.7-Flash): logits and tokens against transformers,
mistakes that these show, and configs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import MODELS
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    LATENT_SPECS,
    TOLERANCE,
    Case,
    load_reference,
    make_case,
    reference_logits,
    relative_error,
    spec_named,
)
from support.native_models import load_native, logits_error
from support.paged import PagedModel
from support.parity import FEW_PAGES, FOLDER, case_of, check
from support.tensor_parallel import check_with_aborts, short_case_of
from torch import Tensor
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention

from minisgl.attention.state import PagedKV
from minisgl.config import FP8, AttentionSpec
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.elementwise import latents
from minisgl.kernels.moe import grouped, reference
from minisgl.kernels.moe.grouped import ByScores, GroupRouting
from minisgl.kernels.moe.reference import Chosen
from minisgl.kernels.residual import Residual, joined
from minisgl.kernels.rows import Rows
from minisgl.layers import grouped_experts
from minisgl.layers.grouped_experts import GroupedMoeBlock
from minisgl.layers.norm import RMSNorm
from minisgl.models.deepseek import GLM, KIMI, V2, V3, LatentConfig
from minisgl.models.formats.fp8 import Fp8Blocks
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

GROSS = 1000 * TOLERANCE
NAMES = [spec.name for spec in LATENT_SPECS]


@cache
def logits_of(name: str) -> Case:
    return make_case(spec_named(name), Path(FOLDER.name) / f"logits-{name}")


def config_of(folder: Path) -> LatentConfig:
    config = read_model_config(folder)
    assert isinstance(config, LatentConfig)
    return config


def load(folder: Path, config: LatentConfig | None = None) -> CausalLM:
    return load_native(CausalLM, config or config_of(folder), folder)


def error(name: str, model: CausalLM | None = None, *, page_size: int = 16, **cut: int) -> float:
    case = logits_of(name)
    model = model or load(case.folder)
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
@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(name: str, page_size: int, cut: Mapping[str, int]) -> None:
    assert error(name, page_size=page_size, **cut) < TOLERANCE


def test_stages_with_cached_prefixes_give_the_tokens_of_transformers() -> None:
    """For ranks see tests/integration/test_layouts.py."""
    check_with_aborts(short_case_of("deepseek-v2-groups"), pp=2)


@pytest.mark.parametrize("name", ["deepseek-v2", "glm-flash"])
def test_chunks_and_retraction_change_no_token(name: str) -> None:
    check(case_of(name), **FEW_PAGES, max_prefill_length=7)


def test_padded_steps_change_no_token() -> None:
    """Those of the shape of a captured one, with pages of one token."""
    check(case_of("glm-flash"), padded=4, page_size=1)


# -- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "saved"), [("DeepSeek-V2-Lite", 8.9), ("GLM-4.7-Flash", 17.8)], ids=str
)
def test_a_token_takes_its_latent_alone(tmp_path: Path, model: str, saved: float) -> None:
    """On every rank, and in fewer bytes than the keys and values of all heads would take."""
    config = read(tmp_path, model)
    facts, sizes = config.facts(), config.sizes
    assert (sizes.rank, sizes.rope_dim) == (512, 64)
    assert facts.kv_bytes_per_token("bfloat16") == config.num_layers * 576 * 2
    assert facts.kv_bytes_per_token(FP8) == config.num_layers * 576
    assert facts.on_rank(4).kv_bytes_per_token("bfloat16") == facts.kv_bytes_per_token("bfloat16")
    expanded = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=sizes.nope_dim + sizes.rope_dim,
        value_dim=sizes.value_dim,
        scale=1.0,
    ).kv("bfloat16")
    share = expanded.bytes_per_token * config.num_layers / facts.kv_bytes_per_token("bfloat16")
    assert share == pytest.approx(saved, abs=0.05)


def test_latents_in_fp8_are_those_that_transformers_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for keys and values, with what is rotated, and the row's own, too. A number at the
    border of two is rounded the other way now and then, which the processor decides; the rows
    behind it differ then, by a fraction of what rounding changes in all."""
    case = logits_of("glm-flash")
    config, reference = config_of(case.folder), load_reference(case.folder)
    expand = Glm4MoeLiteAttention.expand_kv

    def rounding(self: Glm4MoeLiteAttention, latent: Tensor, rotated: Tensor) -> Any:
        rounded = (each.to(torch.float8_e4m3fn).float() for each in (latent, rotated))
        return expand(self, *rounded)

    monkeypatch.setattr(Glm4MoeLiteAttention, "expand_kv", rounding)
    wanted = reference_logits(reference, case.token_ids)
    paged = PagedModel(load(case.folder), config, page_size=16)
    specs = config.facts().kv_specs(FP8)
    assert {spec.bytes_per_token for spec in specs} == {48 + 16}
    empty = paged.kv[0].k.to(torch.float8_e4m3fn)
    paged.kv = [PagedKV.of(spec, empty.clone(), empty) for spec in specs]
    found = paged.run(case.token_ids, prefill=61, chunk=20)
    of_rows = (found - wanted).abs().amax(dim=-1) / wanted.abs().max()
    assert of_rows.quantile(0.25) < TOLERANCE
    assert of_rows.max() < relative_error(found, case.logits) / 8
    assert relative_error(found, case.logits) > GROSS


# -- mistakes -------------------------------------------------------------------------------------


def _routing(**changes: Any) -> Callable[[LatentConfig], LatentConfig]:
    def routed(config: LatentConfig) -> LatentConfig:
        assert config.experts is not None and config.experts.routing is not None
        routing = config.experts.routing._replace(**changes)
        return dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, routing=routing)
        )

    return routed


def _without_mscale(config: LatentConfig) -> LatentConfig:
    width = config.sizes.nope_dim + config.sizes.rope_dim
    assert config.scale != width**-0.5
    return dataclasses.replace(config, scale=width**-0.5)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param("deepseek-v2", _without_mscale, id="no-mscale-v2"),
        pytest.param("deepseek-v3", _without_mscale, id="no-mscale-v3"),
        pytest.param("deepseek-v2-groups", _routing(num_groups=1), id="no-groups-v2"),
        pytest.param("deepseek-v3", _routing(num_groups=1), id="no-groups-v3"),
        pytest.param("deepseek-v2-groups", _routing(factor=1.0), id="no-factor"),
        pytest.param("deepseek-v2-groups", _routing(normalize=True), id="renormalised"),
        pytest.param("glm-flash", _routing(normalize=False), id="not-normalised"),
    ],
)
def test_a_wrong_config_is_detected(
    name: str, mistake: Callable[[LatentConfig], LatentConfig]
) -> None:
    folder = logits_of(name).folder
    model = load(folder, mistake(config_of(folder)))
    assert error(name, model) > GROSS


def _rotated_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_rotations_of_halves_and_two_rotations_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rotate = load(logits_of("deepseek-v3").folder), latents._rotate
    monkeypatch.setattr(latents, "_rotate", _rotated_by_halves)
    assert error("deepseek-v3", model) > GROSS
    monkeypatch.setattr(
        latents, "_rotate", lambda x, cos, sin: rotate(rotate(x, cos, sin), cos, sin)
    )
    assert error("deepseek-v3", model) > GROSS
    monkeypatch.setattr(latents, "_rotate", rotate)
    assert error("deepseek-v3", model) < TOLERANCE


def test_a_bias_in_the_weights_of_experts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(choice: ByScores) -> Chosen:
        logits, routing, bias = choice
        assert bias is not None
        experts, right = grouped.choose_grouped(choice)
        chosen = experts[:, : routing.top_k].long()
        weights = (logits.sigmoid() + bias).gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * routing.factor
        return Chosen(experts, torch.cat((weights, right[:, routing.top_k :]), 1))

    monkeypatch.setattr(reference, "choose", choose)
    assert error("glm-flash") > GROSS


def test_a_shared_expert_with_another_weight_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is one of the experts of a row."""

    def choose(choice: ByScores) -> Chosen:
        experts, weights = grouped.choose_grouped(choice)
        return Chosen(experts, torch.where(experts == choice.logits.shape[1], 1.8, weights))

    monkeypatch.setattr(reference, "choose", choose)
    assert error("glm-flash", chunk=7) > GROSS


@pytest.mark.parametrize("name", ["glm-flash", "deepseek-v3"])
def test_a_shared_expert_is_the_same_beside_the_others_and_among_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(logits_of(name).folder)
    block = next(each for each in model.modules() if isinstance(each, GroupedMoeBlock))
    x = torch.randn(5, model.embed_tokens.weight.shape[1])
    norm = next(each for each in model.modules() if isinstance(each, RMSNorm))
    rows = Rows.of(torch.zeros(5), torch.arange(5))
    numbers: list[int] = []

    def choose(choice: ByScores) -> Chosen:
        numbers.append(choice.routing.num_shared)
        return Chosen(*grouped.choose_grouped(choice))

    monkeypatch.setattr(reference, "choose", choose)
    results: list[Tensor] = []
    for joins in (True, False):
        monkeypatch.setattr(grouped_experts, "joins_shared", lambda *_, joins=joins: joins)
        results.append(joined(block(Residual(x.clone()), norm, rows), norm))
    assert numbers == [1, 0]
    torch.testing.assert_close(*results)
    stack, shared = block.experts.product.weights, block.shared_experts
    assert shared is not None and len(stack["down_proj"]) == len(block.experts.held) + 1
    down = shared.down_proj.get_parameter("weight")
    assert down.data_ptr() == stack["down_proj"][-1].data_ptr()
    assert block.experts.get_parameter("down_proj").shape[0] == len(block.experts.held)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.e_score_correction_bias",
        "mlp.shared_experts.down_proj.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
    ],
)
def test_a_tensor_that_is_left_out_is_detected(name: str) -> None:
    model = load(logits_of("deepseek-v3").folder)
    for index in ("1", "2"):
        weight = model.layers[index].get_parameter(name)
        weight.fill_(1.0 if "layernorm" in name else 0.0)
    assert error("deepseek-v3", model) > GROSS


# -- the checkpoint -------------------------------------------------------------------------------


def test_layers_that_draft_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    case = logits_of("glm-flash")
    [file] = case.folder.glob("*.safetensors")
    weights = load_file(file)

    def write(index: int, number: int) -> None:
        more = {f"model.layers.{index}.eh_proj.weight": torch.zeros(2, 2)}
        save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((case.folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = number
        (tmp_path / "config.json").write_text(json.dumps(config))

    write(3, 1)
    assert config_of(tmp_path).notes == ("layers that draft tokens, left out: 1",)
    assert error("glm-flash", load(tmp_path)) < TOLERANCE
    for index, number in ((4, 1), (3, 0)):
        write(index, number)
        with pytest.raises(CheckpointError, match="does not take"):
            load(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    case = logits_of("glm-flash")
    [file] = case.folder.glob("*.safetensors")
    for name in ("mlp.e_score_correction_bias", "self_attn.kv_b_proj.weight"):
        stored = name.replace("mlp.", "mlp.gate.")
        kept = {k: v for k, v in load_file(file).items() if k != f"model.layers.1.{stored}"}
        shutil.copy(case.folder / "config.json", tmp_path)
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"lacks weights: layers.1.{name}"):
            load(tmp_path)


# -- the config -----------------------------------------------------------------------------------


def read(folder: Path, model: str, **changes: Any) -> LatentConfig:
    """changes: None leaves a field out."""
    values = {
        name: value
        for name, value in (MODELS[model] | changes).items()
        if value is not None or name not in changes
    }
    (folder / "config.json").write_text(json.dumps(values))
    return config_of(folder)


def test_the_published_configs_are_read(tmp_path: Path) -> None:
    lite = read(tmp_path, "DeepSeek-V2-Lite")
    assert lite.architecture == V2 and lite.sizes.q_rank is None
    assert lite.scale == pytest.approx(192**-0.5 * (0.0707 * 3.688879 + 1) ** 2, rel=1e-5)
    assert lite.rope.attention_factor == 1
    assert lite.experts is not None and lite.experts.shared_size == 2 * 1408
    assert lite.experts.layers == frozenset(range(1, 27))
    assert lite.experts.routing == GroupRouting(6, normalize=False, sigmoid=False)
    flash = read(tmp_path, "GLM-4.7-Flash")
    assert flash.architecture == GLM and flash.sizes.q_rank == 768 and flash.norm_eps == 1e-5
    assert flash.scale == 256**-0.5 and flash.num_drafting_layers == 1
    assert flash.experts is not None
    assert flash.experts.routing == GroupRouting(4, normalize=True, sigmoid=True, factor=1.8)
    facts = flash.facts()
    assert facts.attention[0].extras() == (
        "values of another width",
        "values that are part of the keys",
    )
    assert [ranks for ranks in range(1, 9) if facts.can_divide(ranks)] == [1, 2, 4]
    assert facts.experts is not None
    num_weights = facts.num_layer_weights + 2 * facts.num_head_weights
    num_weights += facts.experts.num_layers * facts.experts.num_experts * facts.experts.num_weights
    assert num_weights == pytest.approx(30e9, rel=0.02)


@pytest.mark.parametrize("model", ["DeepSeek-V2-Lite", "GLM-4.7-Flash"])
def test_a_decoder_without_a_head_is_read_as_that_with_one(tmp_path: Path, model: str) -> None:
    whole = read(tmp_path, model)
    bare = MODELS[model] | {"architectures": [whole.architecture.replace("ForCausalLM", "Model")]}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    config = read_model_config(tmp_path, needs_head=False)
    assert config == dataclasses.replace(whole, tie_word_embeddings=True)


def test_relatives_of_v3_are_read(tmp_path: Path) -> None:
    """By the fields that DeepSeek-V3, Moonlight and Kimi-K2 add or change."""
    common = {"architectures": [V3], "scoring_func": "sigmoid", "seq_aux": True, "ep_size": 1}
    yarn = MODELS["DeepSeek-V2-Lite"]["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0}
    v3 = {
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "rope_scaling": yarn,
        "topk_group": 4,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    config = read(tmp_path, "GLM-4.7-Flash", **common, **v3)
    assert config.experts is not None and config.experts.routing is not None
    assert (config.experts.routing.num_groups, config.experts.routing.num_kept) == (8, 4)
    assert config.scale == pytest.approx(256**-0.5 * 1.3688879**2, rel=1e-5)
    assert isinstance(config.quantization, Fp8Blocks)
    moonlight = {"q_lora_rank": None, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.446}
    values = MODELS["DeepSeek-V2-Lite"] | common | moonlight | {"topk_method": "noaux_tc"}
    values |= {"norm_topk_prob": True, "rope_scaling": None, "aux_loss_alpha": 0.001}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = config_of(tmp_path)
    assert config.sizes.q_rank is None and config.notes == () and config.scale == 192**-0.5
    kimi = {"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64}
    kimi |= {"rope_scaling": yarn | {"beta_fast": 1.0, "factor": 32.0}}
    config = read(tmp_path, "GLM-4.7-Flash", **common, **kimi)
    assert config.experts is not None and config.experts.num_experts == 384


# Beside the text part of Kimi-K2.5 to 2.7.
OF_KIMI: dict[str, Any] = {
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"patch_size": 14, "mm_projector_type": "patchmerger"},
}
EXPERTS_IN_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"},
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "quant_method": "compressed-tensors",
}


@pytest.mark.parametrize("architecture", KIMI)
def test_the_text_part_of_a_model_with_a_tower_gives_its_logits(
    tmp_path: Path, architecture: str
) -> None:
    case = logits_of("deepseek-v3")
    text = json.loads((case.folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = OF_KIMI | {"architectures": [architecture], "dtype": "float32", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {name: torch.ones(3) for name in ("vision_tower.proj.bias", "mm_projector.bias")}
    for file in case.folder.glob("*.safetensors"):
        tensors |= {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_of(tmp_path)
    assert "the text part of the model; left out: vision" in config.notes
    assert logits_error(case, load(tmp_path), config, page_size=16) < TOLERANCE


def test_experts_of_a_text_part_are_in_int4(tmp_path: Path, caplog: Any) -> None:
    text = {
        name: value
        for name, value in MODELS["GLM-4.7-Flash"].items()
        if name not in ("dtype", "topk_method")
    }
    text |= {"architectures": [V3], "model_type": "kimi_k2", "quantization_config": EXPERTS_IN_INT4}
    whole = OF_KIMI | {"architectures": KIMI[:1], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert str(config_of(tmp_path).quantization) == "INT4 in groups of 32 (compressed-tensors)"
    assert config_of(tmp_path).dtype == "bfloat16" and not caplog.records


def test_what_the_config_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    whole = read(tmp_path, "GLM-4.7-Flash")
    names = """first_k_dense_replace kv_lora_rank qk_rope_head_dim moe_intermediate_size n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers
    q_lora_rank qk_nope_head_dim rms_norm_eps routed_scaling_factor topk_group v_head_dim
    topk_method""".split()
    assert read(tmp_path, "GLM-4.7-Flash", **dict.fromkeys(names)) == whole
    kinds = ["dense"] + ["sparse"] * 46
    assert read(tmp_path, "GLM-4.7-Flash", mlp_layer_types=kinds) == whole


@pytest.mark.parametrize(
    ("model", "changes", "error", "message"),
    [
        ("GLM-4.7-Flash", {"attention_bias": True}, UnsupportedModelError, "attention_bias True"),
        ("GLM-4.7-Flash", {"rope_interleave": False}, UnsupportedModelError, "rope_interleave"),
        ("GLM-4.7-Flash", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("GLM-4.7-Flash", {"topk_method": "greedy"}, UnsupportedModelError, "'greedy'"),
        ("GLM-4.7-Flash", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func"),
        ("GLM-4.7-Flash", {"per_layer_config": {"0": {}}}, UnsupportedModelError, "per_layer_con"),
        ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary"),
        (
            "GLM-4.7-Flash",
            {"num_experts_per_tok": 65},
            CheckpointError,
            "num_experts_per_tok 65 do not fit",
        ),
        ("GLM-4.7-Flash", {"n_group": 3}, CheckpointError, "do not fit"),
        ("GLM-4.7-Flash", {"n_group": 32, "topk_group": 1}, CheckpointError, "do not fit"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, CheckpointError, "mlp_layer_types"),
        ("GLM-4.7-Flash", {"qk_rope_head_dim": 63}, CheckpointError, "qk_rope_head_dim"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, UnsupportedModelError, "'noaux_tc'"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    tmp_path: Path, model: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, model, **changes)
