"""gpt-oss with experts in MXFP4, against transformers with the weights that these stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from dummy_config import config_of
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    TOLERANCE,
    load_reference,
    make_checkpoint,
    random_prompt,
    reference_logits,
    relative_error,
    spec_named,
)
from support.mxfp4_checkpoints import quantised
from support.paged import PagedModel
from support.ranks import Rank
from torch import Tensor

from minisgl.errors import CheckpointError, ConfigError, UnsupportedModelError
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts
from minisgl.kernels.moe.reference import ByRouter, Routing
from minisgl.layers.experts import FusedExperts
from minisgl.models.formats.mxfp4 import Mxfp4
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

CPU = torch.device("cpu")
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{kind}_proj" for kind in ("gate_up", "down"))


class Made(NamedTuple):
    folder: Path  # with experts in MXFP4
    exact: Path  # with the weights that these stand for
    token_ids: list[int]
    logits: Tensor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, spec = tmp_path_factory.mktemp("mxfp4"), spec_named("gpt-oss")
    make_checkpoint(spec, folder / "float")
    quantised(folder / "float", folder / "exact", folder / "mxfp4")
    token_ids = random_prompt(spec, 70)
    logits = reference_logits(load_reference(folder / "exact"), token_ids)
    return Made(folder / "mxfp4", folder / "exact", token_ids, logits)


def load(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    load_format: str = "safetensors",
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    model = load_model(
        read_model_config(folder),
        folder,
        dtype=dtype,
        device=CPU,
        load_format=load_format,
        max_seq_len=256,
        ranks=Rank(rank, size),
    )
    assert isinstance(model, CausalLM)
    return model


def experts_of(model: CausalLM, layer: int) -> FusedExperts:
    experts = model.layers[str(layer)].get_submodule("mlp.experts")
    assert isinstance(experts, FusedExperts)
    return experts


def error(made: Made, folder: Path) -> float:
    paged = PagedModel(load(folder), read_model_config(folder), page_size=16)
    return relative_error(paged.run(made.token_ids, prefill=60, chunk=25), made.logits)


def test_logits_match_transformers_with_the_weights_that_are_meant(made: Made) -> None:
    assert error(made, made.folder) < TOLERANCE
    product = experts_of(load(made.folder), 0).product
    assert isinstance(product, Mxfp4Experts)
    assert product.gate_up.data.element_size() * product.gate_up.data.shape[2] == 128 // 2


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_summands_of_the_experts(made: Made, size: int) -> None:
    """Of 96 inner columns, parts are 64 wide: the second rank's is half padding, others' all."""
    x, logits = torch.randn(9, 128), torch.randn(9, 8)
    choice = ByRouter(logits, Routing(2, normalize=True))
    spread = dict(zip(range(size), (64, 32, 0, 0), strict=False))
    for folder in (made.folder, made.exact):
        whole = experts_of(load(folder), 1).product.reference(x, choice)
        summands = []
        for rank in range(size):
            experts = experts_of(load(folder, rank, size), 1)
            assert (experts.inner.size, experts.inner.num_real) == (64, spread[rank])
            summands.append(experts.product.reference(x, choice))
        torch.testing.assert_close(sum(summands), whole, rtol=1e-4, atol=1e-4)
        assert float((summands[1] - whole).norm() / whole.norm()) > 0.1


# -- mistakes, made in the files ------------------------------------------------------------------


def changed(made: Made, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(made.folder, target)
    [file] = target.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file({k: v.contiguous() for k, v in weights.items()}, file, {"format": "pt"})
    return target


def swap_nibbles(weights: dict[str, Tensor]) -> None:
    for name in weights:
        if name.endswith("_blocks"):
            weights[name] = weights[name] << 4 | weights[name] >> 4


def shift_scales(weights: dict[str, Tensor]) -> None:
    for name in weights:
        if name.endswith("_scales"):
            weights[name] = weights[name].roll(1, dims=-1)


def gates_first(weights: dict[str, Tensor]) -> None:
    for name in weights:
        if name.endswith(("gate_up_proj_blocks", "gate_up_proj_scales")):
            gates, ups = weights[name].chunk(2, dim=1)
            weights[name] = torch.stack((gates, ups), dim=2).flatten(1, 2)


def flip_signs(weights: dict[str, Tensor]) -> None:
    for name in weights:
        if name.endswith("_blocks"):
            weights[name] = weights[name] ^ 0x80


@pytest.mark.parametrize("mistake", [swap_nibbles, shift_scales, gates_first, flip_signs])
def test_another_layout_is_detected(
    made: Made, tmp_path: Path, mistake: Callable[[dict[str, Tensor]], object]
) -> None:
    assert error(made, changed(made, tmp_path / "changed", mistake)) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(f"{DOWN}_scales"), "lacks weights: .*down_proj_scales"),
        (
            lambda weights: weights.pop(f"{GATE_UP}_blocks"),
            r"does not take: .*down_proj_blocks \(U8\)",
        ),
        (lambda weights: weights[f"{DOWN}_scales"].fill_(255), "down_proj_scales holds scales"),
        (lambda weights: weights[f"{DOWN}_scales"].fill_(193), r"larger than 2 \*\* 65"),
        (
            lambda weights: weights.update({GATE_UP: torch.zeros(8, 128, 192)}),
            "does not take: .*gate_up_proj",
        ),
        (
            lambda weights: weights.update({f"{DOWN}_blocks": torch.zeros(8, 128, 3, 16)}),
            "has the dtype F32; expected U8",
        ),
        (
            lambda weights: weights.update(
                {f"{DOWN}_blocks": torch.zeros(8, 128, 4, 16, dtype=torch.uint8)}
            ),
            "has the shape",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused(
    made: Made, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load(changed(made, tmp_path / "broken", change))


def test_blocks_that_are_all_but_zero_are_zero(made: Made, tmp_path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights[f"{DOWN}_scales"].fill_(127 - 69)

    product = experts_of(load(changed(made, tmp_path / "small", change)), 1).product
    assert isinstance(product, Mxfp4Experts)
    assert not product.down.expert(3).dequantized().any()


# -- options --------------------------------------------------------------------------------------


def test_the_scheme_is_of_experts_alone(made: Made) -> None:
    config = read_model_config(made.folder)
    assert config.quantization is not None and config.quantization == Mxfp4()
    facts = config.facts()
    assert facts.quantized is None and not facts.fp8_activations
    assert facts.experts is not None and facts.experts.quantized is not None
    # 4 bits, and half a bit for 16 bits of each block
    assert facts.experts.weight_bytes("bfloat16") * 16 == facts.experts.num_weights * 9
    with pytest.raises(ConfigError, match="quantised already: MXFP4 experts in blocks of 32"):
        read_model_config(made.folder, quantization="fp8")
    with pytest.raises(
        UnsupportedModelError, match="own code of gpt-oss alone; leave --model-impl adopted"
    ):
        read_model_config(made.folder, model_impl="adopted")


def test_fp8_while_loading_is_refused_for_such_experts(made: Made) -> None:
    with pytest.raises(UnsupportedModelError, match="experts with biases"):
        load_model(
            read_model_config(made.exact, quantization="fp8"),
            made.exact,
            dtype=torch.float32,
            device=CPU,
            load_format="safetensors",
            max_seq_len=64,
        )


def test_dummy_weights_keep_the_size_of_activations(made: Made) -> None:
    experts = experts_of(load(made.folder, load_format="dummy"), 0)
    assert isinstance(experts.product, Mxfp4Experts)
    matrix = experts.product.gate_up.expert(2).dequantized()
    assert 0.5 < float(matrix.std()) * 128**0.5 < 2
    x = torch.randn(5, 128)
    out = experts.product.reference(x, ByRouter(torch.randn(5, 8), Routing(2, normalize=True)))
    assert bool(out.isfinite().all()) and 0.01 < float(out.std()) < 10


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 10.0), ("gpt-oss-120b", 60.2)])
def test_the_experts_of_the_published_models_take_four_bits(
    name: str, gib: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    experts = read_model_config(tmp_path).facts().experts
    assert experts is not None
    num_bytes = experts.num_layers * experts.num_experts * experts.weight_bytes("bfloat16")
    assert num_bytes / (1 << 30) == pytest.approx(gib, rel=0.01)
