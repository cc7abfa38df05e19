"""Gemma 4 with quantised weights, against the same weights dequantised in transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import TOLERANCE, random_prompt, reference_logits, relative_error
from support.gemma_checkpoints import WIDER, case_of, checkpoint_of
from support.native_models import leave_inputs, load_native
from support.paged import PagedModel
from support.quantized import FORMATS, Format
from torch import Tensor

from minisgl.kernels.linear.nvfp4 import Nvfp4Product
from minisgl.kernels.linear.quantized import Fp8Product, Int4Product
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.models.gemma4 import GemmaForCausalLM
from minisgl.models.registry import read_model_config

NUM_TOKENS = 60

KINDS = {
    "fp8-": Fp8Product | Fp8Experts,
    "int4": Int4Product | Int4Experts,
    "awq-": Int4Product | Int4Experts,
    "nvfp": Nvfp4Product | Nvfp4Experts,
}


def load(folder: Path, **options: Any) -> GemmaForCausalLM:
    """Inputs are left as they are, as on a GPU without FP8 products."""
    config = read_model_config(folder, **options)
    model = load_native(GemmaForCausalLM, config, folder, max_seq_len=128)
    leave_inputs(model)
    return model


def write_quantized(format: Format, folder: Path) -> Any:
    """A checkpoint whose linear maps are quantised, those of experts one by one. Returns the model
    of transformers with the weights that it stands for."""
    source, model = checkpoint_of(WIDER)
    model = copy.deepcopy(model)
    stored: dict[str, Tensor] = {}

    def pack(name: str, weight: Tensor) -> Tensor:
        made = format.pack(weight)
        stored.update({f"{name}.{kind}": data for kind, data in made.tensors.items()})
        return made.weight

    with torch.no_grad():
        for name, weight in model.state_dict().items():
            path, _, kind = name.rpartition(".")
            if name.endswith("_proj.weight"):
                weight.copy_(pack(path, weight))
            elif path.endswith(".experts"):
                parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                for expert, stacked in enumerate(weight):
                    for part, matrix in zip(parts, stacked.chunk(len(parts)), strict=True):
                        matrix.copy_(pack(f"{path}.{expert}.{part}", matrix))
            elif name != "lm_head.weight":
                stored[name] = weight
    contiguous = {name: data.contiguous().clone() for name, data in stored.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(format.config)
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("format", ["ct-fp8-channel", "fp8-block", "ct-int4-64", "awq-64", "nvfp4"])
def test_logits_are_those_of_the_dequantized_weights(format: str, tmp_path: Path) -> None:
    reference = write_quantized(FORMATS[format], tmp_path)
    prompt = random_prompt(case_of("experts").spec, NUM_TOKENS)
    model = load(tmp_path)
    layer = model.layers["1"]
    kinds = KINDS[format.removeprefix("ct-")[:4]]
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "experts"):
        assert isinstance(layer.get_submodule(name).product, kinds)
    assert not isinstance(layer.get_submodule("router.proj").product, kinds)
    paged = PagedModel(model, read_model_config(tmp_path), page_size=16)
    logits = paged.run(prompt, prefill=40, chunk=20)
    assert relative_error(logits, reference_logits(reference, prompt)) < TOLERANCE


def test_a_checkpoint_is_quantized_while_it_loads() -> None:
    """As the same weights, rounded row by row; of experts, which are stacked, too."""
    case = case_of("experts")
    config = read_model_config(case.folder, quantization="fp8")
    model, rounded = load(case.folder, quantization="fp8"), load(case.folder)
    for path, weight in rounded.layers.named_parameters():
        if weight.dim() >= 2 and ".router." not in path:
            scale = weight.abs().amax(-1, keepdim=True) / 448
            weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    wanted, found = (
        PagedModel(each, config, page_size=16).run(case.token_ids) for each in (rounded, model)
    )
    assert relative_error(found, wanted) < TOLERANCE
    assert relative_error(wanted, case.logits) > 100 * TOLERANCE
