"""Logits in float32 of models in bfloat16, against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adopted_checkpoints import write_checkpoint
from support.checkpoints import Spec, make_checkpoint, spec_named
from support.gemma_checkpoints import checkpoint_of
from support.quantized import FORMATS, quantize

from minisgl.errors import UnsupportedModelError
from minisgl.models.float32_head import widen_head
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM


def load(folder: Path, model_impl: str) -> Any:
    return load_model(
        read_model_config(folder, model_impl=model_impl),
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=64,
    )


def weight_of(model: Any) -> torch.Tensor:
    """Of the head, which may be the embedding."""
    if isinstance(model, CausalLM):
        found: Any = model.lm_head or model.embed_tokens
    else:
        named = dict(model.module.named_parameters())
        heads = [name for name in named if "lm_head" in name]
        return named[heads[0]] if heads else model.module.get_input_embeddings().weight
    return found.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_impl", ["native", "adopted"])
@pytest.mark.parametrize("name", ["llama", "llama3"])  # with a head, and tied to the embedding
def test_float32_logits_are_rounded_in_their_sums_alone(
    tmp_path: Path, name: str, model_impl: str
) -> None:
    model = load(make_checkpoint(spec_named(name), tmp_path / name), model_impl)
    check(model, None)


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    spec = Spec("untied", "Qwen3ForCausalLM", hidden_size=256, num_layers=1)
    case = quantize(spec, FORMATS["ct-fp8-channel"], tmp_path, with_head=True)
    with pytest.raises(UnsupportedModelError, match=r"--head-dtype float32 .* quantised them"):
        widen_head(load(case.folder, "native"))


def test_a_soft_cap_is_applied_in_float32(tmp_path: Path) -> None:
    folder, reference = checkpoint_of("dense")
    check(load(folder, "native"), reference.config.final_logit_softcapping)
    folder = write_checkpoint("Gemma2ForCausalLM", tmp_path / "gemma2")
    cap = json.loads((folder / "config.json").read_text())["final_logit_softcapping"]
    check(load(folder, "adopted"), cap)


def check(model: Any, cap: float | None) -> None:
    weight = weight_of(model)
    hidden = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = hidden.double() @ weight.double().t()
    if cap is not None:
        exact = cap * torch.tanh(exact / cap)
    rounded = model.logits(hidden)
    assert rounded.dtype == torch.bfloat16
    widen_head(model)
    model.prepare()
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    scale = exact.abs().max()
    assert (logits - exact).abs().max() < 1e-6 * scale < (rounded - exact).abs().max()
