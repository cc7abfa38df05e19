"""Quantised weights as they are loaded: on each rank, on the fly, made up, and broken."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import Spec, make_checkpoint, random_prompt
from support.paged import PagedModel
from support.parity import FOLDER
from support.quantized import (
    FORMATS,
    Quantized,
    Tensors,
    compressed,
    edit_config,
    edit_tensors,
    mixture,
    pack_as_transformers,
    pack_awq,
    pack_gptq,
    quantize,
)
from support.ranks import Rank
from torch import Tensor, nn

from minisgl.config import EngineConfig
from minisgl.engine.startup import load as start
from minisgl.errors import CheckpointError, ConfigError, MinisglError, UnsupportedModelError
from minisgl.kernels.linear.nvfp4 import Nvfp4Product
from minisgl.kernels.linear.quantized import (
    E4M3,
    Fp8Product,
    Fp8Weights,
    Int4Product,
    quantize_rows,
)
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models import packing
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.swap import PACKED
from minisgl.models.formats import fp8
from minisgl.models.loader import load_model, names_in
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard

DENSE = Spec("dense", "Qwen3ForCausalLM", hidden_size=256, num_layers=1, tied=True)
# 384 and 768: of blocks of 128, two ranks have one and a half, or three.
ODD = Spec("odd", "Qwen3ForCausalLM", hidden_size=384, head_dim=96, num_layers=1, tied=True)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
# 192 over 4 ranks is 48, as Qwen3-30B-A3B's 768 is 192.
MOE = Spec(
    "moe", "Qwen3MoeForCausalLM", num_layers=1, extra={**EXPERTS, "moe_intermediate_size": 192}
)
MOE_256 = Spec(
    "moe-256", "Qwen3MoeForCausalLM", num_layers=1, extra={**EXPERTS, "moe_intermediate_size": 256}
)
# With transformers' code: a map has gates and ups, one after the other.
PHI3 = Spec("phi3", "Phi3ForCausalLM", hidden_size=256, num_layers=1, extra={"pad_token_id": None})
UNTIED = Spec("untied", "Qwen3ForCausalLM", hidden_size=256, num_layers=2, vocab_size=512)
SPECS = {spec.name: spec for spec in (DENSE, ODD, MOE, MOE_256, PHI3, UNTIED)}
EMBEDDING = "model.embed_tokens.weight"


@cache
def case_of(spec: str, format: str) -> Quantized:
    return quantize(SPECS[spec], FORMATS[format], Path(FOLDER.name) / f"loading-{spec}-{format}")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str, str], Path]:
    """A checkpoint that a test may break."""

    def copy(spec: str, format: str) -> Path:
        return shutil.copytree(case_of(spec, format).folder, tmp_path / "copy")

    return copy


def load(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    load_format: str = "safetensors",
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    model_impl: str = "auto",
) -> CausalLM:
    return load_model(
        read_model_config(folder, quantization=quantization, model_impl=model_impl),
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        load_format=load_format,
        max_seq_len=64,
        ranks=Rank(rank, size),
        layers=layers,
    )


@pytest.mark.parametrize(("spec", "format"), [("dense", "awq"), ("moe", "ct-int4-zeros-32")])
def test_stages_hold_together_the_quantised_weights_of_one_rank(spec: str, format: str) -> None:
    folder = case_of(spec, format).folder
    alone = load(folder)
    names: list[str] = []
    for layers in (range(1), range(1, alone.num_layers)):
        for name, weight in load(folder, layers=layers).layers.named_parameters():
            assert torch.equal(weight, alone.layers.get_parameter(name))
            names.append(name)
    assert names == [name for name, _ in alone.layers.named_parameters()]


def matrices(model: nn.Module) -> dict[str, tuple[Tensor, Shard, Shard]]:
    """Each linear map dequantised, and the part of the outputs and inputs that the rank holds."""
    found: dict[str, tuple[Tensor, Shard, Shard]] = {}
    for path, module in model.named_modules():
        product = getattr(module, "product", None)
        if isinstance(module, Linear) and isinstance(
            product, Fp8Product | Int4Product | Nvfp4Product
        ):
            rows = product.weight.dequantized().split([part.size for part in module.parts.values()])
            for (name, part), w in zip(module.parts.items(), rows, strict=True):
                parent = path.rpartition(".")[0]
                found[f"{parent}.{name}".lstrip(".")] = w, part, module.inputs
        if isinstance(module, FusedExperts) and isinstance(
            product, Fp8Experts | Int4Experts | Nvfp4Experts
        ):
            inner, hidden = module.inner, module.hidden
            gate, up = product.gate_up.dequantized().chunk(2, dim=1)
            down = product.down.dequantized()
            for expert in range(len(module.held)):
                found[f"{path}.{expert}.gate_proj"] = gate[expert], inner, hidden
                found[f"{path}.{expert}.up_proj"] = up[expert], inner, hidden
                found[f"{path}.{expert}.down_proj"] = down[expert], hidden, inner
    return found


def wrong_parts(case: Quantized, size: int) -> list[str]:
    """What a rank holds otherwise than the checkpoint has it."""
    wrong: list[str] = []
    for rank in range(size):
        found = matrices(load(case.folder, rank, size))
        assert found.keys() == case.packed.keys()
        for name, (w, outputs, inputs) in found.items():
            rows = slice(outputs.first, outputs.first + outputs.size)
            columns = slice(inputs.first, inputs.first + inputs.size)
            if not torch.equal(w, case.packed[name].weight[rows, columns]):
                wrong.append(f"{rank}: {name}")
    return wrong


PARTS = [
    *[("dense", format, 1) for format in FORMATS],
    ("odd", "fp8-block", 1),
    ("odd", "fp8-block", 2),
    ("dense", "ct-fp8-block", 4),
    ("moe", "fp8-block", 4),
    ("moe", "ct-fp8-channel", 4),
    ("dense", "ct-int8", 2),
    ("moe", "ct-int8", 4),
    ("dense", "fp8-static", 2),
    ("dense", "modelopt-rows", 2),
    ("moe", "modelopt-rows", 2),
    ("dense", "ct-int4", 4),
    ("dense", "ct-int4-zeros", 2),
    ("dense", "awq", 4),
    ("dense", "gptq", 2),
    ("moe-256", "ct-int4-zeros-32", 4),
    ("moe-256", "awq-64", 2),
    ("moe-256", "gptq-v2-32", 4),
    ("moe-256", "nvfp4", 4),
    ("dense", "nvfp4-modelopt", 2),
]


@pytest.mark.parametrize(("spec", "format", "size"), PARTS)
def test_each_rank_has_its_part_of_the_checkpoint(spec: str, format: str, size: int) -> None:
    assert wrong_parts(case_of(spec, format), size) == []


@pytest.mark.parametrize("format", ["ct-fp8-channel", "fp8-block", "awq"])
def test_each_rank_has_its_parts_of_a_packed_map(format: str) -> None:
    case, name = case_of("phi3", format), "layers.0.mlp.gate_up_proj"
    gate, up = case.packed[name].weight.chunk(2)
    qkv = "layers.0.self_attn.qkv_proj"
    of_heads = case.packed[qkv].weight.split([256, 128, 128])  # 4 heads, 2 of keys and of values
    for rank in range(2):
        model: object = load(case.folder, rank, 2)
        assert isinstance(model, AdoptedModel)
        found = {path.removeprefix("model."): w for path, (w, *_) in matrices(model.module).items()}
        assert {path.partition(PACKED)[0] for path in found} == case.packed.keys()
        assert torch.equal(found[f"{name}{PACKED}0"], gate.chunk(2)[rank])
        assert torch.equal(found[f"{name}{PACKED}1"], up.chunk(2)[rank])
        for index, part in enumerate(of_heads):
            assert torch.equal(found[f"{qkv}{PACKED}{index}"], part.chunk(2)[rank])


def test_mistakes_of_a_rank_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case, spread, covering = case_of("odd", "fp8-block"), packing.spread, packing.covering

    def from_the_start(values: Tensor, dim: int, shard: Shard, step: int, finer: int) -> Tensor:
        """Blocks begin where the part does, not where the whole matrix does."""
        return spread(values, dim, Shard(0, shard.size, shard.whole), step, finer)

    def of_rank_0(shard: Shard, step: int) -> Shard:
        first, size = covering(shard, step), covering(Shard(0, shard.size, shard.whole), step)
        return Shard(0, first.size, size.whole)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "spread", from_the_start)
        assert any(name.startswith("1: ") for name in wrong_parts(case, 2))
    monkeypatch.setattr(fp8, "covering", of_rank_0)
    assert any(name.startswith("1: ") for name in wrong_parts(case, 2))


def test_what_the_tensors_say_is_not_quantised_is_left_alone(tmp_path: Path) -> None:
    """Whatever the config's list of exceptions is spelt like."""
    case = quantize(
        DENSE, FORMATS["ct-fp8-channel"], tmp_path, keeps=lambda name: "mlp.down_proj" in name
    )
    model = load(case.folder)
    assert matrices(model).keys() == case.packed.keys()
    weight = model.get_parameter("layers.0.mlp.down_proj.weight")
    stored = load_file(case.folder / "model.safetensors")
    assert torch.equal(weight, stored["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-modelopt"])
