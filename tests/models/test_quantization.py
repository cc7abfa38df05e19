"""What the config of a quantised checkpoint means, and what of it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quantized import AWQ, FORMATS, FP8_BLOCK, GPTQ

from minisgl.config import Activations, EngineConfig
from minisgl.errors import CheckpointError, ConfigError, MinisglError, UnsupportedModelError
from minisgl.layers.formats import HeldExperts
from minisgl.models.config_reader import Fields
from minisgl.models.formats import FP8_WHILE_LOADING, QuantizedFormat, fp8
from minisgl.models.formats.fp8 import Fp8, Fp8Blocks
from minisgl.models.formats.int4 import Awq, CompressedInt4, Gptq, GptqV2
from minisgl.models.formats.int8 import Int8
from minisgl.models.formats.mixed import Mixed
from minisgl.models.formats.mxfp8 import Mxfp8
from minisgl.models.formats.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from minisgl.models.quantization import read_quantization
from minisgl.models.registry import read_model_config
from minisgl.shards import whole

TOKEN, GROUP = Activations.TOKEN, Activations.GROUP
STATIC = Fp8(of_rows=False, activations=Activations.STATIC, scales_inputs=True)
SCHEMES: dict[str, QuantizedFormat] = {
    "fp8-block": Fp8Blocks(scale_name="weight_scale_inv", activations=GROUP),
    "fp8-tensor": Fp8(of_rows=False, activations=TOKEN),
    "fp8-static": STATIC,
    "modelopt": STATIC,
    "modelopt-rows": Fp8(activations=TOKEN, flat=True),
    "fbgemm": Fp8(activations=TOKEN),
    "ct-fp8-channel": Fp8(activations=TOKEN),
    "ct-fp8-static": STATIC,
    "ct-fp8-block": Fp8Blocks(activations=GROUP),
    "ct-int8": Int8(),
    "ct-int4": CompressedInt4(group_size=128),
    "ct-int4-zeros": CompressedInt4(group_size=128, symmetric=False),
    "awq": Awq(group_size=128),
    "gptq": Gptq(group_size=128),
    "gptq-v2-32": GptqV2(group_size=32),
    "nvfp4": CompressedNvfp4(),
    "nvfp4-modelopt": ModelOptNvfp4(),
}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
# Of Qwen3.5's -GPTQ-Int4.
LEFT_ALONE: dict[str, Any] = {
    "lm_head": {},
    "model.language_model.embed_tokens": {},
    **{f"-:.*{name}.*": {} for name in ("attn", "shared_expert", "mtp", "visual")},
}
CHANNEL = FORMATS["ct-fp8-channel"].config
PACKED = FORMATS["ct-int4"].config
INT8 = FORMATS["ct-int8"].config
NVFP4 = FORMATS["nvfp4"].config


def read(
    folder: Path, config: object, model: str = "Qwen3-8B", option: str | None = None
) -> QuantizedFormat | None:
    values = {**MODELS[model], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder, quantization=option).quantization


def changed(config: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Of a compressed-tensors config, with other fields of its weights (w_), inputs (i_) and
    group (g_)."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    group = copy["config_groups"]["group_0"]
    places = {"w": group["weights"], "i": group["input_activations"], "g": group}
    for name, value in fields.items():
        place, _, rest = name.partition("_")
        if place in places and rest:
            places[place][rest] = value
        else:
            copy[name] = value
    return copy


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-8B"])
def test_the_scheme_of_a_config(name: str, model: str, tmp_path: Path) -> None:
    assert read(tmp_path, FORMATS[name].config, model) == SCHEMES[name]


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        # AutoFP8, Mistral
        ({**FORMATS["fp8-static"].config, "weight_block_size": None}, "fp8-static"),
        ({**FP8_BLOCK, "modules_to_not_convert": ["lm_head", "model.layers.0"]}, "fp8-block"),
        ({**FP8_BLOCK, "scale_fmt": "ue8m0"}, "fp8-block"),  # DeepSeek-V3.1
        ({**FP8_BLOCK, "fmt": "float8_e4m3fn"}, "fp8-block"),  # MiniMax-M2.5
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq"),
        ({**AWQ, "version": "GEMM", "backend": "autoawq", "do_fuse": False}, "awq"),
        ({**GPTQ, "damp_percent": 0.01, "true_sequential": True, "static_groups": False}, "gptq"),
        ({**GPTQ, "meta": {"quantizer": ["gptqmodel:1.1.0"]}, "dynamic": None}, "gptq"),
        ({**GPTQ, "method": "gptq", "format": "gptq", "pack_impl": "cpu"}, "gptq"),
        ({**GPTQ, "dynamic": LEFT_ALONE}, "gptq"),
        ({**GPTQ, "dynamic": {"-:.*mtp.*": {"bits": 16}}}, "gptq"),
        ({**AWQ, "dynamic": LEFT_ALONE}, "awq"),
        (
            {**AWQ, "checkpoint_format": "gemm", "format": "gemm", "method": "awq", "sym": False}
            | {"desc_act": False, "lm_head": False, "pack_dtype": "int32", "pack_impl": "cpu"}
            | {"meta": {"quantizer": ["gptqmodel:5.8.0"]}},
            "awq",
        ),
        (AUTO_ROUND, "gptq"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False}, "awq"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 16}}, "act_bits": 16}, "gptq"),
        (changed(FORMATS["ct-fp8-block"].config, w_block_structure="128x128"), "ct-fp8-block"),
        (changed(CHANNEL, i_strategy="tensor"), "ct-fp8-channel"),
        (changed(CHANNEL, w_observer="minmax", w_observer_kwargs={"a": 1}), "ct-fp8-channel"),
        (changed(CHANNEL, kv_cache_scheme={"num_bits": 8}), "ct-fp8-channel"),
        (changed(CHANNEL, sparsity_config={"format": "dense"}), "ct-fp8-channel"),
        (changed(CHANNEL, provider="auto-round"), "ct-fp8-channel"),
        (changed(INT8, w_observer="mse", sparsity_config={"format": "dense"}), "ct-int8"),
        (changed(NVFP4, g_input_activations=None), "nvfp4"),
        (changed(PACKED, w_actorder="static"), "ct-int4"),
        (changed(PACKED, w_actorder="weight"), "ct-int4"),
    ],
)
def test_other_spellings(config: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    assert read(tmp_path, config) == SCHEMES[scheme]


def test_a_config_of_the_kv_cache_alone(tmp_path: Path) -> None:
    config = changed(CHANNEL, config_groups={}, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert read(tmp_path, config) is None


def test_weights_alone_in_fp8(tmp_path: Path) -> None:
    config = changed(CHANNEL, g_input_activations=None)
    scheme = read(tmp_path, config)
    assert scheme is not None and scheme.activations == Activations.NONE


@pytest.mark.parametrize("kind", [Fp8, partial(Fp8, of_rows=False), Fp8Blocks, Mxfp8])
def test_experts_without_kernels_are_refused_on_a_gpu(
    kind: Callable[..., Fp8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference, which looks at the experts of each row, is in no CUDA graph."""
    held = HeldExperts(whole=2, number=2, hidden_size=256, inner=whole(128))
    kind().experts("experts", held, torch.float32)
    monkeypatch.setattr(fp8, "runs_triton", lambda device: True)
    kind(activations=GROUP).experts("experts", held, torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"no kernels for experts in (MX)?FP8"):
        kind().experts("experts", held, torch.float32)


