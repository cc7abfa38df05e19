"""Every architecture and rope against transformers in float32, however the step is cut."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    LLAMA3_ROPE,
    MODEL_TYPES,
    SPECS,
    TOLERANCE,
    Case,
    make_case,
    relative_error,
    spec_named,
)
from support.paged import PagedModel, PagedSequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.rope import inverse_frequencies
from minisgl.models.transformer import CausalLM

CPU = torch.device("cpu")


def load(
    folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "safetensors"
) -> tuple[CausalLM, ModelConfig]:
    config = read_model_config(folder)
    model = load_model(
        config, folder, dtype=dtype, device=CPU, load_format=load_format, max_seq_len=256
    )
    return model, config


@pytest.fixture(scope="module", params=SPECS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(scope="module")
def loaded(case: Case) -> tuple[CausalLM, ModelConfig]:
    return load(case.folder)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({}, id="whole"),
        pytest.param({"chunk": 7}, id="chunks"),
        pytest.param({"prefill": 0}, id="one-at-a-time"),
        pytest.param({"prefill": 61, "chunk": 20}, id="prompt-then-decode"),
    ],
)
def test_logits_of_one_sequence_match_transformers(
    case: Case, loaded: tuple[CausalLM, ModelConfig], page_size: int, cut: Mapping[str, int]
) -> None:
    logits = PagedModel(*loaded, page_size=page_size).run(case.token_ids, **cut)
    assert logits.dtype == torch.float32
    assert relative_error(logits, case.logits) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_logits_of_mixed_steps_match_transformers(
    case: Case, loaded: tuple[CausalLM, ModelConfig], page_size: int
) -> None:
    """Sequences at different places decode while others prefill chunks of 5, 7 and 13."""
    tokens = case.token_ids
    paged = PagedModel(*loaded, page_size=page_size)
    early, late = PagedSequence(), PagedSequence()
    paged.step(chunks=[(early, tokens[:40]), (late, tokens[:3])])
    prefilling = {size: PagedSequence() for size in (5, 7, 13)}
    for _ in range(9):
        decodes = [(sequence, tokens[sequence.length]) for sequence in (early, late)]
        chunks = [
            (sequence, tokens[sequence.length : sequence.length + size])
            for size, sequence in prefilling.items()
        ]
        starts = [sequence.length for sequence, _ in (*decodes, *chunks)]
        for start, logits in zip(starts, paged.step(decodes, chunks), strict=True):
            expected = case.logits[start : start + len(logits)]
            assert relative_error(logits, expected) < TOLERANCE


def test_loading_reports_progress(case: Case) -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(
        read_model_config(case.folder),
        case.folder,
        dtype=torch.float32,
        device=CPU,
        load_format="safetensors",
        max_seq_len=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (seen[-1][1],) * 2
    assert seen[-1][1] == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_half_precision_is_as_accurate_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    case = make_case(dataclasses.replace(spec_named(name), dtype=dtype), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([case.token_ids])).logits[0].float()
    model, config = load(tmp_path, dtype)
    assert config.dtype == str(dtype).removeprefix("torch.")
    logits = PagedModel(model, config, page_size=16).run(case.token_ids, chunk=40)

    def typical_error(of: torch.Tensor) -> float:
        return float((of - case.logits).square().mean().sqrt())

    assert 0 < typical_error(logits) < 1.3 * typical_error(expected)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_dummy_weights_are_seeded_and_of_moderate_size(name: str, tmp_path: Path) -> None:
    case = make_case(spec_named(name), tmp_path)
    runs = []
    for _ in range(2):
        model, config = load(tmp_path, load_format="dummy")
        runs.append(PagedModel(model, config, page_size=16).run(case.token_ids))
    assert torch.equal(*runs)
    assert 0.3 < runs[0].std() < 3
    assert len(set(runs[0].argmax(-1).tolist())) > 20


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3.1": {**LLAMA3_ROPE, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    "llama3.2": {**LLAMA3_ROPE, "rope_theta": 5e5, "factor": 32.0},
    "yarn": YARN,
    "yarn-odd-factor": {**YARN, "factor": 3.3},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-without-factor": {**YARN, "factor": None},
    "yarn-original-left-out": {"rope_type": "yarn", "factor": 2.0},
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_match_transformers(name: str, architecture: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
    rope = {"rope_theta": 1e6, **ROPES[name]}
    config = {**fields, "architectures": [architecture], "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_model_config(tmp_path).rope

    theirs = AutoConfig.for_model(MODEL_TYPES[architecture], **fields, rope_parameters=dict(rope))
    if ROPES[name]["rope_type"] == "default":
        pairs = torch.arange(0, 128, 2, dtype=torch.float64)
        expected, factor = (1e6 ** (-pairs / 128)).float(), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](theirs)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(ours, 128), expected, rtol=5e-7, atol=0)