def test_layers_that_published_lists_leave_out(format: str, tmp_path: Path) -> None:
    """As of NVIDIA's checkpoints: experts are quantised, and attention is not."""
    case = quantize(MOE, FORMATS[format], tmp_path, keeps=lambda name: "self_attn" in name)
    left_out = ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate"]
    kind = "exclude_modules" if format == "nvfp4-modelopt" else "ignore"
    config = {**case.format.config, kind: left_out}
    edit_config(case.folder, quantization_config=config)
    found = matrices(load(case.folder))
    assert found.keys() == case.packed.keys()
    assert all(".experts." in name for name in found)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_powers_of_two_may_be_stored_as_exponents(
    rank: int, size: int, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("odd", "fp8-block")

    def to_powers(tensors: Tensors, dtype: torch.dtype) -> None:
        for name, scale in tensors.items():
            if name.endswith("weight_scale_inv"):
                tensors[name] = scale.float().log2().round().exp2().to(dtype)

    edit_tensors(folder, lambda tensors: to_powers(tensors, torch.float32))
    wanted = matrices(load(folder, rank, size))
    edit_tensors(folder, lambda tensors: to_powers(tensors, torch.float8_e8m0fnu))
    found = matrices(load(folder, rank, size))
    assert len(wanted) == 7 and found.keys() == wanted.keys()
    for name, (w, *_) in found.items():
        assert torch.equal(w, wanted[name][0]), name
    edit_tensors(folder, lambda tensors: tensors[SCALE].view(torch.uint8).fill_(255))
    with pytest.raises(CheckpointError, match=f"{SCALE} holds scales that are not finite"):
        load(folder, rank, size)


def test_parts_of_one_product_must_be_alike(tmp_path: Path) -> None:
    case = quantize(DENSE, FORMATS["fp8-block"], tmp_path, keeps=lambda name: "k_proj" in name)
    with pytest.raises(UnsupportedModelError, match=r"q_proj is in FP8 .*k_proj is not quantised"):
        load(case.folder)


def test_parts_of_one_product_must_have_one_format(tmp_path: Path) -> None:
    mixed = mixture(lambda path: "NVFP4" if "up_proj" in path else "FP8")
    case = quantize(DENSE, mixed, tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"gate_proj is in FP8 .* and .*up_proj is in NV"
    ):
        load(case.folder)


@pytest.mark.parametrize(("static", "format"), [(True, "fp8-static"), (False, "fp8-tensor")])
@pytest.mark.parametrize("spec", ["dense", "moe"])
def test_the_names_of_transformers_stand_for_those_of_others(
    spec: str, static: bool, format: str, tmp_path: Path
) -> None:
    named = replace(FORMATS[format], pack=partial(pack_as_transformers, static=static))
    case = quantize(SPECS[spec], named, tmp_path)
    assert any("weight_scale_inv" in name for name in load_file(case.folder / "model.safetensors"))
    same = case_of(spec, format).folder
    assert torch.equal(run(load(case.folder), case.folder), run(load(same), same))
    adopted = names_in(read_model_config(case.folder, model_impl="adopted"))
    assert adopted.of(f"{Q}.weight_scale_inv") == f"{Q.removeprefix('model.')}.weight_scale"


@pytest.mark.parametrize("format", FORMATS)
def test_parameters_take_the_bytes_that_the_facts_count(format: str) -> None:
    case = case_of("moe-256" if format in ("awq-64", "fp8-block") else "dense", format)
    facts = read_model_config(case.folder).facts()
    wanted = facts.weight_bytes("bfloat16")
    if facts.experts is not None:
        wanted += facts.experts.num_experts * facts.experts.weight_bytes("bfloat16")
    model = load(case.folder, dtype=torch.bfloat16)
    found = 0
    for name, weight in model.named_parameters():
        is_head = name == ("embed_tokens.weight" if model.lm_head is None else "lm_head.weight")
        if is_head or (name.startswith("layers") and "norm" not in name):
            found += 0 if name.endswith("input_scale") else weight.nbytes
    assert found == wanted
    assert found < 0.8 * 2 * sum(
        t.numel() for t in load_file(case.plain / "model.safetensors").values()
    )


def test_the_log_says_what_is_quantised_and_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(case_of("moe", "fp8-block").folder)
    [line] = [record.getMessage() for record in caplog.records if "Weights:" in record.getMessage()]
    assert line.startswith(
        "Weights: FP8 with blocks of 128x128, inputs rounded per token and 128 columns, in 16 of "
        "the 17 linear maps of the layers, 0.4 MiB; all others take 0.5 MiB"
    )


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    case = case_of("moe", "fp8-static")
    load_model(
        read_model_config(case.folder),
        case.folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen) and seen[-1] == (seen[-1][1],) * 2


# -- --quantization fp8 ---------------------------------------------------------------------------


def fp8_weights(model: CausalLM) -> dict[str, Fp8Weights]:
    found: dict[str, Fp8Weights] = {}
    for name, module in model.named_modules():
        product = getattr(module, "product", None)
        if isinstance(product, Fp8Product):
            found[name] = product.weight
        if isinstance(product, Fp8Experts):
            found |= {f"{name}.gate_up": product.gate_up, f"{name}.down": product.down}
    return found


def stacked(folder: Path, target: Path) -> Path:
    """The same checkpoint, with one tensor for all experts."""
    shutil.copytree(folder, target)
    prefix = "model.layers.0.mlp.experts"

    def stack(tensors: Tensors) -> None:
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{part}.weight") for e in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}

    edit_tensors(target, stack)
    return target


@pytest.mark.parametrize("form", ["dense", "moe", "stacked"])
def test_on_the_fly_every_number_of_ranks_has_the_same_weights(form: str, tmp_path: Path) -> None:
    folder = make_checkpoint(DENSE if form == "dense" else MOE, tmp_path / "plain")
    plain = load_file(folder / "model.safetensors")
    one = fp8_weights(load(folder, quantization="fp8"))
    assert len(one) == 4
    w = plain["model.layers.0.self_attn.o_proj.weight"]
    data, _ = quantize_rows(w)
    assert torch.equal(one["layers.0.self_attn.o_proj"].data.float(), data.float())
    assert torch.equal(one["layers.0.self_attn.o_proj"].scale, w.abs().amax(1) / 448)
    if form == "stacked":
        folder = stacked(folder, tmp_path / "stacked")
    for size in (1, 2, 4):
        ranks = [fp8_weights(load(folder, rank, size, quantization="fp8")) for rank in range(size)]
        for name, whole in one.items():
            parts = [rank[name] for rank in ranks]
            if name.endswith(("o_proj", "down_proj", "down")):  # by columns, with scales of rows
                joined = torch.cat([part.data.float() for part in parts], dim=-1)
                assert torch.equal(joined, whole.data.float()), name
                assert all(torch.equal(part.scale, whole.scale) for part in parts), name
                continue
            for rank, part in enumerate(parts):
                rows = rows_of(name, size, rank, whole.data.shape[-2])
                assert torch.equal(part.data.float(), whole.data.float()[..., rows, :]), name
                assert torch.equal(part.scale, whole.scale[..., rows]), name


def rows_of(name: str, size: int, rank: int, num_rows: int) -> Tensor:
    """The rows of merged maps that a rank has: of 4 heads and 2 KV heads of 64, or of halves."""
    sizes = [4 * 64, 2 * 64, 2 * 64] if "qkv" in name else [num_rows // 2] * 2
    starts = [0, *itertools.accumulate(sizes)]
    found = []
    for place, (begin, length) in enumerate(zip(starts, sizes, strict=False)):
        parts = min(size, 2) if "qkv" in name and place else size  # KV heads are shared
        part = length // parts
        first = begin + rank * parts // size * part
        found.append(torch.arange(first, first + part))
    return torch.cat(found)


def test_a_row_of_zeros_survives_on_the_fly(tmp_path: Path) -> None:
    folder = make_checkpoint(DENSE, tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name][3].zero_())
    model = load(folder, quantization="fp8")
    weights = fp8_weights(model)["layers.0.mlp.down_proj"]
    assert weights.scale[3] == 1 and not weights.data[3].float().any()
    assert run(model, folder).isfinite().all()


def test_embedding_head_router_and_norms_stay_as_they_are(tmp_path: Path) -> None:
    folder = make_checkpoint(MOE, tmp_path)
    plain, model = load(folder), load(folder, quantization="fp8")
    names = [name for name, weight in model.named_parameters() if weight.dtype == torch.float32]
    for name in names:
        if "scale" not in name:
            assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name
    assert {"lm_head.weight", "layers.0.mlp.gate.weight", "embed_tokens.weight"} <= set(names)


def test_a_quantised_load_never_holds_more_than_one_matrix_unquantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(DENSE, tmp_path)
    largest = max(t.numel() for t in load_file(folder / "model.safetensors").values())
    sizes: list[int] = []
    quantize_into = packing.quantize_into

    def measured(weights: Fp8Weights, stored: Tensor, inputs: Shard) -> None:
        sizes.append(stored.numel())
        quantize_into(weights, stored, inputs)

    monkeypatch.setattr(packing, "quantize_into", measured)
    model = load(folder, quantization="fp8")
    assert len(sizes) == 7 and max(sizes) <= largest
    assert {w.dtype for w in model.layers.parameters() if w.dim() > 1} == {E4M3}


# -- dummy weights --------------------------------------------------------------------------------


def run(model: CausalLM, folder: Path) -> Tensor:
    tokens = random_prompt(DENSE, 40)
    return PagedModel(model, read_model_config(folder), page_size=16).run(tokens)


@pytest.mark.parametrize("format", FORMATS)
def test_dummy_weights_keep_the_size_of_activations(format: str, tmp_path: Path) -> None:
    spec = DENSE if FORMATS[format].rounds else MOE_256
    folder = make_checkpoint(spec, tmp_path)
    (folder / "model.safetensors").unlink()
    tensors = load_file(case_of(spec.name, format).folder / "model.safetensors")
    maps = {name.rpartition(".")[0] for name in tensors if name.endswith("_scale")}
    edit_config(folder, quantization_config=FORMATS[format].config_of(sorted(maps)))
    model = load(folder, load_format="dummy")
    assert len(matrices(model)) == (7 if spec is DENSE else 4 + 3 * 4)
    logits = run(model, folder)
    assert torch.equal(logits, run(load(folder, load_format="dummy"), folder))
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(-1).tolist())) > 15
    for name, (w, _, inputs) in matrices(model).items():
        assert float(w.std()) == pytest.approx(inputs.whole**-0.5, rel=0.05), name
        assert abs(float(w.mean())) < 0.05 * float(w.std()), name


