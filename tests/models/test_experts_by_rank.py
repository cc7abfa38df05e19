"""Whole experts on each rank (--ep): tokens as of transformers and of one rank, in every family and
every format, and mistakes that must show. Those of Qwen3-MoE and of attention over latents are in
integration/test_layouts.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adopted_cases import case_of as adopted_case
from support.adopted_cases import check as check_adopted
from support.checkpoints import Spec, make_checkpoint, spec_named
from support.gemma_checkpoints import WITH_TOWERS, prompts_of
from support.mxfp4_checkpoints import quantised
from support.parity import SAMPLED, batch, case_of, check, load_engine
from support.quantized import FORMATS, quantize
from support.ranks import Rank
from support.resolving import MODEL, resolved
from support.tensor_parallel import check_with_aborts, short_case_of, shortened
from torch import Tensor

from minisgl.config import ExpertFacts, ModelFacts
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError, ConfigError
from minisgl.kernels.moe import reference, select_experts
from minisgl.kernels.moe.reference import (
    ByRouter,
    Choice,
    Chosen,
    Routing,
)
from minisgl.layers import experts as layers_experts
from minisgl.layers.experts import FusedExperts
from minisgl.models import filling, loader
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, uneven_shard

ROUTING = Routing(2, normalize=True)


def load(
    folder: Path,
    ranks: Communicator = SINGLE_RANK,
    *,
    load_format: str = "safetensors",
) -> CausalLM:
    """A folder in the name of FP8 is quantised while it is loaded."""
    quantization = "fp8" if folder.name == "stacked-to-fp8" else None
    config = read_model_config(folder, quantization=quantization)
    model = load_model(
        replace(config, experts_by_rank=ranks.size > 1),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,
        max_seq_len=128,
        ranks=ranks,
    )
    assert isinstance(model, CausalLM)
    return model


def experts_of(model: CausalLM) -> Iterator[FusedExperts]:
    for module in model.modules():
        if isinstance(module, FusedExperts):
            yield module


# -- whole engines --------------------------------------------------------------------------------


def test_tokens_of_gpt_oss_equal_those_of_transformers() -> None:
    check_with_aborts(short_case_of("gpt-oss"), tp=2, ep=True)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("experts", {"tp": 2}), (WITH_TOWERS, {"tp": 2, "pp": 2})],
    ids=str,
)
def test_tokens_of_gemma_equal_those_of_transformers(name: str, ranks: dict[str, int]) -> None:
    check_with_aborts(shortened(prompts_of(name)), **ranks, ep=True)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_tokens_of_adopted_models_equal_those_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    case = adopted_case(architecture, tmp_path)
    check_adopted(case, alone=False, page_size=4, max_prefill_length=7, tp=2, ep=True)


def test_tokens_of_uneven_ranks_that_divide_requests_equal_those_of_transformers() -> None:
    check_with_aborts(short_case_of("moe-5"), tp=2, dp_attention=True, ep=True)


def test_sampled_tokens_equal_those_of_one_rank() -> None:
    """In shapes that would be captured on a GPU, too."""
    case = case_of("moe-5")

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            return [output.token_ids for output in await batch(engine, case.prompts, SAMPLED)]

    wanted = asyncio.run(run({}))
    assert asyncio.run(run({"tp": 2, "ep": True})) == wanted
    assert asyncio.run(run({"tp": 2, "ep": True, "padded": 8})) == wanted


# -- every format ---------------------------------------------------------------------------------

QUANTISED = ["fp8-block", "fp8-tensor", "fp8-static", "fp8-transformers", "ct-fp8-channel"]
STACKED = ["stacked", "stacked-to-fp8"]
QUANTISED += ["ct-int4-zeros-32", "awq-64", "gptq-v2-32", "nvfp4", "nvfp4-modelopt"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def stack_experts(file: Path) -> None:
    """Put the matrices of the experts of each layer into one tensor, as some exporters do."""
    weights = load_file(file)
    stacked = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for first in [name for name in weights if name.endswith(".experts.0.gate_proj.weight")]:
        path = first.removesuffix(".0.gate_proj.weight")
        gate, up, down = (
            torch.stack([weights[f"{path}.{each}.{part}.weight"] for each in range(5)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        stacked |= {f"{path}.gate_up_proj": torch.cat((gate, up), dim=1), f"{path}.down_proj": down}
    save_file(stacked, file)


def made(name: str, folders: Path) -> Path:
    """A small checkpoint with experts in a format."""
    folder = folders / name
    if folder.exists():
        return folder / "quantized" if name in FORMATS else folder
    if name in FORMATS:
        five = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        extra = {**five, "norm_topk_prob": True}
        spec = Spec("moe-5-wide", "Qwen3MoeForCausalLM", num_layers=2, extra=extra)
        return quantize(spec, FORMATS[name], folder).folder
    elif name.startswith("stacked"):
        make_checkpoint(spec_named("moe-5"), folder)
        stack_experts(folder / "model.safetensors")
    elif name == "mxfp4":
        make_checkpoint(spec_named("gpt-oss"), folders / "float")
        quantised(folders / "float", folders / "exact", folder)
    else:
        make_checkpoint(spec_named(name), folder)
    return folder


NUM_ROWS = 40  # so that no expert is left out by chance


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["moe-5", "gpt-oss", "mxfp4", *STACKED, *QUANTISED])
def test_what_ranks_load_adds_up_to_the_whole(name: str, num_ranks: int, folders: Path) -> None:
    """Parts of any format, of files that have each expert by itself or all in one tensor."""
    folder = made(name, folders)
    alone = experts_of(load(folder))
    parts = [list(experts_of(load(folder, Rank(rank, num_ranks)))) for rank in range(num_ranks)]
    for layer, whole in enumerate(alone):
        x = torch.randn(NUM_ROWS, whole.hidden.whole)
        choice = ByRouter(torch.randn(NUM_ROWS, whole.num_experts), ROUTING)
        wanted = whole.summand(x, choice, None)
        total = sum(part[layer].summand(x, choice, None) for part in parts)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
        held = [len(part[layer].held) for part in parts]
        assert sum(held) == whole.num_experts and max(held) - min(held) <= 1


@pytest.mark.parametrize("name", ["moe-5", "mxfp4", "awq-64"])
def test_a_rank_reads_its_own_experts_alone(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_bytes = made(name, folders), list[int]()
    as_it_is = filling.part_of

    def counted(stored: Any, cut: tuple[Shard, ...]) -> Tensor:
        part = as_it_is(stored, cut)
        num_bytes.append(part.nbytes)
        return part

    monkeypatch.setattr(filling, "part_of", counted)
    load(folder)
    whole = sum(num_bytes)
    by_rank: list[int] = []
    for rank in range(2):
        num_bytes.clear()
        load(folder, Rank(rank, 2))
        by_rank.append(sum(num_bytes))
    # Norms and routers are read by both.
    assert whole <= sum(by_rank) < 1.15 * whole
    assert max(by_rank) < 0.7 * whole


def test_a_rank_names_an_expert_that_the_checkpoint_lacks_or_has_too_many(folders: Path) -> None:
    folder = made("moe-5", folders)
    broken = folders / "broken"
    broken.mkdir()
    weights = load_file(folder / "model.safetensors")
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    lost = next(name for name in weights if "experts.4.up_proj" in name)
    save_file({k: v for k, v in weights.items() if k != lost}, broken / "model.safetensors")
    load(broken, Rank(0, 2))  # which has the first two
    with pytest.raises(
        CheckpointError, match=r"lacks weights: layers\.0\.mlp\.experts\.4\.up_proj"
    ):
        load(broken, Rank(1, 2))
    more = {lost.replace("experts.4", "experts.5"): weights[lost].clone()}
    save_file(weights | more, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds weights that the model does not take"):
        load(broken, Rank(0, 2))


# -- mistakes -------------------------------------------------------------------------------------


def _one_more(size: int, rank: int, num_ranks: int) -> Shard:
    right = uneven_shard(size, rank, num_ranks)
    return replace(right, size=min(right.size + 1, size - right.first))


def _one_less(size: int, rank: int, num_ranks: int) -> Shard:
    right = uneven_shard(size, rank, num_ranks)
    return replace(right, size=right.size - 1)


def _even(size: int, rank: int, num_ranks: int) -> Shard:
    """Wrong where the parts are not of one size."""
    return Shard(rank * (size // num_ranks), size // num_ranks, size)


def _counted_from_the_start(choice: Choice, own: Shard) -> Chosen:
    return reference.choose_of(choice, replace(own, first=0))


def _first_choice_dropped(choice: Choice, own: Shard) -> Chosen:
    right = reference.choose_of(choice, own)
    right.experts[:, 0] = reference.ELSEWHERE
    return right


MISTAKES = {
    "an expert is on two ranks": (layers_experts, "uneven_shard", _one_more),
    "an expert is on no rank": (layers_experts, "uneven_shard", _one_less),
    "ranks are of one size": (layers_experts, "uneven_shard", _even),
    "experts count from 0": (select_experts, "choose_of", _counted_from_the_start),
    "pairs are dropped": (select_experts, "choose_of", _first_choice_dropped),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_change_what_ranks_add_up_to(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "an expert is on no rank":  # else the file has experts that no rank asks for
        monkeypatch.setattr(loader, "of_other_ranks", lambda model: lambda name: True)
    monkeypatch.setattr(*MISTAKES[name])
    with pytest.raises(AssertionError, match="not close"):
        test_what_ranks_load_adds_up_to_the_whole("moe-5", 2, folders)


@pytest.mark.parametrize("name", ["an expert is on two ranks", "pairs are dropped"])
def test_mistakes_of_one_rank_change_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[name])  # in rank 0, which is of this process
    with pytest.raises(AssertionError):
        check(case_of("moe-5"), tp=2, ep=True)


# -- what is refused ------------------------------------------------------------------------------

EXPERTS = ExpertFacts(num_layers=2, num_experts=4, num_chosen=2, num_weights=1000, size=6)
MIXTURE = replace(MODEL, intermediate_size=0, experts=EXPERTS)


@pytest.mark.parametrize(
    ("model", "tp", "reason"),
    [
        (MODEL, 2, "--ep: this model has no experts; allowed: models with experts"),
        (
            MIXTURE,
            1,
            "--ep: it divides .* among the ranks of --tp, and there is one; allowed: with",
        ),
        (
            replace(MIXTURE, experts=replace(EXPERTS, num_experts=3)),
            4,
            "--ep: this model has 3 experts, fewer than --tp 4 ranks; allowed: with --tp up to 3",
        ),
        (
            replace(MIXTURE, experts=replace(EXPERTS, not_by_rank="they are not plain")),
            2,
            "--ep: they are not plain; allowed: --tp without it",
        ),
    ],
)
def test_ep_is_refused_where_it_divides_nothing(model: ModelFacts, tp: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved(model, tp=tp, ep=True)


def test_ep_divides_experts_that_cannot_be_cut() -> None:
    """Their inner size of 6 has no four parts."""
    assert resolved(MIXTURE, tp=4, ep=True).ep
    with pytest.raises(ConfigError, match=r"--tp 4: cannot shard .* experts of 6 or vocabulary"):
        resolved(MIXTURE, tp=4)
