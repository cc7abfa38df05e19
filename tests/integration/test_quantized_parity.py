"""Quantised checkpoints against transformers in float32, on the same weights dequantised."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    TOLERANCE,
    Spec,
    random_prompt,
    reference_logits,
    relative_error,
)
from support.paged import PagedModel
from support.parity import FOLDER, Case, check, three_prompts
from support.quantized import FORMATS, Quantized, load_plain, mixture, quantize, round_inputs

from minisgl.config import Activations
from minisgl.kernels.linear import nvfp4
from minisgl.kernels.linear.quantized import Fp8Product, Fp8Weights, Int4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts
from minisgl.kernels.moe.reference import ByRouter, Routing
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models import packing
from minisgl.models.formats.nvfp4 import CompressedNvfp4
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

GROSS = 1000 * TOLERANCE
NUM_TOKENS = 40
ROUTING = Routing(top_k=2, normalize=True)
SIZES: dict[str, Any] = {"hidden_size": 256, "num_layers": 2, "tied": True}
SPECS = {
    "qwen3": Spec("qwen3", "Qwen3ForCausalLM", **SIZES),
    "small": Spec("small", "Qwen3ForCausalLM", num_layers=2),
    # 192 and 384: blocks of 128 do not divide them, nor what two ranks have of them.
    "odd": Spec("odd", "Qwen3ForCausalLM", hidden_size=192, num_heads=6, num_layers=2, tied=True),
    "llama": Spec("llama", "LlamaForCausalLM", **SIZES),
    "mistral": Spec("mistral", "MistralForCausalLM", extra={"sliding_window": None}, **SIZES),
    "qwen2": Spec("qwen2", "Qwen2ForCausalLM", **SIZES),
    # Gates and ups are one map.
    "phi3": Spec(
        "phi3", "Phi3ForCausalLM", hidden_size=256, num_layers=2, extra={"pad_token_id": None}
    ),
    "moe": Spec(
        "moe",
        "Qwen3MoeForCausalLM",
        num_layers=2,
        extra={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    # A map of a delta net has several of the parts that ranks divide.
    "hybrid": Spec(
        "hybrid",
        "Qwen3_5ForCausalLM",
        head_dim=128,
        extra={
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        rope={"partial_rotary_factor": 0.25},
        **SIZES,
    ),
    # Of 96, which is less than a block.
    "narrow-moe": Spec(
        "narrow-moe",
        "Qwen3MoeForCausalLM",
        num_layers=2,
        extra={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
}
UNTIED = Spec("untied", "Qwen3ForCausalLM", hidden_size=256, num_layers=2, vocab_size=512)
# Every format, and every family with some.
CASES = [
    ("qwen3", "fp8-block"),
    ("odd", "fp8-block"),
    ("moe", "fp8-block"),
    ("narrow-moe", "fp8-block"),
    ("llama", "fp8-tensor"),
    ("mistral", "fp8-static"),
    ("moe", "fp8-static"),
    ("llama", "modelopt"),
    ("moe", "modelopt-rows"),
    ("llama", "fbgemm"),
    ("qwen2", "ct-fp8-channel"),
    ("moe", "ct-fp8-channel"),
    ("qwen3", "ct-fp8-static"),
    ("llama", "ct-fp8-block"),
    ("qwen2", "ct-int8"),
    ("narrow-moe", "ct-int8"),
    ("odd", "ct-fp8-weights"),
    ("qwen2", "ct-int4"),
    ("odd", "ct-int4-64"),
    ("mistral", "ct-int4-zeros"),
    ("moe", "ct-int4-zeros-32"),
    ("llama", "awq"),
    ("moe", "awq-64"),
    ("qwen3", "gptq"),
    ("moe", "gptq-v2-32"),
    ("qwen2", "nvfp4"),
    ("moe", "nvfp4"),
    ("moe", "nvfp4-modelopt"),
    ("moe", "modelopt-mixed"),
]


@cache
def case_of(spec: str, format: str) -> Quantized:
    folder = Path(FOLDER.name) / f"{spec}-{format}"
    return quantize(SPECS[spec], FORMATS[format], folder, keeps=is_to_gates)


def is_to_gates(path: str) -> bool:
    """Whether a linear map is one of a delta net to its gates, which published checkpoints keep."""
    return path.endswith(("in_proj_a", "in_proj_b"))


def load(folder: Path, model_impl: str = "auto") -> Any:
    return load_model(
        read_model_config(folder, model_impl=model_impl),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=128,
    )


def logits_of(case: Quantized, model: CausalLM | None = None) -> torch.Tensor:
    """Of a prompt in chunks and of decoded tokens."""
    paged = PagedModel(model or load(case.folder), read_model_config(case.folder), page_size=16)
    return paged.run(random_prompt(case.spec, NUM_TOKENS), prefill=32, chunk=20)


@cache
def exact_logits(spec: str, format: str) -> torch.Tensor:
    """Of the dequantised weights, and inputs as they are."""
    case = case_of(spec, format)
    return reference_logits(load_plain(case), random_prompt(case.spec, NUM_TOKENS))


def leave_inputs_alone(model: CausalLM) -> CausalLM:
    """As on a GPU without FP8 products."""
    for product in products_of(model).values():
        if isinstance(product, Fp8Product | Fp8Experts):
            product.activations = Activations.NONE
    return model


def products_of(model: CausalLM) -> dict[str, Any]:
    return {
        name: module.product
        for name, module in model.named_modules()
        if isinstance(module, Linear | FusedExperts)
    }


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_logits_are_those_of_the_dequantized_weights(spec: str, format: str) -> None:
    case = case_of(spec, format)
    model = leave_inputs_alone(load(case.folder))
    assert relative_error(logits_of(case, model), exact_logits(spec, format)) < TOLERANCE


def test_each_linear_map_has_a_format_of_its_own(tmp_path: Path) -> None:
    """As ModelOpt searches for them: some layers in FP8, others in NVFP4, and some maps as they
    are. Phi-3 has queries, keys and values in one."""
    of_layers = mixture(lambda path: "FP8" if ".layers.0." in path else "NVFP4")
    for spec in ("qwen3", "phi3"):
        folder = tmp_path / spec
        case = quantize(SPECS[spec], of_layers, folder, keeps=lambda path: "1.self_attn" in path)
        model = load(case.folder)
        module = leave_inputs_alone(getattr(model, "module", model))
        products = {type(product).__name__ for product in products_of(module).values()}
        assert {"Fp8Product", "Nvfp4Product", "DenseProduct"} <= products
        logits, prompt = logits_of(case, model), random_prompt(case.spec, NUM_TOKENS)
        assert relative_error(logits, reference_logits(load_plain(case), prompt)) < TOLERANCE


@pytest.mark.parametrize("format", ["ct-fp8-channel", "gptq", "nvfp4", "modelopt-mixed"])
def test_logits_of_a_quantised_head(format: str, tmp_path: Path) -> None:
    case = quantize(UNTIED, FORMATS[format], tmp_path, with_head=True)
    model = leave_inputs_alone(load(case.folder))
    exact = reference_logits(load_plain(case), random_prompt(case.spec, NUM_TOKENS))
    assert relative_error(logits_of(case, model), exact) < TOLERANCE


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
def test_a_quantised_head_gives_the_tokens_of_transformers(
    options: dict[str, int], tmp_path: Path
) -> None:
    case = quantize(UNTIED, FORMATS["nvfp4"], tmp_path, with_head=True)
    check(three_prompts(case.spec, case.folder, load_plain(case)), **options)


ROUNDING = [(spec, format) for spec, format in CASES if FORMATS[format].rounds]
# The linear maps of one input, by the module that computes them together.
MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


@pytest.mark.parametrize(("spec", "format"), ROUNDING)
@torch.inference_mode()
def test_inputs_are_rounded_as_by_the_reference(
    spec: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same inputs: through layers, what float32 changes in the last place may be rounded
    to another FP8 number."""
    case = case_of(spec, format)
    reference, ours = load_plain(case), products_of(load(case.folder))
    round_inputs(case, reference, monkeypatch)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in reference.named_modules():

        def record(_: object, inputs: Any, output: Any, name: str = name) -> None:
            if isinstance(output, torch.Tensor):
                seen[name.removeprefix("model.")] = inputs[0], output

        module.register_forward_hook(record)
    prompt = random_prompt(case.spec, NUM_TOKENS)
    rounded = reference_logits(reference, prompt)
    for layer, (merged, parts) in itertools.product(range(2), MERGED.items()):
        names = [f"layers.{layer}.{part}" for part in parts]
        if names[0] in seen:
            x = seen[names[0]][0]
            wanted = torch.cat([seen[name][1] for name in names], dim=-1)
            got = ours[f"layers.{layer}.{merged}"](x.flatten(0, -2))
            assert relative_error(got, wanted.flatten(0, -2)) < TOLERANCE, merged
    for name in [name for name in seen if name.endswith("mlp.experts")]:
        router = reference.get_submodule(f"model.{name.replace('experts', 'gate')}")
        x, wanted = seen[name]
        got = ours[name].reference(
            x, ByRouter(torch.nn.functional.linear(x, router.weight), ROUTING)
        )
        assert relative_error(got, wanted) < TOLERANCE, name
    # It matters, and the whole model does it.
    exact, whole = exact_logits(spec, format), logits_of(case)
    assert relative_error(rounded, exact) > 10 * TOLERANCE
    assert (whole - rounded).square().mean() < 0.25 * (whole - exact).square().mean()