# -- broken checkpoints ---------------------------------------------------------------------------

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def setting(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].reshape(-1)[-1:].fill_(value)


def replacing(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


SCALE = f"{Q}.weight_scale_inv"
SCALES = {
    "fp8-block": SCALE,
    "fp8-tensor": f"{Q}.weight_scale",
    "ct-fp8-channel": f"{Q}.weight_scale",
    "ct-int4": f"{DOWN}.weight_scale",
    "awq": f"{DOWN}.scales",
    "gptq": f"{DOWN}.scales",
    "nvfp4-modelopt": f"{DOWN}.weight_scale_2",
}
# AutoRound's scale has the sign of a group's largest number, which is q = 0.
OF_EITHER_SIGN = {
    "ct-int4": compressed("W4A16", negative=True),
    "awq": replace(FORMATS["awq"], pack=partial(pack_awq, negative=True)),
    "gptq": replace(FORMATS["gptq"], pack=partial(pack_gptq, negative=True)),
}


@pytest.mark.parametrize(
    ("format", "value", "message"),
    [
        *((format, value, "not finite") for format in SCALES for value in (torch.nan, torch.inf)),
        *((format, -1.0, "negative") for format in SCALES if format not in OF_EITHER_SIGN),
    ],
)
def test_scales_that_no_weight_can_have(
    format: str, value: float, message: str, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, setting(SCALES[format], value))
    wanted = rf"model\.safetensors: {SCALES[format]} holds .*{message}"
    with pytest.raises(CheckpointError, match=wanted):
        load(folder)


@pytest.mark.parametrize("format", OF_EITHER_SIGN)
@pytest.mark.parametrize("spec", ["dense", "moe-256"])
def test_scales_of_either_sign_give_the_same_weights(
    spec: str, format: str, tmp_path: Path
) -> None:
    case = quantize(SPECS[spec], OF_EITHER_SIGN[format], tmp_path)
    kinds = ("scales", "weight_scale")
    for packed in case.packed.values():
        [scale] = [packed.tensors[kind] for kind in kinds if kind in packed.tensors]
        assert (scale < 0).any() and (scale > 0).any()
    assert wrong_parts(case, 2) == []
    alone, same = load(case.folder), load(case_of(spec, format).folder)
    for name, (weight, *_) in matrices(alone).items():
        assert torch.equal(weight, matrices(same)[name][0]), name


@pytest.mark.parametrize("format", SCALES)
def test_a_scale_of_zero_is_legal(format: str, copy_of: Callable[[str, str], Path]) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, setting(SCALES[format], 0))
    assert run(load(folder), folder).isfinite().all()


