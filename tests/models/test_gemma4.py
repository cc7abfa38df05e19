"""Gemma 4: its logits and tokens against transformers, mistakes that these show, and its config."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import MODELS
from safetensors.torch import load_file, save_file
from support.adopted_checkpoints import small_config
from support.checkpoints import TOLERANCE, Case
from support.gemma_checkpoints import CONFIGS, WITH_TOWERS, case_of, prompts_of
from support.native_models import load_native, logits_error
from support.parity import FEW_PAGES, check
from support.parity import Case as Prompts
from support.tensor_parallel import check_with_aborts, shortened

from minisgl.config import ModelFacts
from minisgl.errors import CheckpointError, MinisglError, UnsupportedModelError
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise import reference
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.models import registry
from minisgl.models.gemma4 import TEXT, GemmaConfig, GemmaForCausalLM
from minisgl.models.registry import read_model_config

GROSS = 100 * TOLERANCE


def config_of(folder: Path, **options: Any) -> GemmaConfig:
    config = read_model_config(folder, **options)
    assert isinstance(config, GemmaConfig)
    return config


def load(folder: Path, config: GemmaConfig | None = None) -> GemmaForCausalLM:
    return load_native(GemmaForCausalLM, config or config_of(folder), folder)


def error(case: Case, model: GemmaForCausalLM, *, page_size: int = 16, **cut: int) -> float:
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
@pytest.mark.parametrize("name", [*CONFIGS, WITH_TOWERS])
def test_logits_match_transformers(name: str, page_size: int, cut: Mapping[str, int]) -> None:
    case = case_of(name)
    assert error(case, load(case.folder), page_size=page_size, **cut) < TOLERANCE


def some(case: Prompts) -> Prompts:
    """A short prompt, and two that begin alike."""
    return dataclasses.replace(case, prompts=case.prompts[2:5], runs=case.runs[2:5])


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_prefill_length": 7},
    "pages-of-one": {"page_size": 1, "max_prefill_length": 50},
    "retracted": FEW_PAGES | {"max_prefill_length": 7},
    "calm": {"overlap": False, "padded": 8},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_equal_those_of_transformers(options: dict[str, Any]) -> None:
    check(prompts_of("dense"), **options)


@pytest.mark.parametrize("name", ["experts", WITH_TOWERS])
def test_tokens_with_experts_equal_those_of_transformers(name: str) -> None:
    check(some(prompts_of(name)), max_prefill_length=7, page_size=4)


def test_prefixes_are_found_within_windows_and_beyond() -> None:
    """The third prompt shares 30 tokens with the second, of which a window has 20."""
    _, cached = check(some(prompts_of("dense")), alone=True, page_size=4)
    assert cached == [0, 0, 28]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(("dense", split) for split in ({"tp": 2}, {"tp": 2, "dp_attention": True}, {"pp": 2})),
        ("experts", {"tp": 2}),
    ],
    ids=str,
)
def test_ranks_and_stages_give_the_tokens_of_transformers(name: str, split: dict[str, int]) -> None:
    """Two ranks have the same global KV head."""
    check_with_aborts(shortened(prompts_of(name)), **split)


def test_our_code_and_that_of_transformers_agree() -> None:
    case = prompts_of("experts")
    assert config_of(case.folder).notes == ()
    for model_impl in ("native", "adopted"):
        check(some(case), model_impl=model_impl)


# -- mistakes -------------------------------------------------------------------------------------


def _in_config(**changes: Any) -> Callable[[GemmaConfig], GemmaConfig]:
    return lambda config: dataclasses.replace(config, **changes)


def _global_rope(**changes: Any) -> Callable[[GemmaConfig], GemmaConfig]:
    return lambda config: dataclasses.replace(
        config, global_rope=dataclasses.replace(config.global_rope, **changes)
    )


def _local_rope_everywhere(config: GemmaConfig) -> GemmaConfig:
    return dataclasses.replace(config, global_rope=config.rope)


def _choose_three(config: GemmaConfig) -> GemmaConfig:
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, num_chosen=3)
    return dataclasses.replace(config, experts=experts)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(_in_config(windows=(None,) * 5), id="no-window"),
        pytest.param(_in_config(windows=(21, None, 21, 21, None)), id="a-longer-window"),
        pytest.param(_in_config(windows=(20,) * 5), id="windows-of-all"),
        pytest.param(_in_config(softcap=None), id="no-soft-cap"),
        pytest.param(_in_config(softcap=4.0), id="another-soft-cap"),
        pytest.param(_in_config(norm_eps=1e-1), id="eps"),
        pytest.param(_global_rope(share=1.0), id="all-pairs-rotate"),
        pytest.param(_global_rope(theta=10_000.0), id="another-base"),
        pytest.param(_local_rope_everywhere, id="one-rope"),
        pytest.param(_choose_three, id="more-experts"),
    ],
)
def test_a_wrong_config_is_detected(mistake: Callable[[GemmaConfig], GemmaConfig]) -> None:
    case = case_of("experts")
    assert error(case, load(case.folder, mistake(config_of(case.folder)))) > GROSS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_scalar", 1.0),
        ("router.scale.weight", 64**-0.5),
        ("router.per_expert_scale", 1.0),
        ("mlp.down_proj.weight", 0.0),
        ("experts.down_proj", 0.0),
        *[
            (f"{norm}.weight", 1.0)
            for norm in (
                *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm"),
                *("post_attention_layernorm", "pre_feedforward_layernorm"),
                *("pre_feedforward_layernorm_2", "post_feedforward_layernorm"),
                *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
            )
        ],
    ],
)
def test_a_tensor_that_is_left_out_is_detected(name: str, value: float) -> None:
    case = case_of("experts")
    model = load(case.folder)
    for layer in model.layers.values():
        layer.get_parameter(name).fill_(value)
    assert error(case, model) > GROSS


def _scale_by_width(patch: pytest.MonkeyPatch) -> None:
    attention = GemmaConfig.attention
    patch.setattr(
        GemmaConfig,
        "attention",
        lambda config, layer: dataclasses.replace(
            attention(config, layer), scale=attention(config, layer).head_dim ** -0.5
        ),
    )


def _values(patch: pytest.MonkeyPatch, change: Callable[..., torch.Tensor]) -> None:
    """Let what is stored as values be `change` of them, given NormRope and positions."""
    store = dispatch.qk_norm_rope_store_kv

    def changed(qkv: Any, positions: Any, slots: Any, k: Any, v: Any, how: Any, *rest: Any) -> Any:
        q = store(qkv, positions, slots, k, v, how, *rest)
        places = v.view(-1, *v.shape[2:])
        places[slots] = change(places[slots], how, positions)
        return q

    patch.setattr(dispatch, "qk_norm_rope_store_kv", changed)


def _rotated(v: torch.Tensor, how: reference.NormRope, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = how.table[positions].unsqueeze(1).chunk(2, dim=-1)
    return reference._rotate(v, cos, sin)


def _rotate_values(patch: pytest.MonkeyPatch) -> None:
    _values(patch, _rotated)


def _norm_values_as_keys(patch: pytest.MonkeyPatch) -> None:
    _values(patch, lambda v, how, positions: v * how.k_weight)


def _norm_no_values(patch: pytest.MonkeyPatch) -> None:
    whole = dispatch.qk_norm_rope_store_kv

    def without(*args: Any) -> Any:
        *given, how, scales = args
        return whole(*given, how._replace(norms_v=False), scales)

    patch.setattr(dispatch, "qk_norm_rope_store_kv", without)


def _gate_by_silu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_gelu", torch.nn.functional.silu)


def _gate_experts_by_silu(patch: pytest.MonkeyPatch) -> None:
    allocate = DenseExperts.allocate
    patch.setattr(
        DenseExperts,
        "allocate",
        lambda *args, gelu, **options: allocate(*args, gelu=False, **options),
    )


def _gate_by_exact_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_gelu", torch.nn.functional.gelu)


def _scale_no_embedding(patch: pytest.MonkeyPatch) -> None:
    made = GemmaForCausalLM.__init__

    def init(model: GemmaForCausalLM, *args: Any, **options: Any) -> None:
        made(model, *args, **options)
        assert model.embed_tokens is not None
        model.embed_tokens.scale = None

    patch.setattr(GemmaForCausalLM, "__init__", init)


def _add_results_as_they_are(patch: pytest.MonkeyPatch) -> None:
    add_post_norm = dispatch.add_post_norm

    def add(summands: Any, residual: Any, post: Any, weights: Any) -> Any:
        total = residual + sum(summands)
        bare = post._replace(inner=None)
        return add_post_norm((torch.zeros_like(residual),), total, bare, weights)

    patch.setattr(dispatch, "add_post_norm", add)


MISTAKES = (
    *(_scale_by_width, _rotate_values, _norm_values_as_keys, _norm_no_values),
    *(_gate_by_silu, _gate_experts_by_silu, _scale_no_embedding, _add_results_as_they_are),
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_other_arithmetic_is_detected(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("experts")
    mistake(monkeypatch)
    assert error(case, load(case.folder)) > GROSS


def test_the_exact_gelu_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("dense")
    _gate_by_exact_gelu(monkeypatch)
    assert error(case, load(case.folder)) > 3 * TOLERANCE


# -- the checkpoint -------------------------------------------------------------------------------


def _rewrite(name: str, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    source = case_of(name).folder
    [file] = source.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    shutil.copy(source / "config.json", target)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    "missing",
    [
        "self_attn.k_proj.weight",
        "router.proj.weight",
        "router.scale",
        "router.per_expert_scale",
        "post_feedforward_layernorm_2.weight",
    ],
)
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    folder = _rewrite("experts", tmp_path, lambda w: w.pop(f"model.layers.1.{missing}"))
    with pytest.raises(CheckpointError, match=rf"lacks weights: layers\.1\.{missing}"):
        load(folder)


def test_a_stack_of_experts_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = _rewrite("experts", tmp_path, lambda w: w.pop("model.layers.1.experts.gate_up_proj"))
    with pytest.raises(CheckpointError, match=r"lacks weights: layers\.1\.experts\.0\.gate_proj"):
        load(folder)


def test_layers_without_a_scalar_are_multiplied_by_none(tmp_path: Path) -> None:
    def leave_out(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith("layer_scalar")]:
            del weights[name]

    model = load(_rewrite("dense", tmp_path, leave_out))
    assert all(layer.get_parameter("layer_scalar") == 1 for layer in model.layers.values())
    assert error(case_of("dense"), model) > GROSS


def test_a_map_to_values_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    more = {"model.layers.1.self_attn.v_proj.weight": torch.zeros(32, 64)}
    folder = _rewrite("dense", tmp_path, lambda weights: weights.update(more))
    with pytest.raises(CheckpointError, match="does not take"):
        load(folder)


def test_towers_are_left_out_and_named() -> None:
    config = config_of(case_of(WITH_TOWERS).folder)
    assert config.notes == ("the text part of the model; left out: vision",)


# -- the config -----------------------------------------------------------------------------------

DENSE, SPARSE = "gemma-4-31B", "gemma-4-26B-A4B"


def write_config(folder: Path, model: str, **changes: Any) -> Path:
    values = MODELS[model] | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    return folder


def read(folder: Path, model: str = DENSE, **changes: Any) -> GemmaConfig:
    return config_of(write_config(folder, model, **changes), model_impl="native")


def test_the_published_config_of_the_dense_model_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.windows == (*(1024,) * 5, None) * 10
    assert config.tie_word_embeddings and config.softcap == 30 and config.experts is None
    local, of_all = config.attention(0), config.attention(5)
    assert (local.num_kv_heads, local.head_dim, local.scale) == (16, 256, 1)
    assert (of_all.num_kv_heads, of_all.head_dim, of_all.scale) == (4, 512, 1)
    assert config.rotation(0)[0].theta == 10_000 and config.rotation(0)[1] == 256
    rope, width = config.rotation(5)
    assert (rope.theta, rope.share, rope.type, width) == (1_000_000, 0.25, "default", 512)
    assert config.v_is_k(5) and not config.v_is_k(4)
    facts: ModelFacts = config.facts()
    assert facts.num_layer_weights + facts.num_head_weights == pytest.approx(30.7e9, rel=0.001)
    # Of 50 layers keys and values of 16 heads, of 10 of 4 heads of twice the width.
    assert facts.kv_bytes_per_token("bfloat16") == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert all(map(facts.can_divide, (1, 2, 4, 8)))
    assert [spec.num_kv_heads for spec in facts.on_rank(8).attention[4:6]] == [2, 1]


def test_the_published_config_of_the_sparse_model_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, SPARSE)
    assert config.experts is not None and config.intermediate_size == 2112
    assert (config.experts.num_experts, config.experts.num_chosen) == (128, 8)
    assert (config.experts.size, config.experts.shared_size) == (704, 2112)
    assert config.attention(5).num_kv_heads == 2
    facts = config.facts()
    assert facts.experts is not None
    weights = facts.experts.num_layers * facts.experts.num_experts * facts.experts.num_weights
    weights += facts.num_layer_weights + facts.num_head_weights
    assert weights == pytest.approx(25.2e9, rel=0.002)
    assert all(map(facts.can_divide, (1, 2, 4, 8)))


def test_what_the_config_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    whole = read(tmp_path)
    left_out = dict.fromkeys(
        (
            *("global_head_dim", "head_dim", "hidden_activation", "rope_parameters"),
            *("tie_word_embeddings", "enable_moe_block", "use_bidirectional_attention"),
        )
    )
    assert read(tmp_path, **left_out) == whole


def test_transformers_writes_global_heads_layer_by_layer(tmp_path: Path) -> None:
    whole = read(tmp_path)
    each = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    changes = {"global_head_dim": None, "num_global_key_value_heads": None}
    assert read(tmp_path, per_layer_config=each, **changes) == whole
    for wrong in (each | {"0": {"head_dim": 128}}, each | {"5": {"head_dim": 128}}, {}):
        with pytest.raises(UnsupportedModelError, match="per_layer_config is not supported"):
            read(tmp_path, per_layer_config=wrong, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"top_k_experts": 129}, CheckpointError, "129 experts for each token"),
        ({"num_global_key_value_heads": 3}, CheckpointError, "3 global KV heads"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types is"),
        ({"rope_parameters": {}}, CheckpointError, "has no sliding_attention"),
        ({"hidden_activation": "relu"}, UnsupportedModelError, "hidden_activation 'relu'"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "tokens attend to earlier"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, SPARSE, **changes)


ODD = (True, -1, 0, 1, 7, 2.5, 1e30, 10**400, "x", [], [1], ["full_attention"], [[]], {}, {"a": 1})
ROPES = MODELS[DENSE]["rope_parameters"]
# Fields that the models have at transformers' defaults.
LEFT_OUT = (
    "attention_bias global_head_dim head_dim hidden_activation num_kv_shared_layers rms_norm_eps "
    "use_bidirectional_attention use_double_wide_mlp vocab_size_per_layer_input per_layer_config "
    "layer_types quantization_config"
).split()


def test_any_value_of_a_field_is_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {name: value} for name in (*MODELS[SPARSE], *LEFT_OUT) for value in ODD
    ]
    for kind, rope in ROPES.items():
        for value in ODD:
            changes.append({"rope_parameters": ROPES | {kind: value}})
            for name in (*rope, "factor", "partial_rotary_factor"):
                changes.append({"rope_parameters": ROPES | {kind: rope | {name: value}}})
    for value in ODD:
        changes.append({"per_layer_config": {"5": value}})
        changes.append({"per_layer_config": {str(at): {"head_dim": value} for at in (5, 11)}})
    for change in changes:
        try:
            config = read(tmp_path, SPARSE, **{"num_hidden_layers": 12, **change})
        except MinisglError as refused:
            assert str(refused)
            continue
        assert dataclasses.asdict(config.facts())


# Of E4B; E2B has 20 shared caches.
SMALL = {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18}
REASON = (
    r"no embeddings of each layer \(hidden_size_per_layer_input 256\) and no layers that read the "
    r"KV cache of others \(num_kv_shared_layers 18\)"
)


def test_models_with_embeddings_of_each_layer_run_adopted_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path, DENSE, **SMALL)
    asked: list[str | None] = []

    def adopted(fields: Any, name: str, because: str | None = None) -> GemmaConfig:
        asked.append(because)
        write_config(tmp_path, DENSE)
        return config_of(tmp_path)

    monkeypatch.setattr(registry, "_adopted", adopted)
    read_model_config(folder)
    assert asked[0] is not None and re.search(REASON, asked[0])


def test_the_reason_is_in_the_notes(tmp_path: Path) -> None:
    """Of a small model with embeddings of each layer, which transformers' code computes."""
    values = small_config(TEXT).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    *_, code, reason = read_model_config(tmp_path).notes
    assert code.startswith(f"model: {TEXT} of transformers")
    assert re.search("transformers' code, since minisgl's own code of Gemma 4 has no", reason)


def test_our_own_code_alone_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=REASON):
        read(tmp_path, **SMALL)
