"""Whole experts on each rank (--ep): tokens as of transformers and of one rank, in every family and
every format, and mistakes that must show. Those of Qwen3-MoE are in integration/test_layouts.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adopted_cases import case_of as adopted_case
from support.adopted_cases import check as check_adopted
from support.checkpoints import Spec, make_checkpoint, spec_named
from support.copied_experts import copied
from support.gemma_checkpoints import WITH_TOWERS, prompts_of
from support.mxfp4_checkpoints import quantised
from support.parity import SAMPLED, Case, batch, case_of, check, greedy, load_engine
from support.quantized import FORMATS, quantize
from support.ranks import Rank
from support.resolving import MODEL, resolved
from support.tensor_parallel import check_with_aborts, short_case_of, shortened
from torch import Tensor

from minisgl.config import ExpertFacts, ModelFacts
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError, ConfigError
from minisgl.expert_copies import Copies, place_copies, ranks_of
from minisgl.kernels.moe import reference, select_experts
from minisgl.kernels.moe.reference import (
    ELSEWHERE,
    ByRouter,
    Choice,
    Chosen,
    ExpertShare,
    Routing,
)
from minisgl.kernels.moe.tally import ExpertTally, ExpertTokens
from minisgl.layers import experts as layers_experts
from minisgl.layers.experts import FusedExperts, places_of
from minisgl.models import loader
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, uneven_shard

ROUTING = Routing(2, normalize=True)
ON_PROCESSES = [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}]


def load(
    folder: Path,
    ranks: Communicator = SINGLE_RANK,
    *,
    copies: Copies = (),
    load_format: str = "safetensors",
) -> CausalLM:
    """copies: in every layer. A folder in the name of FP8 is quantised while it is loaded."""
    quantization = "fp8" if folder.name == "stacked-to-fp8" else None
    config = read_model_config(folder, quantization=quantization)
    experts = config.facts().experts
    num_layers = 0 if experts is None else experts.num_layers
    config = replace(config, expert_copies=(copies,) * num_layers)
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


@pytest.mark.parametrize("ranks", ON_PROCESSES, ids=str)
def test_tokens_of_gpt_oss_equal_those_of_transformers(ranks: dict[str, int]) -> None:
    check_with_aborts(short_case_of("gpt-oss"), **ranks, ep=True)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("experts", {"tp": 4}), (WITH_TOWERS, {"tp": 2, "pp": 2})],
    ids=str,
)
def test_tokens_of_gemma_equal_those_of_transformers(name: str, ranks: dict[str, int]) -> None:
    check_with_aborts(shortened(prompts_of(name)), **ranks, ep=True)


@pytest.mark.parametrize(
    ("architecture", "num_copies"), [("MixtralForCausalLM", 2), ("Qwen2MoeForCausalLM", 0)]
)
def test_tokens_of_adopted_models_equal_those_of_transformers(
    architecture: str, num_copies: int, tmp_path: Path
) -> None:
    case = adopted_case(architecture, tmp_path)
    options = {"tp": 2, "ep": True}
    if num_copies:
        options = copied(case.folder, tmp_path, tp=2, redundant_experts=num_copies)
    check_adopted(case, alone=False, page_size=4, max_prefill_length=7, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("moe-5", {"tp": 2, "dp_attention": True}),
        ("moe-60", {"tp": 4}),
        ("glm-flash", {"tp": 2}),
    ],
    ids=str,
)
def test_tokens_with_copies_of_experts_equal_those_of_transformers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = short_case_of(name)
    check_with_aborts(case, **copied(case.folder, tmp_path, **options))


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

QUANTISED = ["fp8-block", "fp8-tensor", "fp8-static", "ct-fp8-channel"]
STACKED = ["stacked", "stacked-to-fp8"]
QUANTISED += ["ct-int4-zeros-32", "awq-64", "gptq-v2-32"]


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


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["moe-5", "gpt-oss", "mxfp4", *QUANTISED])
def test_what_ranks_load_adds_up_to_the_whole(name: str, num_ranks: int, folders: Path) -> None:
    """Parts of any format, of files that have each expert by itself or all in one tensor."""
    folder = made(name, folders)
    alone = experts_of(load(folder))
    parts = [list(experts_of(load(folder, Rank(rank, num_ranks)))) for rank in range(num_ranks)]
    for layer, whole in enumerate(alone):
        x = torch.randn(9, whole.hidden.whole)
        choice = ByRouter(torch.randn(9, whole.num_experts), ROUTING)
        wanted = whole.summand(x, choice)
        total = sum(part[layer].summand(x, choice) for part in parts)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
        held = [len(part[layer].held) for part in parts]
        assert sum(held) == whole.num_experts and max(held) - min(held) <= 1


# Of five experts or more: two or three copies on a rank, in another order than the experts'.
COPIES = {2: ((4, 3), (0,)), 4: ((), (4, 0), (1,), (2,))}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*((name, 2) for name in ("moe-5", "gpt-oss", "mxfp4", *STACKED, *QUANTISED)), ("moe-5", 4)],
)
def test_what_ranks_load_adds_up_to_the_whole_with_copies(
    name: str, num_ranks: int, folders: Path
) -> None:
    """A rank loads copies of the experts of others in any format, and each pair is computed once,
    by the ranks that the KV slots of the rows say."""
    folder = made(name, folders)
    alone, copies = list(experts_of(load(folder))), COPIES[num_ranks]
    ranks = ranks_of(alone[0].num_experts, num_ranks, copies)
    tally = ExpertTally([ranks], num_ranks, 4, torch.device("cpu"))
    tally.marks = torch.arange(30, 39)
    parts = [
        list(experts_of(load(folder, Rank(rank, num_ranks), copies=copies)))
        for rank in range(num_ranks)
    ]
    for layer, whole in enumerate(alone):
        x = torch.randn(9, whole.hidden.whole)
        choice = ByRouter(torch.randn(9, whole.num_experts), ROUTING)
        wanted, total = whole.summand(x, choice), torch.zeros(9, whole.hidden.whole)
        for rank, part in enumerate(parts):
            experts = part[layer]
            own = uneven_shard(whole.num_experts, rank, num_ranks)
            assert len(experts.held) == own.size + len(copies[rank])
            experts.share = experts.share._replace(tally=tally)
            total += experts.summand(x, choice)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["moe-5", "mxfp4", "awq-64"])
def test_a_rank_reads_its_own_experts_alone(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_bytes = made(name, folders), list[int]()
    as_it_is = loader._part

    def counted(stored: Any, cut: tuple[Shard, ...]) -> Tensor:
        part = as_it_is(stored, cut)
        num_bytes.append(part.nbytes)
        return part

    monkeypatch.setattr(loader, "_part", counted)
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


def _counted_from_the_start(choice: Choice, share: ExpertShare) -> Chosen:
    return reference.choose_of(choice, ExpertShare(replace(share.own, first=0)))


def _first_choice_dropped(choice: Choice, share: ExpertShare) -> Chosen:
    right = reference.choose_of(choice, share)
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


def _whole_copies(held: Sequence[int], ranks: object, rank: int) -> list[list[int]]:
    return [[held.index(each) if each in held else ELSEWHERE for each in range(5)]] * 2


def _no_copies(held: Sequence[int], ranks: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    num_own = uneven_shard(5, rank, 2).size
    places = places_of(held, ranks, rank)
    return [[ELSEWHERE if each >= num_own else each for each in half] for half in places]


def _from_the_end(
    held: Sequence[int], ranks: Sequence[Sequence[int]], rank: int
) -> list[list[int]]:
    return places_of([*sorted(held)], ranks, rank)


MISTAKES_OF_COPIES = {
    "a pair is computed by two ranks": _whole_copies,
    "a pair is computed by no rank": _no_copies,
    "copies are in another order": _from_the_end,
}


@pytest.mark.parametrize("name", MISTAKES_OF_COPIES)
def test_mistakes_with_copies_change_what_ranks_add_up_to(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_experts, "places_of", MISTAKES_OF_COPIES[name])
    with pytest.raises(AssertionError, match="not close"):
        test_what_ranks_load_adds_up_to_the_whole_with_copies("moe-5", 2, folders)


@pytest.mark.parametrize("name", MISTAKES_OF_COPIES)
def test_mistakes_with_copies_on_one_rank_change_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("moe-5")
    options = copied(case.folder, tmp_path, tp=2, expert_counts=str(tmp_path / "other.json"))
    layers = {"layers": [[1, 1, 9, 10, 9]] * case.spec.num_layers}
    (tmp_path / "other.json").write_text(json.dumps(layers))
    assert place_copies(layers["layers"][0], 2, 3)[0] == (3, 2)  # on rank 0, of this process
    monkeypatch.setattr(layers_experts, "places_of", MISTAKES_OF_COPIES[name])
    with pytest.raises(AssertionError):
        check(case, **options)


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


# -- the tokens of each rank's experts ------------------------------------------------------------

NUM_COUNTED = 6  # tokens that are generated


def counted(monkeypatch: pytest.MonkeyPatch, case: Case, prompt: list[int]) -> Tensor:
    """The tokens of each expert in all layers of an engine of one rank: those of even positions,
    and those of odd ones."""
    counts = torch.zeros(2, 5, dtype=torch.int64)
    calls: list[int] = []  # their rows: of the layers of a step, and then of the next step
    as_it_is, num_layers = reference.choose, case.spec.num_layers

    def choose(choice: Choice) -> Chosen:
        chosen = as_it_is(choice)
        num_steps = len(calls) // num_layers
        first = sum(calls[: num_steps * num_layers : num_layers])
        calls.append(len(chosen.experts))
        for parity in (0, 1):
            rows = chosen.experts[(first + parity) % 2 :: 2]
            counts[parity].add_(rows.flatten().bincount(minlength=5))
        return chosen

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder)) as engine:
            counts.zero_()
            calls.clear()
            await batch(engine, [prompt], [greedy(NUM_COUNTED)])

    with monkeypatch.context() as patch:
        patch.setattr(reference, "choose", choose)
        asyncio.run(run())
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padded": 8},
        {"max_prefill_length": 7, "redundant_experts": 3},
        {"dp_attention": True, "max_prefill_length": 7},
        {"dp_attention": True, "padded": 8, "redundant_experts": 3},
    ],
    ids=str,
)
def test_the_tokens_of_each_ranks_experts_are_counted(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, of ranks without requests, too, and without the steps at the start; of an
    expert with a copy, where each token was."""
    case = case_of("moe-5")
    copies: Copies = ()
    prompt, num_layers = case.prompts[1], case.spec.num_layers
    if num_copies := options.get("redundant_experts"):
        busy = [1, 1, 9, 8, 1]
        file = tmp_path / "counts.json"
        file.write_text(json.dumps({"layers": [busy] * num_layers}))
        options = {**options, "expert_counts": str(file)}
        copies = place_copies(busy, 2, num_copies)
        assert copies == ((2, 3), (0,))

    async def run() -> ExpertTokens | None:
        async with AsyncEngine(load_engine(case.folder, tp=2, ep=True, **options)) as engine:
            before = engine.stats().experts
            assert before is not None and before.by_rank == (0, 0)
            await batch(engine, [prompt], [greedy(NUM_COUNTED)])
            return engine.stats().experts

    counts = counted(monkeypatch, case, prompt)
    assert int(counts.sum()) == (len(prompt) + NUM_COUNTED - 1) * 2 * num_layers
    tokens = asyncio.run(run())
    assert tokens is not None
    on_rank_1 = torch.tensor(ranks_of(5, 2, copies), dtype=torch.bool)
    assert tokens.by_rank == (int(counts[~on_rank_1].sum()), int(counts[on_rank_1].sum()))
    assert len(tokens.by_layer) == num_layers
    assert torch.tensor(tokens.by_layer).sum(0).tolist() == counts.sum(0).tolist()


def test_nothing_is_counted_without_ep() -> None:
    async def run() -> ExpertTokens | None:
        async with AsyncEngine(load_engine(case_of("moe-5").folder, tp=2)) as engine:
            return engine.stats().experts

    assert asyncio.run(run()) is None