@pytest.mark.parametrize("format", SCALES)
def test_a_missing_scale_is_named(format: str, copy_of: Callable[[str, str], Path]) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, lambda tensors: tensors.pop(SCALES[format]))
    name = SCALES[format].removeprefix("model.")
    with pytest.raises(CheckpointError, match=f"lacks weights: {name}"):
        load(folder)


SHAPES: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("fp8-block", replacing(SCALE, lambda s: s[:1]), r"\[1, 2\]; .*\[2, 2\] \(FP8 with blocks"),
    ("ct-fp8-channel", replacing(f"{Q}.weight_scale", lambda s: s[:9]), r"\[9, 1\].*\[256, 1\]"),
    ("fp8-tensor", replacing(f"{Q}.weight_scale", lambda s: s.expand(3)), r"\[3\].*asks for \[1\]"),
    ("fp8-static", replacing(f"{Q}.input_scale", lambda s: s.expand(2)), r"\[2\].*asks for \[1\]"),
    ("ct-int4", replacing(f"{Q}.weight_packed", lambda w: w[:, :31]), r"\[256, 31\].*\[256, 32\]"),
    ("ct-int4-zeros", replacing(f"{Q}.weight_zero_point", lambda z: z.T), r"\[2, 32\].*\[32, 2\]"),
    ("awq", replacing(f"{Q}.qweight", lambda w: w.T), r"\[32, 256\].*\[256, 32\]"),
    ("gptq", replacing(f"{Q}.qweight", lambda w: w.T), r"\[256, 32\].*\[32, 256\]"),
    ("gptq", replacing(f"{Q}.g_idx", lambda g: g[1:]), r"\[255\].*\[256\]"),
    ("nvfp4", replacing(f"{Q}.weight_packed", lambda w: w[1:]), r"\[255, 128\].*\[256, 128\]"),
    ("nvfp4", replacing(f"{Q}.weight_scale", lambda s: s.T), r"\[16, 256\].*\[256, 16\] \(NVFP4"),
]


