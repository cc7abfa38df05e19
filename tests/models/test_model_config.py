"""Reading model configs and generation defaults, and refusing unsupported ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from minisgl.config import AttentionSpec, ModelFacts
from minisgl.errors import (
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.generation import read_generation_defaults
from minisgl.models.registry import read_model_config
from minisgl.models.rope import inverse_frequencies

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    **{key: value for key, value in LLAMA_31_8B.items() if "bias" not in key},
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_scaling": None,
    "sliding_window": 4096,
}
QWEN2 = {
    **{key: value for key, value in QWEN3_8B.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["Qwen2ForCausalLM"],
}
QWEN3_30B_A3B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN3_CODER_30B_A3B = QWEN3_30B_A3B | {
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(fields: dict[str, Any], without: str = "", **changes: Any) -> ModelConfig:
        fields = {key: value for key, value in fields.items() if key != without} | changes
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_model_config(tmp_path)

    return read


# -- reading ---------------------------------------------------------------------------------------


def test_the_facts_of_qwen3_8b_are_read(read: Read) -> None:
    assert read(QWEN3_8B).facts() == ModelFacts(
        dtype="bfloat16",
        max_seq_len=40960,
        max_seq_len_reason=None,
        vocab_size=151936,
        layers=(AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),) * 36,
        intermediate_size=12288,
        num_layer_weights=36 * 4096 * ((32 + 32 + 8 + 8) * 128 + 3 * 12288),
        num_attention_weights=36 * 4096 * (32 + 32 + 8 + 8) * 128,
        num_head_weights=4096 * 151936,
    )


def test_architectures_differ_in_norms_biases_and_defaults(read: Read) -> None:
    qwen3, qwen2, llama = read(QWEN3_8B), read(QWEN2), read(LLAMA_31_8B)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias) == (True, False, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias) == (False, False, False)
    biased = read(LLAMA_31_8B, attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("fields", [QWEN3_30B_A3B, QWEN3_235B_A22B, QWEN3_CODER_30B_A3B])
def test_the_experts_of_published_configs_are_read(read: Read, fields: dict[str, Any]) -> None:
    config = read(fields)
    assert config.qk_norm and not config.qkv_bias and not config.notes
    experts = config.experts
    assert experts is not None and experts.normalize
    assert (experts.num_experts, experts.num_chosen) == (128, 8)
    assert experts.size == fields["moe_intermediate_size"]
    assert experts.layers == set(range(fields["num_hidden_layers"]))


def test_configs_of_transformers_4_and_5_read_alike(read: Read) -> None:
    old = read(LLAMA_31_8B)
    new = {k: v for k, v in LLAMA_31_8B.items() if not k.startswith(("rope", "torch"))}
    rope = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert read(new, dtype="bfloat16", rope_parameters=rope) == old
    older = {**LLAMA_31_8B["rope_scaling"], "type": "llama3"}
    del older["rope_type"]
    assert read(LLAMA_31_8B, rope_scaling=older) == old
    assert (old.rope.type, old.rope.theta, old.rope.factor) == ("llama3", 500000.0, 8.0)


def test_absent_fields_have_the_defaults_of_the_architecture(read: Read) -> None:
    assert read(LLAMA_31_8B, without="num_key_value_heads").num_kv_heads == 32
    assert read(LLAMA_31_8B, hidden_size=2048).head_dim == 64
    assert read(LLAMA_31_8B, hidden_size=2048, head_dim=128).head_dim == 128
    assert read(QWEN3_8B, without="head_dim", hidden_size=1024).head_dim == 128
    assert read(LLAMA_31_8B, without="torch_dtype").dtype == "float32"
    assert read(LLAMA_31_8B, without="rope_theta").rope.theta == 10_000.0
    assert read(MISTRAL_7B, without="sliding_window").windows == (4096,) * 32
    assert read(QWEN3_30B_A3B, without="head_dim").head_dim == 64
    experts = read(QWEN3_30B_A3B, without="norm_topk_prob", mlp_only_layers=None).experts
    assert experts is not None and not experts.normalize and len(experts.layers) == 48


@pytest.mark.parametrize(
    ("fields", "changes", "windows"),
    [
        (MISTRAL_7B, {}, [4096] * 32),
        (LLAMA_31_8B, {"sliding_window": 4096}, [None] * 32),  # without effect, as in transformers
        (MISTRAL_7B, {"sliding_window": 32768}, [None] * 32),  # as long as the context
        (MISTRAL_7B, {"sliding_window": None}, [None] * 32),
        (QWEN2, {"sliding_window": 4096}, [None] * 36),
        (QWEN2, {"sliding_window": 4096, "use_sliding_window": True}, [None] * 36),
        (
            QWEN2,
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 9},
            [None] * 9 + [4096] * 27,
        ),
        (QWEN3_8B, {"use_sliding_window": True, "max_window_layers": 0}, [None] * 36),
        (
            QWEN3_8B,
            {
                "sliding_window": 1024,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 35 + ["sliding_attention"],
            },
            [None] * 35 + [1024],
        ),
        (
            QWEN3_8B,
            {
                "sliding_window": 1024,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 36,
            },
            [None] * 36,
        ),
        (QWEN3_30B_A3B, {"sliding_window": 4096}, [None] * 48),
        (QWEN3_30B_A3B, {"sliding_window": 4096, "use_sliding_window": True}, [4096] * 48),
    ],
)
def test_the_window_of_each_layer_is_read(
    read: Read, fields: dict[str, Any], changes: dict[str, Any], windows: list[int | None]
) -> None:
    config = read(fields, **changes)
    assert [spec.window for spec in config.facts().attention] == windows
    assert config.max_seq_len == fields["max_position_embeddings"]
    assert config.max_seq_len_reason is None and not config.notes


def test_layer_types_name_every_layer(read: Read) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types has 1 entries for 36 layers"):
        read(QWEN3_8B, layer_types=["full_attention"])


def test_dynamic_rope_limits_the_length_to_its_constant_part(read: Read) -> None:
    config = read(LLAMA_31_8B, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.max_seq_len == 131072 and not config.notes
    assert "another base" in str(config.max_seq_len_reason)
    scaling = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert read(LLAMA_31_8B, rope_scaling=scaling).max_seq_len == 8192
    config = read(MISTRAL_7B, rope_scaling=scaling)
    assert config.max_seq_len == 8192 and config.windows == (4096,) * 32


# -- refusing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "culprit"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}, "quant_method"),
        ("hidden_act", "gelu", "gelu"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
        ("is_causal", False, "is_causal"),
        ("is_encoder_decoder", True, "is_encoder_decoder"),
        ("per_layer_config", {"0": {"head_dim": 64}}, "per_layer_config"),
        ("layer_types", ["linear_attention"], "linear_attention"),
        ("attention_chunk_size", 8192, "attention_chunk_size"),
        ("torch_dtype", "float8_e4m3fn", "float8_e4m3fn"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}, "longrope"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "alpha"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "full_attention"),
        (
            "rope_parameters",
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
    ],
)
def test_configs_of_unsupported_arithmetic_are_refused_by_field(
    read: Read, name: str, value: object, culprit: str
) -> None:
    fields = {key: value for key, value in QWEN3_8B.items() if key != "rope_scaling"}
    with pytest.raises(UnsupportedModelError) as raised:
        read(fields, **{name: value})
    assert name.removeprefix("torch_") in str(raised.value)
    assert culprit in str(raised.value)
    assert "\n" not in str(raised.value)


# The second as published with Qwen3-Coder, the third with MLX's copies.
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        (QWEN3_8B, "field_of_tomorrow", "on"),
        (QWEN3_8B, "use_qk_norm", True),
        (QWEN3_8B, "embedding_multiplier", 12.0),
        (QWEN2 | {"model_type": "qwen2"}, "mlp_bias", True),
        (MISTRAL_7B | {"model_type": "mistral"}, "attention_bias", True),
        (LLAMA_31_8B, "logit_scale", 0.0625),
        # A model_type of the checkpoint's own code: transformers' code of the architecture counts.
        (LLAMA_31_8B | {"model_type": "llama_of_ours"}, "field_of_tomorrow", 1),
    ],
)
def test_a_field_that_transformers_does_not_read_is_named_in_a_warning_alone(
    read: Read, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], name: str, value: object
) -> None:
    assert read(fields, **{name: value}) == read(fields)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"config.json: the field {name} (")
    assert warning.endswith(" is left aside: transformers does not read it either.")


@pytest.mark.parametrize("model_type", [None, 7])
def test_without_code_of_transformers_every_unknown_field_is_refused(
    read: Read, model_type: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the field field_of_tomorrow \('on'\)"):
        read(LLAMA_31_8B, model_type=model_type, field_of_tomorrow="on")


def test_disabled_features_are_accepted(read: Read) -> None:
    off = dict.fromkeys(["quantization_config", "logit_scale", "attn_logit_softcapping"])
    assert read(QWEN3_8B, **off, use_qk_norm=False, clip_qkv=0) == read(QWEN3_8B)
    assert read(QWEN3_8B, partial_rotary_factor=1.0) == read(QWEN3_8B)


@pytest.mark.parametrize(
    "architectures", [["XForCausalLM"], ["Qwen2MoeForCausalLM", "X"], [], None, "LlamaForCausalLM"]
)
def test_unsupported_architectures_are_refused_with_where_the_supported_ones_are(
    read: Read, architectures: object
) -> None:
    supported = "is not supported; `minisgl models` lists those that are"
    with pytest.raises(UnsupportedModelError, match=supported):
        read(QWEN3_8B, architectures=architectures)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"hidden_size": "4096"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 2.5},
        {"num_key_value_heads": 5},
        {"head_dim": 127},
        {"tie_word_embeddings": "yes"},
        {"rms_norm_eps": True},
        {"rope_scaling": ["yarn"]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_invalid_config_values_are_refused(read: Read, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(QWEN3_8B, **changes)


@pytest.mark.parametrize(
    ("factor", "read_as"), [({"factor": None}, 8.0), ({"factor": 2.0}, 2.0), ({}, None)]
)
def test_yarn_has_the_factor_of_transformers(
    read: Read, factor: dict[str, Any], read_as: float | None
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 5120}
    rope |= factor
    if read_as is None:
        with pytest.raises(KeyError, match=r"Missing required keys.*factor"):
            Qwen3Config(rope_parameters=dict(rope), max_position_embeddings=40960)
        with pytest.raises(CheckpointError, match=r"rope_parameters lacks factor, which .* yarn"):
            read(QWEN3_8B, "rope_theta", rope_parameters=rope)
        return
    config = read(QWEN3_8B, "rope_theta", rope_parameters=rope)
    theirs = Qwen3Config(rope_parameters=dict(rope), max_position_embeddings=40960, head_dim=128)
    wanted = Qwen3RotaryEmbedding(theirs)
    assert isinstance(config, NativeConfig)
    assert config.rope.factor == read_as
    assert config.rope.attention_factor == wanted.attention_scaling
    frequencies = inverse_frequencies(config.rope, 128)
    torch.testing.assert_close(frequencies, wanted.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "hints"), [("BartForCausalLM", True), ("FooForCausalLM", False)])
def test_transformers_code_is_offered_where_it_has_some(read: Read, name: str, hints: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="`minisgl models` lists") as error:
        read(QWEN3_8B, architectures=[name])
    assert ("--model-impl adopted" in str(error.value)) is hints


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_model_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_model_config(tmp_path)


# -- generation defaults ---------------------------------------------------------------------------


def write(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(values))


def test_eos_token_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path).eos_token_ids == frozenset()
    write(tmp_path, "config.json", {"eos_token_id": 2})
    write(tmp_path, "generation_config.json", {"eos_token_id": [3, 4]})
    assert read_generation_defaults(tmp_path).eos_token_ids == {2, 3, 4}
    assert read_generation_defaults(tmp_path, 0).eos_token_ids == {0, 2, 3, 4}
    write(tmp_path, "config.json", {"eos_token_id": None})
    write(tmp_path, "generation_config.json", {"eos_token_id": -1})
    assert read_generation_defaults(tmp_path, 5).eos_token_ids == {5}
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 6}})
    assert read_generation_defaults(tmp_path, 5).eos_token_ids == {5, 6}
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 6}, "eos_token_id": 7})
    assert read_generation_defaults(tmp_path, 5).eos_token_ids == {5, 7}
    write(tmp_path, "config.json", {"eos_token_id": ["</s>"]})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        read_generation_defaults(tmp_path)


def test_sampling_defaults_are_read_from_generation_config(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path).values == {}
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    others = {"do_sample": True, "max_new_tokens": 2048, "min_p": None}
    write(tmp_path, "generation_config.json", values | others)
    assert read_generation_defaults(tmp_path).values == values
    write(tmp_path, "generation_config.json", values | {"do_sample": False})
    greedy = {"temperature": 0.0, "repetition_penalty": 1.05}
    assert read_generation_defaults(tmp_path).values == greedy
    write(tmp_path, "generation_config.json", {"temperature": 7})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        read_generation_defaults(tmp_path)
