"""Checkpoints in MXFP8, as compressed-tensors writes and reads them, against transformers in
float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import MXFP8QuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from safetensors.torch import load_file
from support.checkpoints import (
    TOLERANCE,
    Spec,
    random_prompt,
    reference_logits,
    relative_error,
)
from support.paged import PagedModel
from support.parity import FOLDER, Case, check, three_prompts
from support.quantized import (
    Format,
    Packed,
    Quantized,
    edit_config,
    edit_tensors,
    load_plain,
    quantize,
)
from support.ranks import Rank
from torch import Tensor

from minisgl import LLM, SamplingParams
from minisgl.config import Activations
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.linear.quantized import Fp8Product
from minisgl.kernels.moe.quantized_experts import Fp8Experts
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models.formats.mxfp8 import Mxfp8
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM
from minisgl.verify.plain import plain_weights

SPECS = {
    "dense": Spec(
        "dense", "Qwen3ForCausalLM", vocab_size=2048, hidden_size=256, num_layers=2, tied=True
    ),
    # Of 96, of which two ranks have one and a half blocks each.
    "moe": Spec(
        "moe",
        "Qwen3MoeForCausalLM",
        vocab_size=2048,
        num_layers=2,
        extra={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
}
Q = "model.layers.0.self_attn.q_proj"


def mxfp8(preset: str) -> Format:
    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="mxfp8-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    ).model_dump(mode="json")

    def pack(w: Tensor) -> Packed:
        largest = w.unflatten(1, (-1, 32)).abs().amax(-1)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 8)
        tensors = MXFP8QuantizationCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
        wide = MXFP8QuantizationCompressor.decompress(dict(tensors), scheme)
        return Packed(tensors, wide["weight"].float())

    return Format(config, pack)


FORMATS = {"rounded": mxfp8("MXFP8"), "weights": mxfp8("MXFP8A16")}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
MINIMAX = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [1, 32],
    "ignored_layers": ["lm_head"],
}


@cache
def case_of(spec: str, format: str) -> Quantized:
    return quantize(SPECS[spec], FORMATS[format], Path(FOLDER.name) / f"mxfp8-{spec}-{format}")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[], Path]:
    """A checkpoint that a test may break."""
    return lambda: quantize(SPECS["dense"], FORMATS["rounded"], tmp_path).folder


def load(folder: Path, rank: int = 0, size: int = 1, load_format: str = "safetensors") -> CausalLM:
    model: Any = load_model(
        read_model_config(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,
        max_seq_len=128,
        ranks=Rank(rank, size),
    )
    return model


def products(model: CausalLM) -> list[Any]:
    modules = [module for module in model.modules() if isinstance(module, Linear | FusedExperts)]
    return [module.product for module in modules]


def logits(case: Quantized, model: CausalLM) -> Tensor:
    """Of a prompt in chunks and of decoded tokens."""
    paged = PagedModel(model, read_model_config(case.folder), page_size=16)
    return paged.run(random_prompt(case.spec, 40), prefill=32, chunk=20)


def compressed(part: str, **values: Any) -> dict[str, Any]:
    """A config of compressed-tensors with other fields of its weights or input_activations."""
    config: Any = FORMATS["rounded"].config
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, part: {**group[part], **values}}}}


GROUP = Activations.GROUP


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (FORMATS["rounded"].config, Mxfp8(activations=GROUP)),
        (FORMATS["weights"].config, Mxfp8()),
        (MODELOPT, Mxfp8(activations=GROUP)),
        ({"quant_method": "modelopt", "quantization": MODELOPT}, Mxfp8(activations=GROUP)),
        ({**MODELOPT, "group_size": 32}, Mxfp8(activations=GROUP)),
        (MINIMAX, Mxfp8(activations=GROUP, scale_name="weight_scale_inv")),
    ],
)
def test_what_a_config_says(config: dict[str, Any], wanted: Mxfp8, copy_of: Any) -> None:
    folder = copy_of()
    edit_config(folder, quantization_config=dict(config))
    assert read_model_config(folder).quantization == wanted
    assert read_model_config(folder, quantization="fp8").quantization == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed("weights", group_size=16), "weights: group_size 16 .*allowed: 32"),
        (compressed("weights", strategy="channel"), "weights: strategy 'channel'.*group"),
        (compressed("weights", scale_dtype="torch.float16"), "scale_dtype 'torch.float16'"),
        (compressed("weights", num_bits=6), "num_bits 6.*allowed: 8"),
        (compressed("input_activations", group_size=128), "input_activations: group_size 128"),
        (compressed("input_activations", num_bits=4), "input_activations: num_bits 4"),
        ({**MODELOPT, "group_size": 16}, "group_size 16 .*allowed: 32, as quant_algo says"),
        ({**MINIMAX, "activation_scheme": "static"}, "activation_scheme 'static'.*dynamic"),
        ({**MINIMAX, "weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\]"),
        ({**MINIMAX, "moe_quant_algo": "NVFP4"}, "moe_quant_algo"),
        ({"quant_method": "gguf"}, "are .*MXFP8 .*--quantization fp8"),
    ],
)
def test_what_is_refused_by_name(config: dict[str, Any], message: str, copy_of: Any) -> None:
    folder = copy_of()
    edit_config(folder, quantization_config=dict(config))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(folder)


@pytest.mark.parametrize(("spec", "size"), [("dense", 1), ("dense", 4), ("moe", 1), ("moe", 2)])
def test_each_rank_has_its_part_of_the_checkpoint(spec: str, size: int) -> None:
    case = case_of(spec, "rounded")
    for rank in range(size):
        model = load(case.folder, rank, size)
        found: dict[str, tuple[Tensor, Any, Any]] = {}
        for path, module in model.named_modules():
            if isinstance(module, Linear) and isinstance(module.product, Fp8Product):
                rows = module.product.weight.dequantized()
                parts = rows.split([part.size for part in module.parts.values()])
                for (name, outputs), w in zip(module.parts.items(), parts, strict=True):
                    found[f"{path.rpartition('.')[0]}.{name}"] = w, outputs, module.inputs
            if isinstance(module, FusedExperts):
                gate, up = module.product.gate_up.dequantized().chunk(2, dim=1)
                down, inner, hidden = module.product.down.dequantized(), module.inner, module.hidden
                for e in range(4):
                    found[f"{path}.{e}.gate_proj"] = gate[e], inner, hidden
                    found[f"{path}.{e}.up_proj"] = up[e], inner, hidden
                    found[f"{path}.{e}.down_proj"] = down[e], hidden, inner
        assert found.keys() == case.packed.keys()
        for name, (w, outputs, inputs) in found.items():
            rows = slice(outputs.first, outputs.first + outputs.size)
            columns = slice(inputs.first, inputs.first + inputs.size)
            assert torch.equal(w, case.packed[name].weight[rows, columns]), name


@pytest.mark.parametrize("spec", SPECS)
def test_logits_are_those_of_the_dequantised_weights(spec: str) -> None:
    case = case_of(spec, "weights")
    exact = reference_logits(load_plain(case), random_prompt(case.spec, 40))
    assert relative_error(logits(case, load(case.folder)), exact) < TOLERANCE


@pytest.mark.parametrize("spec", SPECS)
def test_inputs_are_rounded_in_groups_of_32_columns(spec: str) -> None:
    """And to nothing coarser: by the specification their scales would be powers of two."""
    case = case_of(spec, "rounded")
    model, compared = load(case.folder), 0
    for each in products(model):
        for product in each.products(1) if isinstance(each, Fp8Experts) else [each]:
            if not isinstance(product, Fp8Product):  # a router
                continue
            x, compared = torch.randn(5, product.weight.data.shape[1]), compared + 1
            groups = x.unflatten(1, (-1, 32))
            scale = groups.abs().amax(-1, keepdim=True) / 448
            rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
            wanted = rounded @ product.weight.dequantized().T
            assert relative_error(product(x), wanted) < TOLERANCE
    assert compared == 8
    exact = reference_logits(load_plain(case), random_prompt(case.spec, 40))
    assert relative_error(logits(case, model), exact) > 10 * TOLERANCE


@cache
def engine_case(spec: str) -> Case:
    case = case_of(spec, "weights")
    return three_prompts(case.spec, case.folder, load_plain(case))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("dense", {"max_prefill_length": 7, "page_size": 4, "padded": 4}),
        ("moe", {"tp": 2}),
        ("moe", {"tp": 2, "ep": True}),
        ("dense", {"model_impl": "adopted"}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(spec: str, options: dict[str, Any]) -> None:
    check(engine_case(spec), **options)


@pytest.mark.parametrize("spec", SPECS)
def test_the_library_generates_with_it(spec: str, tmp_path: Path) -> None:
    case = engine_case(spec)
    folder = shutil.copytree(case.folder, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    with LLM(str(folder), device="cpu", dtype="float32", num_pages=40) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        answers = llm.generate(case.prompts, params)
    wanted = [run.token_ids[:16] for run in case.runs]
    assert [list(answer.token_ids) for answer in answers] == wanted


@pytest.mark.parametrize("name", ["modelopt", "minimax"])
def test_the_other_spellings_hold_the_same_weights(name: str, copy_of: Any) -> None:
    folder, wanted = copy_of(), load(case_of("dense", "rounded").folder)

    def rename(tensors: dict[str, Tensor]) -> None:
        for old in [each for each in tensors if each.endswith("weight_scale")]:
            tensors[f"{old}_inv"] = tensors.pop(old).view(torch.float8_e8m0fnu)

    edit_config(folder, quantization_config=MODELOPT if name == "modelopt" else MINIMAX)
    if name == "minimax":
        edit_tensors(folder, rename)
    for weight, other in zip(load(folder).parameters(), wanted.parameters(), strict=True):
        assert torch.equal(weight, other)


def setting(name: str, value: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(torch.uint8).view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting(f"{Q}.weight_scale", 255), r"weight_scale holds scales that are not finite"),
        (setting(f"{Q}.weight", 0x7F), r"weight holds NaN"),
        (
            lambda t: t.pop(f"{Q}.weight_scale"),
            r"lacks weights: .*q_proj\.weight_scale",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].float()}),
            r"weight_scale has the dtype F32; expected U8 or F8_E8M0",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, 1:].contiguous()}),
            r"\[256, 7\]; the config asks for \[256, 8\] \(MXFP8 in blocks of 32",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], object], message: str, copy_of: Any
) -> None:
    folder = copy_of()
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_every_exponent_but_nan_is_the_power_that_it_stands_for(copy_of: Any) -> None:
    folder = copy_of()
    exponents = torch.arange(255, dtype=torch.uint8)

    def spread(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_scale"].view(-1)[:255] = exponents

    edit_tensors(folder, spread)
    product = load(folder).get_submodule("layers.0.self_attn.qkv_proj").product
    assert product.weight.scale.flatten()[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]


def test_facts_and_made_up_weights(tmp_path: Path) -> None:
    case = case_of("moe", "rounded")
    facts = read_model_config(case.folder).facts()
    assert facts.fp8_activations and facts.experts is not None
    # A byte of each weight, and a float32 scale of each block.
    assert facts.experts.weight_bytes("bfloat16") * 8 == facts.experts.num_weights * 9
    model = load(case.folder, load_format="dummy")
    assert 0.3 < logits(case, model).std() < 3


def test_verify_reads_the_weights_by_itself() -> None:
    case = case_of("dense", "rounded")
    plain, wanted = (
        plain_weights(case.folder, torch.float32),
        load_file(case.plain / "model.safetensors"),
    )
    assert plain.keys() == wanted.keys()
    assert all(torch.equal(plain[name], wanted[name]) for name in wanted)