@pytest.mark.parametrize(("format", "change", "message"), SHAPES)
def test_a_wrong_shape_is_named_with_the_one_that_is_asked_for(
    format: str,
    change: Callable[[Tensors], object],
    message: str,
    copy_of: Callable[[str, str], Path],
) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {Q}\.\w+ has .*{message}"):
        load(folder)


BROKEN: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("gptq", replacing(f"{Q}.qzeros", torch.zeros_like), r"qzeros holds zero points other than 8"),
    ("gptq-v2-32", replacing(f"{Q}.qzeros", lambda z: z & 0x77777777), "zero points other than 8"),
    ("gptq", replacing(f"{Q}.g_idx", lambda g: g.flip(0)), "g_idx .*desc_act.*or as AWQ"),
    ("gptq", lambda t: t.update({f"{Q}.bias": torch.ones(256)}), "bias is not zero"),
    ("ct-int4", replacing(f"{Q}.weight_shape", lambda s: s + 1), r"weight_shape says \[257, 257\]"),
    ("fp8-static", setting(f"{Q}.input_scale", 0), "input_scale holds the scale 0"),
    ("nvfp4", setting(f"{Q}.weight_scale", torch.nan), "weight_scale holds .*not finite"),
    ("nvfp4", setting(f"{Q}.weight_scale", -1), "weight_scale holds negative scales"),
    ("nvfp4", setting(f"{Q}.weight_global_scale", 0), "global_scale holds 0, by which weights"),
    ("nvfp4-modelopt", lambda t: t.pop(f"{Q}.weight_scale_2"), "lacks weights: .*weight_scale_2"),
    (
        "nvfp4",
        replacing(f"{Q}.weight_scale", lambda s: s.float()),
        "weight_scale has the dtype F32; expected F8_E4M3",
    ),
    ("fp8-block", lambda t: t.update({f"{Q}.surplus": torch.ones(1)}), "does not take: .*surplus"),
    (
        "fp8-block",
        replacing(SCALE, lambda s: s.to(torch.int8)),
        "scale_inv has the dtype I8; expected F32 or F16 or BF16",
    ),
]


