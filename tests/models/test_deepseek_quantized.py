"""Attention over latents with quantised weights, against the same weights dequantised in
transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import (
    LATENT_64,
    TOLERANCE,
    random_prompt,
    reference_logits,
    relative_error,
)
from support.native_models import leave_inputs, load_native
from support.paged import PagedModel
from support.quantized import FORMATS, load_plain, quantize

from minisgl.config import Quantized
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.nvfp4 import Nvfp4Product
from minisgl.kernels.linear.quantized import Fp8Product, Int4Product
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.models.deepseek import LatentConfig, LatentForCausalLM
from minisgl.models.formats import FP8_WHILE_LOADING
from minisgl.models.registry import read_model_config

KINDS = {
    "fp8-": Fp8Product | Fp8Experts,
    "int4": Int4Product | Int4Experts,
    "awq-": Int4Product | Int4Experts,
    "nvfp": Nvfp4Product | Nvfp4Experts,
}


def load(folder: Path, quantization: str | None = None) -> LatentForCausalLM:
    """Inputs are left as they are, as on a GPU without FP8 products."""
    config = read_model_config(folder, quantization=quantization)
    model = load_native(LatentForCausalLM, config, folder, max_seq_len=128)
    leave_inputs(model)
    model.prepare()
    return model


@pytest.mark.parametrize("format", ["fp8-block", "ct-fp8-channel", "ct-int4-64", "awq-64", "nvfp4"])
def test_logits_are_those_of_the_dequantized_weights(format: str, tmp_path: Path) -> None:
    case = quantize(LATENT_64, FORMATS[format], tmp_path)
    model, prompt = load(case.folder), random_prompt(LATENT_64, 60)
    kinds = KINDS[format.removeprefix("ct-")[:4]]
    layer = model.layers["1"]
    names = "self_attn.qkv_a_proj self_attn.q_b_proj self_attn.o_proj mlp.experts"
    for name in [*names.split(), "mlp.shared_experts.gate_up_proj"]:
        assert isinstance(layer.get_submodule(name).product, kinds)
    expanding = layer.get_submodule("self_attn.kv_b_proj")
    assert isinstance(expanding.product, DenseProduct)
    assert [name for name, _ in expanding.named_parameters()] == ["weight"]
    assert isinstance(layer.get_submodule("mlp.gate").product, DenseProduct)
    paged = PagedModel(model, read_model_config(case.folder), page_size=16)
    logits = paged.run(prompt, prefill=40, chunk=20)
    assert relative_error(logits, reference_logits(load_plain(case), prompt)) < TOLERANCE


def test_what_is_quantized_while_it_loads_is_counted(tmp_path: Path) -> None:
    """All linear maps of layers but the router and the one that is multiplied head by head."""
    case = quantize(LATENT_64, FORMATS["fp8-block"], tmp_path)
    model, config = load(case.plain, "fp8"), read_model_config(case.plain, quantization="fp8")
    products = [getattr(module, "product", None) for module in model.layers.modules()]
    found = sum(
        product.weight.data.numel() for product in products if isinstance(product, Fp8Product)
    )
    assert isinstance(config, LatentConfig) and config.quantization == FP8_WHILE_LOADING
    quantized = config.facts().quantized
    assert isinstance(quantized, Quantized) and quantized.num_weights == found
    assert isinstance(model.layers["1"].get_submodule("self_attn.kv_b_proj").product, DenseProduct)