@pytest.mark.parametrize(
    ("file", "values", "scheme"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq"),
    ],
)
def test_files_from_before_config_json_had_the_field(
    file: str, values: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(values))
    assert read(tmp_path, None) == SCHEMES[scheme]


# Each message names the field and its value, and what to use instead.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *[
        (
            {"quant_method": method},
            f"quant_method '{method}'.*are FP8.*--quantization fp8",
        )
        for method in ("bitsandbytes", "gguf", "hqq", "torchao", "modelopt FP8")
    ],
    ({"quant_method": "mxfp4"}, "MXFP4 experts .*gpt-oss alone"),
    ({"quant_method": "mxfp4", "dequantize": True}, "dequantize True"),
    ({**FP8_BLOCK, "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\].*128"),
    ({**FP8_BLOCK, "activation_scheme": "static"}, "activation_scheme 'static'.*dynamic"),
    ({**FP8_BLOCK, "fmt": "e5m2"}, "fmt 'e5m2'.*e4m3"),
    ({**FP8_BLOCK, "scale_fmt": "e5m2"}, "scale_fmt 'e5m2'.*ue8m0"),
    ({**AWQ, "bits": 8}, "bits 8.*4.*4-bit checkpoint"),
    ({**AWQ, "zero_point": False}, "zero_point False"),
    ({**AWQ, "version": "gemv"}, "version 'gemv'.*gemm"),
    ({**AWQ, "group_size": -1}, "group_size -1.*32, 64 or 128"),
    ({**AWQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic .*all quantised alike"),
    ({**AWQ, "checkpoint_format": "gemv"}, "checkpoint_format 'gemv'.*gemm"),
    ({**GPTQ, "desc_act": True}, "desc_act True.*without it, or as AWQ"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic .*all quantised alike"),
    ({**GPTQ, "dynamic": {**LEFT_ALONE, ".*up.*": {"bits": 8}}}, "dynamic .*quantised alike"),
    ({**GPTQ, "sym": False}, "sym False.*symmetric checkpoint.*AWQ"),
    ({**GPTQ, "bits": 3}, "bits 3.*4"),
    ({**GPTQ, "bits": 2}, "bits 2.*4"),
    ({**GPTQ, "bits": 8}, "bits 8.*4"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*gptq"),
    ({**GPTQ, "rotation": "hadamard"}, "rotation"),
    ({**AUTO_ROUND, "bits": 2}, "bits 2.*4"),
    ({**AUTO_ROUND, "sym": False}, "sym False.*packed as AWQ"),
    ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type 'mx_fp'.*int"),
    ({**AUTO_ROUND, "act_bits": 8}, "act_bits 8.*only the weights"),
    ({**AUTO_ROUND, "packing_format": "auto_round:gguf"}, "packing_format.*auto_round:auto_gptq"),
    ({**AUTO_ROUND, "extra_config": {"model.layers.0": {"bits": 8}}}, "extra_config.*alike"),
    (changed(CHANNEL, transform_config={"config_groups": {}}), "transform_config.*transforms"),
    (changed(CHANNEL, sparsity_config={"format": "sparse-24"}), "sparsity_config"),
    (changed(CHANNEL, format="nvfp4-pack-quantized"), "num_bits 8.*allowed: 4: use an NVFP4"),
    (changed(NVFP4, w_group_size=32), "weights: group_size 32 .*allowed: 16"),
    (changed(NVFP4, w_strategy="group"), "strategy 'group'.*tensor_group"),
    (changed(NVFP4, i_num_bits=8), "input_activations: num_bits 8.*allowed: 4"),
    (changed(NVFP4, w_scale_dtype="torch.uint8"), "scale_dtype 'torch.uint8'.*float8_e4m3fn"),
    (changed(CHANNEL, format="mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized'.*nvfp4"),
    (changed(CHANNEL, format="int-quantized"), "type 'float'.*allowed: int in int-quantized"),
    (changed(INT8, i_dynamic=False), "input_activations: dynamic False.*dynamic scales, or an FP8"),
    (changed(INT8, i_dynamic="local"), "dynamic 'local'.*dynamic scales"),
    (changed(INT8, i_symmetric=False), "input_activations: symmetric False.*symmetric checkpoint"),
    (changed(INT8, w_symmetric=False), "weights: symmetric False.*symmetric checkpoint, or an FP8"),
    (changed(INT8, i_strategy="tensor"), "strategy 'tensor'.*token"),
    (changed(INT8, w_strategy="group"), "strategy 'group'.*channel or tensor"),
    (changed(INT8, w_num_bits=4), "num_bits 4.*allowed: 8 in int-quantized: use a W8A8"),
    (changed(INT8, g_input_activations=None), "input_activations .*rounded per token"),
    (changed(CHANNEL, g_format="mixed-precision"), "format 'mixed-precision'"),
    (changed(CHANNEL, g_output_activations={"num_bits": 8}), "output_activations"),
    (changed(CHANNEL, w_num_bits=4), "num_bits 4.*8"),
    (changed(CHANNEL, w_strategy="tensor_group"), "strategy 'tensor_group'"),
    (changed(CHANNEL, i_strategy="group"), "strategy 'group'.*token or tensor"),
    (changed(CHANNEL, i_num_bits=4), "num_bits 4"),
    (changed(CHANNEL, w_new_field="on"), "new_field"),
    (changed(PACKED, w_num_bits=8), "num_bits 8.*4"),
    (changed(PACKED, w_actorder="group"), "actorder 'group'.*static or weight"),
    (changed(PACKED, w_strategy="channel"), "strategy 'channel'.*group"),
    (changed(PACKED, w_group_size=96), "group_size 96"),
    (changed(PACKED, g_input_activations={"type": "float", "num_bits": 8}), "inputs are not"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config)


def test_two_schemes_in_one_model_are_refused(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CHANNEL))
    packed = PACKED["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**packed, "format": "pack-quantized"}
    with pytest.raises(UnsupportedModelError, match=r"group_0 is FP8 .*group_1 is INT4"):
        read(tmp_path, config)
    # The same in two groups is one.
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    assert read(tmp_path, config) == SCHEMES["ct-fp8-channel"]


# As its releases write it, the last into a file of its own.
MODELOPT: list[dict[str, Any]] = [
    {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            }
        },
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
    },
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    {
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    },
]


@pytest.mark.parametrize("config", MODELOPT)
def test_modelopt_is_known_by_what_it_writes(config: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, config) == SCHEMES["modelopt"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    assert read(tmp_path, None) == SCHEMES["modelopt"]
    rows = json.loads(json.dumps(config).replace('"FP8"', '"FP8_PER_CHANNEL_PER_TOKEN"', 1))
    assert read(tmp_path, rows) == SCHEMES["modelopt-rows"]


# Of nvidia/DeepSeek-V3.1-NVFP4, into a file of its own; and as the parts of mixed ones are called.
PUBLISHED: list[dict[str, Any]] = [
    {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "*.mlp.shared_expert.*"],
    },
    {"quant_algo": "W4A16_NVFP4", "group_size": 16},
]


@pytest.mark.parametrize("config", PUBLISHED)
def test_nvfp4_of_modelopt(config: dict[str, Any], tmp_path: Path) -> None:
    producer = {"producer": {"name": "modelopt", "version": "0.39.0"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(producer | {"quantization": config}))
    assert read(tmp_path, None) == ModelOptNvfp4()
    assert read(tmp_path, config) == ModelOptNvfp4()
    with pytest.raises(UnsupportedModelError, match=r"group_size 32 .*allowed: 16"):
        read(tmp_path, config | {"group_size": 32})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MODELOPT[0], "quant_algo": "NVFP4"}, "num_bits 8 .*allowed: 4, as quant_algo says"),
        ({**MODELOPT[1], "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'.*are FP8 .*ModelOpt"),
        ({**MODELOPT[1], "pre_quant_scale": True}, "pre_quant_scale"),
        ({**MODELOPT[1], "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4'"),
        ({"producer": {"name": "modelopt"}}, "quant_algo None"),
        (
            MODELOPT[1] | {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            "group_0: weights: num_bits 4 is not supported; allowed: 8, as quant_algo says",
        ),
        (
            MODELOPT[1] | {"config_groups": {"a": {"input_activations": {"type": "int"}}}},
            "a: input_activations: type 'int'",
        ),
    ],
)
def test_other_schemes_of_modelopt_are_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    with pytest.raises(UnsupportedModelError, match=f"hf_quant_config.*{message}"):
        read(tmp_path, None)


MIXED: dict[str, Any] = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["mtp*"],
    "quantized_layers": {
        "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
        "model.language_model.layers.1.self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.language_model.layers.1.mlp.down_proj": {"quant_algo": None},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}


def layers_of(**algos: str | None) -> dict[str, Any]:
    """A config of layers by numbers, such as n0, with one map each."""
    names = {f"model.layers.{key[1:]}.mlp.up_proj": algo for key, algo in algos.items()}
    layers = {name: {"quant_algo": algo} for name, algo in names.items()}
    return MIXED | {"quantized_layers": layers}


def test_several_formats_of_modelopt(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": MIXED}))
    scheme = read(tmp_path, None)
    assert isinstance(scheme, Mixed) and scheme.formats == (STATIC, ModelOptNvfp4())
    assert scheme == read(tmp_path, MIXED | {"producer": {"name": "modelopt"}})
    assert str(scheme) == f"{STATIC}, beside {ModelOptNvfp4()}"
    assert scheme.rounding == STATIC
    assert scheme.at("layers.0.self_attn.q_proj") == STATIC
    assert scheme.at("layers.0.mlp.experts.7.up_proj") == ModelOptNvfp4()
    assert scheme.at("layers.1.self_attn.q_proj") == ModelOptNvfp4()
    assert scheme.at("layers.1.mlp.down_proj") is None
    assert scheme.at("lm_head") == ModelOptNvfp4()  # as of nvidia/Qwen3.6-35B-A3B-NVFP4
    assert scheme.at("layers.0.self_attn.o_proj") is None
    with pytest.raises(ConfigError, match=r"--quantization fp8: .*already: FP8 .*beside NVFP4"):
        read(tmp_path, None, option="fp8")
    # Groups say no more.
    bits = {"num_bits": 4, "type": "float"}
    groups = {"group_0": {"weights": {**bits, "num_bits": 8}}, "group_1": {"weights": bits}}
    assert read(tmp_path, MIXED | {"config_groups": groups}) == scheme
    with pytest.raises(UnsupportedModelError, match=r"num_bits 6 .*allowed: 4 or 8, as quant"):
        read(tmp_path, MIXED | {"config_groups": {"a": {"weights": {**bits, "num_bits": 6}}}})


def test_one_format_of_some_layers_is_read_as_that_of_all(tmp_path: Path) -> None:
    scheme = read(tmp_path, layers_of(n0="NVFP4", n1=None, n2="W4A16_NVFP4"))
    assert scheme == ModelOptNvfp4()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (layers_of(n0="FP8", n1="W4A8_AWQ"), r"layers\.1\.mlp\.up_proj: quant_algo 'W4A8_AWQ'"),
        (layers_of(n0="FP8", n1="MIXED_PRECISION"), "up_proj: quant_algo 'MIXED_PRECISION'"),
        (layers_of(n0="FP8", n1="MXFP8"), "FP8 with one .* and MXFP8 .*in one model are not"),
        (layers_of(n0="FP8", n1="FP8_PER_CHANNEL_PER_TOKEN"), "per matrix.* per row.* one model"),
        (
            MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8", "pre_quant_scale": True}}},
            "a: the field pre_quant_scale",
        ),
        (
            MIXED | {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}},
            "a: group_size 32 .*allowed: 16",
        ),
        (MIXED | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4'"),
        (MIXED | {"awq_block_size": 128}, "awq_block_size"),
        (
            MIXED | {"quantized_layers": {"model.embed_tokens": {"quant_algo": "FP8"}}},
            "embed_tokens: quant_algo 'FP8' is not supported; use .*leaves all else alone",
        ),
    ],
)
def test_other_mixtures_of_modelopt_are_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize("layers", [None, {}, {"a": {}}, {"a": "FP8"}, ["a"], 7])
def test_a_mixture_without_layers_is_said_to_be_broken(layers: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantized_layers"):
        read(tmp_path, MIXED | {"quantized_layers": layers})


def test_a_text_part_says_how_it_is_quantised(tmp_path: Path) -> None:
    part = {"text_config": {"quantization_config": PACKED}}
    assert read_quantization(Fields(part, "config.json"), tmp_path) == SCHEMES["ct-int4"]
    broken = {"text_config": {"quantization_config": "fp8"}}
    with pytest.raises(CheckpointError, match="text_config: quantization_config is not"):
        read_quantization(Fields(broken, "config.json"), tmp_path)


@pytest.mark.parametrize("config", ["fp8", 7, [1], {"quant_method": "compressed-tensors"}])
def test_a_broken_config_is_said_to_be_one(config: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        read(tmp_path, config)


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
ODD_VALUES = ODD | st.lists(ODD, max_size=2) | st.dictionaries(st.text(max_size=3), ODD, max_size=2)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), name=st.sampled_from(list(FORMATS)), value=ODD_VALUES)
def test_any_value_is_read_or_refused_in_a_sentence(
    data: st.DataObject, name: str, value: object, tmp_path: Path
) -> None:
    config = json.loads(json.dumps(FORMATS[name].config))
    place = config
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            place[key] = value
            break
        place = place[key]
    try:
        read(tmp_path, config)
    except MinisglError as error:
        assert str(error)


# -- the option -----------------------------------------------------------------------------------


def test_the_option_quantises_what_is_not_quantised(tmp_path: Path) -> None:
    assert read(tmp_path, None, option="fp8") == FP8_WHILE_LOADING
    assert read(tmp_path, None) is None
    assert read(tmp_path, FP8_BLOCK, option="fp8") == SCHEMES["fp8-block"]
    with pytest.raises(ConfigError, match=r"--quantization fp8: .*already: INT4 in groups of 128"):
        read(tmp_path, AWQ, option="fp8")


def test_the_option_has_one_value() -> None:
    assert EngineConfig(quantization="fp8").quantization == "fp8"
    with pytest.raises(ConfigError, match="--quantization int4: allowed: fp8"):
        EngineConfig(quantization="int4")