@pytest.mark.parametrize(("format", "change", "message"), BROKEN)
def test_other_tensors_that_do_not_fit(
    format: str,
    change: Callable[[Tensors], object],
    message: str,
    copy_of: Callable[[str, str], Path],
) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


GROUPS = torch.arange(256) // 128
HARMLESS: list[tuple[str, str, Tensor]] = [
    ("gptq", "bias", torch.zeros(256).half()),
    ("awq", "bias", torch.zeros(256).half()),
    ("ct-int4", "weight_zero_point", torch.full((32, 2), 0x88888888 - 2**32).int()),
    ("ct-int4", "weight_zero_point", torch.zeros(256, 2, dtype=torch.int8)),
    ("ct-int4", "weight_shape", torch.tensor([256, 256], dtype=torch.int32)),
    ("ct-int4", "weight_g_idx", GROUPS.int()),
    ("ct-int4", "weight_g_idx", torch.full((256,), -1).int()),
    ("ct-int4-zeros", "weight_g_idx", GROUPS),
    ("fp8-block", "input_scale", torch.tensor(0.5)),
    ("fp8-tensor", "input_scale", torch.ones(1)),
    ("ct-fp8-channel", "input_scale", torch.ones(256, 1).bfloat16()),
]
HARMFUL: list[tuple[str, str, Tensor, str]] = [
    ("awq", "bias", torch.ones(256).half(), "is not zero"),
    ("ct-int4", "weight_zero_point", torch.full((32, 2), 0x77777777).int(), "symmetric: true"),
    ("ct-int4", "weight_zero_point", torch.eye(256, 2).to(torch.int8), "symmetric: true"),
    ("ct-int4", "weight_g_idx", GROUPS.flip(0).int(), "out of order"),
    ("ct-int4", "weight_g_idx", GROUPS[1:].int(), "out of order"),
]


