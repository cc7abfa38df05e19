"""The configs for benchmarks: those of public models, and of their quantised checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dummy_config import DRAFTERS, MODELS, QUANTIZATIONS, config_of
from support.folders import SCRIPTS

from minisgl.drafting.networks.loading import read_network
from minisgl.models.registry import read_model_config

SCRIPT = SCRIPTS / "tools" / "dummy_config.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("model", MODELS)
def test_the_config_of_a_model_is_read_by_the_engine(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    text = config_of(model).get("text_config", MODELS[model])
    assert read_model_config(tmp_path).hidden_size == text["hidden_size"]


# What published configs have beside the sizes, where they have it.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"torch_dtype": "bfloat16", "rope_theta": 1_000_000},
    "Llama-3.1-8B": {"torch_dtype": "bfloat16", "rope_theta": 500_000.0},
    "Qwen3.8-27B": {
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
    },
    "GLM-4.7-Flash": {"partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("model", AS_PUBLISHED)
def test_fields_are_where_publishers_put_them(model: str) -> None:
    written, expected = config_of(model), AS_PUBLISHED[model]
    assert {name: written.get(name, "missing") for name in expected} == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_config_of_a_drafter_fits_its_model(tmp_path: Path, name: str) -> None:
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    assert run(name.removesuffix("-eagle3"), model).returncode == 0
    assert run(name, drafter).returncode == 0
    found = read_network(drafter, read_model_config(model))
    assert found.kind == "eagle3"
    refused = run(name, drafter, "--quantization", "awq")
    assert refused.returncode == 2 and "is a drafter" in refused.stderr


def test_the_script_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    plain, quantised = tmp_path / "new" / "plain", tmp_path / "quantised"
    assert run("Qwen3-0.6B", plain).returncode == 0
    assert run("Qwen3-30B-A3B", quantised, "--quantization", "awq").returncode == 0
    assert json.loads((plain / "config.json").read_text()) == MODELS["Qwen3-0.6B"]
    found = json.loads((quantised / "config.json").read_text())
    assert found.pop("quantization_config") == QUANTIZATIONS["awq"]
    assert found == MODELS["Qwen3-30B-A3B"]


@pytest.mark.parametrize("arguments", [("GPT-2", "x"), ("Qwen3-8B", "x", "--quantization", "int3")])
def test_what_there_is_no_config_of_is_refused_by_name(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "invalid choice" in result.stderr


# The fields that decide how a checkpoint is read, of the formats as their tools write them.
EXPECTED: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8-channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


@pytest.mark.parametrize("quantization", EXPECTED)
def test_a_quantised_config_says_its_format(quantization: str) -> None:
    assert {*EXPECTED} | {"none"} == {*QUANTIZATIONS}
    written = config_of("Qwen3-8B", quantization)["quantization_config"]
    expected = EXPECTED[quantization]
    assert {name: written[name] for name in expected} == expected
    if quantization == "fp8-tensor":
        assert "weight_block_size" not in written


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ("fp8-block", "FP8 with blocks of 128x128, inputs rounded per token and 128 columns"),
        ("fp8-channel", "FP8 with one scale per row, inputs rounded per token"),
        ("fp8-tensor", "FP8 with one scale per matrix, inputs rounded with the checkpoint's scale"),
        ("int8", "INT8 with one scale per row, inputs rounded per token"),
        ("int4", "INT4 in groups of 128 (compressed-tensors)"),
        ("awq", "INT4 in groups of 128 with zero points (awq)"),
        ("gptq", "INT4 in groups of 128 (gptq)"),
        ("nvfp4", "NVFP4 in blocks of 16, inputs as they are"),
    ],
)
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-8B"])
def test_the_engine_reads_a_quantised_config(
    tmp_path: Path, model: str, quantization: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(model, quantization)))
    assert str(read_model_config(tmp_path).quantization) == told


@pytest.mark.parametrize(
    ("quantization", "weights", "inputs"),
    [("fp8-channel", (8, "float", "channel"), "token"), ("int4", (4, "int", "group"), None)],
)
def test_compressed_tensors_say_their_numbers(
    quantization: str, weights: tuple[object, ...], inputs: str | None
) -> None:
    group = QUANTIZATIONS[quantization]["config_groups"]["group_0"]
    assert tuple(group["weights"][name] for name in ("num_bits", "type", "strategy")) == weights
    found = group["input_activations"]
    assert (found and found["strategy"]) == inputs