@pytest.mark.parametrize(
    ("spec", "format"),
    [("llama", "awq"), ("hybrid", "ct-fp8-weights"), ("hybrid", "ct-int4"), ("hybrid", "awq")],
)
def test_greedy_tokens_are_those_of_transformers(spec: str, format: str) -> None:
    case = engine_case(spec, format)
    check(case)
    check(case, max_prefill_length=7, page_size=4, padded=4)


@pytest.mark.parametrize(
    ("spec", "format"),
    [
        ("odd", "ct-fp8-weights"),
        ("moe", "ct-int4-zeros-32"),
        ("hybrid", "ct-fp8-weights"),
        ("moe", "nvfp4"),
        ("hybrid", "nvfp4-modelopt"),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(spec: str, format: str) -> None:
    """Of the first, a rank's part is one and a half blocks."""
    check(engine_case(spec, format), tp=2)


@pytest.mark.parametrize(
    ("spec", "format", "tp"),
    [
        *(("small", "ct-int8", 1), ("small", "ct-int8", 2), ("moe", "ct-int8", 2)),
        *(("moe", "modelopt-mixed", 2), ("hybrid", "modelopt-mixed", 1)),
        ("hybrid", "modelopt-mixed", 2),
    ],
)
def test_greedy_tokens_are_those_of_rounded_inputs(
    spec: str, format: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank rounds the inputs that it has."""
    case = case_of(spec, format)
    reference = load_plain(case)
    round_inputs(case, reference, monkeypatch, tp)
    check(three_prompts(case.spec, case.folder, reference), tp=tp)


@pytest.mark.parametrize(
    ("spec", "format", "tp"),
    [
        ("llama", "awq", 1),
        ("moe", "ct-int4-zeros-32", 1),
        ("odd", "ct-fp8-weights", 2),
        ("phi3", "awq", 2),
        ("moe", "nvfp4-modelopt", 1),
    ],
)
def test_the_code_of_transformers_runs_quantized_weights(spec: str, format: str, tp: int) -> None:
    check(engine_case(spec, format), model_impl="adopted", tp=tp)


@pytest.mark.parametrize(
    ("spec", "format"),
    [
        *(("moe", "fp8-block"), ("mistral", "fp8-static"), ("moe", "ct-int8")),
        *(("llama", "ct-int8"), ("moe", "modelopt-mixed")),
    ],
)
def test_the_code_of_transformers_rounds_inputs_as_ours_does(spec: str, format: str) -> None:
    case = case_of(spec, format)
    adopted = load(case.folder, model_impl="adopted")
    assert relative_error(logits_of(case, adopted), logits_of(case)) < TOLERANCE


@cache
def engine_case(spec: str, format: str) -> Case:
    case = case_of(spec, format)
    return three_prompts(case.spec, case.folder, load_plain(case))


# -- mistakes -------------------------------------------------------------------------------------


def swap_nibbles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packing, "AWQ_ORDER", list(range(8)))


def transpose_scales(patch: pytest.MonkeyPatch) -> None:
    block_scales = packing.block_scales
    patch.setattr(packing, "block_scales", lambda *args, **named: square(block_scales, args, named))


def square(block_scales: Callable[..., torch.Tensor], args: Any, named: Any) -> torch.Tensor:
    scale, *rest = args
    return block_scales(scale.T if scale.shape[0] == scale.shape[1] else scale, *rest, **named)


def divide_by_scales(patch: pytest.MonkeyPatch) -> None:
    dequantized = Fp8Weights.dequantized

    def dividing(weights: Fp8Weights) -> torch.Tensor:
        return dequantized(weights._replace(scale=1 / weights.scale))

    patch.setattr(Fp8Weights, "dequantized", dividing)


def zero_off_by_one(patch: pytest.MonkeyPatch) -> None:
    dequantized = Int4Weights.dequantized

    def shifted(weights: Int4Weights) -> torch.Tensor:
        zero = torch.full(weights.scale.shape, 7, dtype=torch.uint8)
        return dequantized(weights._replace(zero=zero))

    patch.setattr(Int4Weights, "dequantized", shifted)


def zeros_of_another_order(patch: pytest.MonkeyPatch) -> None:
    numbers_of = packing.numbers_of
    patch.setattr(packing, "numbers_of", lambda *args: numbers_of(*args).flip(-1))


def multiply_by_the_divisor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CompressedNvfp4, "divides", False)


def blocks_of_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nvfp4, "unpack_scales", lambda scale: nvfp4_scales(scale).flip(-1))


nvfp4_scales = nvfp4.unpack_scales


@pytest.mark.parametrize(
    ("spec", "format", "mistake"),
    [
        ("llama", "awq", swap_nibbles),
        ("qwen3", "fp8-block", transpose_scales),
        ("qwen3", "fp8-block", divide_by_scales),
        ("qwen3", "gptq", zero_off_by_one),
        ("mistral", "ct-int4-zeros", zeros_of_another_order),
        ("qwen2", "nvfp4", multiply_by_the_divisor),
        ("moe", "nvfp4", blocks_of_another_order),
    ],
)
def test_mistakes_show(
    spec: str,
    format: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, wanted = case_of(spec, format), exact_logits(spec, format)
    mistake(monkeypatch)
    model = leave_inputs_alone(load(case.folder))
    assert not relative_error(logits_of(case, model), wanted) < GROSS