@pytest.mark.parametrize(("format", "kind", "tensor"), HARMLESS)
def test_tensors_that_say_nothing_new_change_nothing(
    format: str, kind: str, tensor: Tensor, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)
    expected = run(load(folder), folder)
    edit_tensors(folder, lambda tensors: tensors.update({f"{Q}.{kind}": tensor}))
    assert torch.equal(run(load(folder), folder), expected)


@pytest.mark.parametrize(("format", "kind", "tensor", "message"), HARMFUL)
def test_the_same_tensors_are_refused_where_they_say_something(
    format: str, kind: str, tensor: Tensor, message: str, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)
    edit_tensors(folder, lambda tensors: tensors.update({f"{Q}.{kind}": tensor}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {Q}\.{kind} .*{message}"):
        load(folder)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("format", ["fp8-block", "fp8-tensor", "ct-fp8-channel"])
def test_nan_in_fp8_weights_is_refused_with_the_tensor(
    format: str, byte: int, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)

    def spoil(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].view(torch.uint8)[-1, -1] = byte

    edit_tensors(folder, spoil)
    with pytest.raises(CheckpointError, match=rf"safetensors: {DOWN}\.weight holds NaN"):
        load(folder)


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_a_checkpoint_of_autoround_is_what_it_is_packed_as(
    format: str, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)
    expected = run(load(folder), folder)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    config |= {"data_type": "int", "packing_format": f"auto_round:auto_{format}", "iters": 200}
    config |= {"extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}
    edit_config(folder, quantization_config=config)
    assert torch.equal(run(load(folder), folder), expected)


def test_scales_of_the_kv_cache_are_not_unexpected(copy_of: Callable[[str, str], Path]) -> None:
    folder = copy_of("dense", "fp8-block")
    names = ("attn.k_scale", "attn.v_scale", "k_scale", "v_scale", "kv_scale", "k_proj.k_scale")
    names += ("v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale")
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names}
    edit_tensors(folder, lambda tensors: tensors.update(scales))
    load(folder)


# -- contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "config", "message"),
    [
        ("fp8-block", None, r"weight is F8_E4M3, but config\.json says nothing about quantisation"),
        ("ct-int4", None, r"weight_packed is I32, but config\.json says nothing"),
        ("awq", None, r"qweight is I32, but config\.json says nothing"),
        ("fp8-block", "awq", r"weight is F8_E4M3, but config\.json says INT4 in groups of 128"),
        ("awq", "fp8-block", r"qweight is I32, but config\.json says FP8 with blocks"),
        ("ct-int4", "gptq", r"weight_packed is I32, but config\.json says INT4 .*\(gptq\)"),
        ("ct-int4", "ct-int4-64", r"weight_scale has .*\[\d+, \d\]; .*INT4 in groups of 64"),
        ("fp8-block", "ct-fp8-channel", r"lacks weights: .*weight_scale|does not take"),
        ("ct-fp8-channel", "ct-fp8-block", r"\[\d+, 1\]; the config asks for .*blocks of 128x128"),
        ("awq", "gptq", r"has the shape .*INT4 in groups of 128 \(gptq\)"),
    ],
)
def test_config_and_tensors_that_contradict_each_other_are_both_named(
    format: str, config: str | None, message: str, copy_of: Callable[[str, str], Path]
) -> None:
    folder = copy_of("dense", format)
    edit_config(folder, quantization_config=config and dict(FORMATS[config].config))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_config_of_weights_that_are_not_quantised(tmp_path: Path) -> None:
    folder = make_checkpoint(DENSE, tmp_path)
    edit_config(folder, quantization_config=dict(FORMATS["fp8-block"].config))
    with pytest.raises(CheckpointError, match=r"says FP8 .* no tensor weight of dtype F8_E4M3"):
        load(folder)


HEADS = ["ct-fp8-channel", "fp8-block", "awq", "gptq", "ct-int8", "nvfp4-modelopt"]


@pytest.mark.parametrize("format", [*HEADS, "modelopt-mixed"])
def test_each_rank_has_its_part_of_a_quantised_head(format: str, tmp_path: Path) -> None:
    case = quantize(UNTIED, FORMATS[format], tmp_path, with_head=True)
    assert wrong_parts(case, 1) == [] == wrong_parts(case, 2)
    first, last = (load(case.folder, layers=layers) for layers in (range(1), range(1, 2)))
    assert first.lm_head is None and "lm_head" in matrices(last)


@pytest.mark.parametrize("format", HEADS)
def test_a_head_may_be_quantised_where_no_layer_is(format: str, tmp_path: Path) -> None:
    case = quantize(UNTIED, FORMATS[format], tmp_path, keeps=lambda name: True, with_head=True)
    assert matrices(load(case.folder)).keys() == {"lm_head"}


@pytest.mark.parametrize("format", HEADS)
def test_a_quantised_head_is_divided_without_padding(format: str, tmp_path: Path) -> None:
    spec = replace(UNTIED, vocab_size=496)  # 31 times 16: one rank would have 256
    case = quantize(spec, FORMATS[format], tmp_path, with_head=True)
    assert wrong_parts(case, 1) == []
    with pytest.raises(UnsupportedModelError, match=r"lm_head has 496 outputs in .* another --tp"):
        load(case.folder, 1, 2)


def quantize_embedding(tensors: Tensors) -> None:
    data, scale = quantize_rows(tensors[EMBEDDING])
    tensors |= {EMBEDDING: data, f"{EMBEDDING}_scale": scale[:, None]}


def quantize_head_again(tensors: Tensors) -> None:
    data, scale = quantize_rows(tensors[EMBEDDING])
    tensors |= {"lm_head.weight": data, "lm_head.weight_scale": scale[:, None]}


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (
            "untied",
            quantize_embedding,
            r"embed_tokens\.weight is quantised.*layers and .*the head;",
        ),
        ("dense", quantize_head_again, r"lm_head\.weight is quantised.*maps of layers;.*leaves"),
    ],
)
def test_other_quantised_tensors_are_refused_by_name(
    spec: str, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    folder = quantize(SPECS[spec], FORMATS["ct-fp8-channel"], tmp_path).folder
    edit_tensors(folder, change)
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


def test_a_quantised_head_of_an_adopted_model_is_refused(tmp_path: Path) -> None:
    folder = quantize(UNTIED, FORMATS["ct-fp8-channel"], tmp_path, with_head=True).folder
    with pytest.raises(
        UnsupportedModelError, match=r"lm_head\.weight is quantised.*maps of layers"
    ):
        load(folder, model_impl="adopted")


@pytest.mark.parametrize("format", ["awq-64", "nvfp4"])
def test_inputs_that_do_not_divide_are_refused_by_name(format: str, tmp_path: Path) -> None:
    folder = make_checkpoint(MOE, tmp_path)  # 192 over 2 ranks is 96
    edit_config(folder, quantization_config={**FORMATS[format].config})
    with pytest.raises(MinisglError, match=r"down_proj has 192 inputs, 96 of them on each rank"):
        load(folder, 0, 2, load_format="dummy")


def test_files_of_other_formats_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(DENSE, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"are read, not 'pytorch_model\.bin"):
        load(folder)


# -- the whole engine -----------------------------------------------------------------------------


def test_the_engine_starts_with_the_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(device="cpu", quantization="fp8", num_pages=20, page_size=16)
    loaded = start(config)
    try:
        assert loaded.model.quantized is not None
        assert "Weights: FP8 with one scale per row, inputs rounded per token" in caplog.text
    finally:
        loaded.runner.close()


def test_the_engine_refuses_the_option_for_int4() -> None:
    folder = str(case_of("dense", "awq").folder)
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is quantised"):
        start(EngineConfig(model=folder, device="cpu", quantization="fp8", load_format="dummy"))
