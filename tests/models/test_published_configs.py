"""Fields of config.json where publishers put them, and not where transformers writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.models.adopted.discover import discover
from minisgl.models.adopted.reader import model_class, transformers_config
from minisgl.models.qwen3_5 import NEXT, HybridConfig
from minisgl.models.registry import read_model_config

QWEN3_NEXT: dict[str, Any] = {
    "architectures": [NEXT],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# Of Qwen3.6-27B and 3.8-27B.
QWEN3_6_TEXT: dict[str, Any] = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
QWEN3_6: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "eos_token_id": 248046,
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "pad_token_id": 248044,
    "text_config": QWEN3_6_TEXT,
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "eod_token_id": 127967,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "model_type": "hunyuan",
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128167,
}


def read(folder: Path, values: dict[str, Any]) -> HybridConfig:
    (folder / "config.json").write_text(json.dumps(values))
    config = read_model_config(folder)
    assert isinstance(config, HybridConfig)
    return config


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (QWEN3_NEXT, QWEN3_NEXT),
        (QWEN3_NEXT | {"partial_rotary_factor": 0.5}, QWEN3_NEXT | {"partial_rotary_factor": 0.5}),
        (QWEN3_6_TEXT, QWEN3_6),
    ],
    ids=["next", "half", "tower"],
)
def test_a_share_of_heads_is_rotated_wherever_it_stands(
    tmp_path: Path, part: dict[str, Any], values: dict[str, Any]
) -> None:
    found = AutoConfig.for_model(**json.loads(json.dumps(part))).rope_parameters
    config = read(tmp_path, values)
    assert config.rotary_dim == 256 * found["partial_rotary_factor"]
    assert config.rope.theta == found["rope_theta"] == 1e7


def test_the_field_of_the_rope_counts_before_that_of_the_whole(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    values = without(QWEN3_NEXT, "rope_theta", "rope_scaling") | {"rope_parameters": rope}
    found = AutoConfig.for_model(**json.loads(json.dumps(values))).rope_parameters
    assert read(tmp_path, values).rotary_dim == 256 * found["partial_rotary_factor"] == 128
    with pytest.raises(CheckpointError, match=r"json: partial_rotary_factor is 0\.3, not a share"):
        read(tmp_path, QWEN3_NEXT | {"partial_rotary_factor": 0.3})


@pytest.mark.parametrize("gate", ["swish", "silu"])
def test_a_text_part_is_read_beside_a_tower_or_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: str
) -> None:
    whole = read(tmp_path, QWEN3_6 | {"text_config": QWEN3_6_TEXT | {"output_gate_type": gate}})
    assert not caplog.records
    assert whole.notes == ("the text part of the model; left out: vision",)
    # Pruned copies are saved as text parts under the name of the whole.
    alone = read(tmp_path, QWEN3_6_TEXT | {"architectures": QWEN3_6["architectures"]})
    assert dataclasses.replace(whole, notes=()) == alone
    lacking = without(QWEN3_6_TEXT, "tie_word_embeddings") | {"dtype": None}
    of_whole = {"dtype": "float16", "tie_word_embeddings": True}
    found = read(tmp_path, QWEN3_6 | of_whole | {"text_config": lacking})
    assert (found.dtype, found.tie_word_embeddings) == ("float16", True)


def test_fields_of_the_whole_and_of_the_part_are_looked_up_by_their_own_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = QWEN3_6_TEXT | {"field_of_tomorrow": 1}
    read(tmp_path, QWEN3_6 | {"text_config": text, "tower_of_tomorrow": "x"})
    warned = [each.getMessage() for each in caplog.records]
    assert [line.split(" (")[0] for line in warned] == [
        "config.json: the field tower_of_tomorrow",
        "config.json: text_config: the field field_of_tomorrow",
    ]
    with pytest.raises(UnsupportedModelError, match=r"output_gate_type 'sigmoid'.*silu or swish"):
        read(tmp_path, QWEN3_6 | {"text_config": text | {"output_gate_type": "sigmoid"}})
    with pytest.raises(UnsupportedModelError, match="text_config: the field per_layer_config"):
        read(tmp_path, QWEN3_6 | {"text_config": text | {"per_layer_config": {"0": {}}}})


@pytest.mark.parametrize(
    "beside",
    [
        {"partial_rotary_factor": 0.25, "hidden_size": 5120},
        {"rope_theta": 10000000},  # as that of rope_parameters
        {"rope_theta": None},
    ],
)
def test_a_field_that_repeats_that_of_the_text_part_changes_nothing(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    assert read(tmp_path, QWEN3_6 | beside) == read(tmp_path, QWEN3_6)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, and 0\.25 in text_conf"),
        ({"rope_theta": 10000.0}, r"rope_theta is 10000\.0, and 10000000 in text_config"),
        ({"hidden_size": 2048}, r"hidden_size is 2048, and 5120 in text_config"),
    ],
)
def test_a_field_that_contradicts_the_text_part_is_refused(
    tmp_path: Path, beside: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{message}.*; leave out the one that is wrong"):
        read(tmp_path, QWEN3_6 | beside)


@pytest.mark.parametrize(
    "values",
    [
        {name: {"bits": 4, "group_size": 64} for name in ("quantization", "quantization_config")},
        {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}},
    ],
)
def test_a_checkpoint_of_mlx_is_refused_by_name(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantised for MLX, .* use the original"):
        read(tmp_path, QWEN3_NEXT | values)


def test_what_a_mixture_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, without(QWEN3_NEXT, "shared_expert_intermediate_size"))
    assert config == read(tmp_path, QWEN3_NEXT)


def test_a_model_type_from_before_transformers_had_the_architecture() -> None:
    (architecture,) = HUNYUAN["architectures"]
    old = transformers_config(HUNYUAN, architecture)
    assert (old.model_type, old.head_dim) == ("hunyuan_v1_moe", 128)
    new = without(HUNYUAN, "attention_head_dim") | {"model_type": "hunyuan_v1_moe", "head_dim": 128}
    assert old.to_dict() == transformers_config(new, architecture).to_dict()
    lacking = without(HUNYUAN, "attention_head_dim")
    with pytest.raises(UnsupportedModelError, match=r"computes with head_dim, which config\.json"):
        discover(model_class(architecture), transformers_config(lacking, architecture))
    with pytest.raises(CheckpointError, match=r"^config\.json .*field 'moe_topk'[^\n]*$"):
        transformers_config(HUNYUAN | {"moe_topk": "8" * 1000}, architecture)
    with pytest.raises(UnsupportedModelError, match="does not know the model_type 'hunyuan'"):
        transformers_config(HUNYUAN, "HunYuanForTomorrow")
