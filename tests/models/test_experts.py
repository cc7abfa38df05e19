"""Qwen3-MoE: its config, both forms of its checkpoints, and its tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import MODELS
from safetensors.torch import load_file, save_file
from support.checkpoints import EXPERT_SPECS, make_checkpoint, spec_named
from support.parity import FEW_PAGES, SAMPLED, batch, case_of, check, load_engine
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.peak import Peak
from minisgl.bench.roofline import DecodeStep, Work
from minisgl.config import ModelFacts
from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError
from minisgl.kernels.moe import reference as experts
from minisgl.kernels.moe.reference import Routing
from minisgl.models.config import NativeConfig
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

NAMES = [spec.name for spec in EXPERT_SPECS]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_prefill_length": 7, "page_size": 4},
    {"alone": True, "overlap": False, "cache_type": "naive"},
    {"padded": 8},
    FEW_PAGES,
]


@pytest.mark.parametrize(
    ("name", "variant"),
    [*(("moe", variant) for variant in VARIANTS), ("moe-60", {}), ("moe-60", VARIANTS[1])],
    ids=str,
)
def test_greedy_tokens_equal_those_of_transformers(name: str, variant: dict[str, Any]) -> None:
    check(case_of(name), **variant)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_shard_every_expert(name: str) -> None:
    check_with_aborts(short_case_of(name), tp=2)


def test_sampled_tokens_depend_on_seed_and_index_alone() -> None:
    case = case_of("moe")

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            return [output.token_ids for output in await batch(engine, case.prompts, SAMPLED)]

    wanted = asyncio.run(run({}))
    assert asyncio.run(run({"padded": 8})) == wanted
    assert asyncio.run(run({"max_running_requests": 1, "max_prefill_length": 7})) == wanted


# -- the config -----------------------------------------------------------------------------------


def changed(folder: Path, target: Path, **fields: object) -> Path:
    """A copy with other fields in its config; None takes one away."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(spec_named("moe"), tmp_path_factory.mktemp("moe"))


def test_the_config_decides_which_layers_have_experts(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(spec_named("moe-60"), tmp_path))
    assert config.experts is not None and config.experts.layers == {1}
    facts = config.facts()
    assert facts.experts is not None and facts.experts.num_layers == 1
    # Of dense layers 256, of experts 32: ranks must divide both.
    assert facts.intermediate_size == 256 and facts.experts.size == 32
    assert facts.can_divide(4) and not facts.can_divide(3)


def test_both_field_names_of_the_number_of_experts_are_read(folder: Path, tmp_path: Path) -> None:
    old = changed(folder, tmp_path / "old", num_experts=8, num_local_experts=None)
    assert read_model_config(old).experts == read_model_config(folder).experts


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_experts_per_tok": 9}, CheckpointError, "9 experts for each token"),
        ({"moe_intermediate_size": None}, CheckpointError, "lacks moe_intermediate_size"),
        ({"num_experts": None, "num_local_experts": None}, CheckpointError, "lacks num_experts"),
        ({"num_experts": 0, "num_local_experts": None}, CheckpointError, "num_experts is 0"),
        ({"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": 1}, CheckpointError, "mlp_only_layers is 1, not a list"),
        ({"mlp_only_layers": ["1"]}, CheckpointError, "mlp_only_layers is"),
    ],
)
def test_an_inconsistent_experts_config_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_model_config(changed(folder, tmp_path / "changed", **fields))


def test_a_dense_model_leaves_fields_of_experts_aside_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = make_checkpoint(spec_named("qwen3"), tmp_path / "dense")
    found = read_model_config(changed(dense, tmp_path / "changed", num_experts=8))
    assert isinstance(found, NativeConfig) and found.experts is None
    assert "the field num_experts (8) is left aside" in caplog.text


# -- checkpoints ----------------------------------------------------------------------------------


def load(folder: Path) -> CausalLM:
    return load_model(
        read_model_config(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=64,
    )


def stack(folder: Path, target: Path, *, transposed: bool = False) -> Path:
    """The same checkpoint, with one tensor for all experts of a layer."""
    shutil.copytree(folder, target)
    [file] = target.glob("*.safetensors")
    weights = load_file(file)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        matrices = {
            kind: torch.stack([weights.pop(f"{prefix}.{e}.{kind}.weight") for e in range(8)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        gates, ups, downs = matrices.values()
        for name, stacked in (
            ("gate_up_proj", torch.cat((gates, ups), dim=1)),
            ("down_proj", downs),
        ):
            weights[f"{prefix}.{name}"] = stacked.mT.contiguous() if transposed else stacked
    save_file(weights, file, {"format": "pt"})
    return target


def test_stacked_expert_weights_load_the_same_as_separate_ones(
    folder: Path, tmp_path: Path
) -> None:
    one, other = load(folder).state_dict(), load(stack(folder, tmp_path / "stacked")).state_dict()
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("size", [64, 96, 128])
def test_transposed_expert_stacks_are_refused(size: int, tmp_path: Path) -> None:
    """At size 64 gate_up_proj looks right by accident, at size 128 down_proj."""
    spec = spec_named("moe")
    spec = dataclasses.replace(spec, extra={**spec.extra, "moe_intermediate_size": size})
    folder = make_checkpoint(spec, tmp_path / "experts")
    with pytest.raises(CheckpointError, match=r"_proj has the shape"):
        load(stack(folder, tmp_path / "stacked", transposed=True))


def test_two_ranks_load_their_shards_of_stacked_experts(tmp_path: Path) -> None:
    case = short_case_of("moe")
    stacked = stack(case.folder, tmp_path / "stacked")

    async def run(path: Path, **options: Any) -> list[list[int]]:
        async with AsyncEngine(load_engine(path, **options)) as engine:
            outputs = await batch(engine, case.prompts[:2], [SAMPLED[0]] * 2)
            return [output.token_ids for output in outputs]

    assert asyncio.run(run(stacked, tp=2)) == asyncio.run(run(case.folder))


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    [file] = broken.glob("*.safetensors")
    weights = load_file(file)
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights: layers\.1\.mlp\.experts\.5\.up"):
        load(broken)


# -- the router -----------------------------------------------------------------------------------


def test_routing_weights_are_normalized_if_configured() -> None:
    logits = torch.randn(5, 16)
    chosen, plain = experts.topk_softmax(logits, Routing(4, normalize=False))
    same, normal = experts.topk_softmax(logits, Routing(4, normalize=True))
    assert torch.equal(chosen, same)
    assert torch.equal(plain, logits.softmax(-1).gather(1, chosen.long()))
    torch.testing.assert_close(normal.sum(-1), torch.ones(5))


# -- the limit of the hardware --------------------------------------------------------------------


def qwen3_30b_a3b(folder: Path) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"]))
    return read_model_config(folder).facts()


def work_of(model: ModelFacts, lengths: list[int], num_steps: int, max_running: int) -> Work:
    return Work.of(
        run_of(lengths, num_steps),
        model,
        Peak(4.28e12, 800e12),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        max_running=max_running,
    )


def run_of(lengths: list[int], num_steps: int) -> RunRecord:
    requests = [
        RequestRecord(
            submitted_s=0.0,
            first_token_s=1.0,
            last_token_s=2.0,
            num_prompt_tokens=512,
            num_cached_tokens=0,
            num_output_tokens=length,
        )
        for length in lengths
    ]
    return RunRecord(requests, num_steps=num_steps, num_retractions=0)


@pytest.mark.parametrize(("batch_size", "experts_read"), [(1, 8), (8, 51.6), (32, 111.8)])
def test_the_roofline_of_a_decode_step_reads_the_chosen_experts(
    batch_size: int, experts_read: float, tmp_path: Path
) -> None:
    model = qwen3_30b_a3b(tmp_path)
    run = run_of([256] * batch_size, 256)
    step = DecodeStep.of(run, model, dtype="bfloat16", kv_dtype="bfloat16")
    dense = 48 * 2048 * ((2 * 32 + 2 * 4) * 128 + 128) + 2048 * 151936
    assert step.weight_bytes == pytest.approx(
        2 * (dense + 48 * experts_read * 3 * 2048 * 768), rel=1e-3
    )
    if batch_size == 1:  # on an H200
        assert step.seconds(Peak(4.28e12, 800e12)) == pytest.approx(1.43e-3, rel=0.02)


def test_the_roofline_of_a_run_sums_its_steps(tmp_path: Path) -> None:
    model = qwen3_30b_a3b(tmp_path)
    assert model.experts is not None
    each = 2 * 48 * model.experts.num_weights  # bytes of one expert of every layer
    dense = 2 * (model.num_layer_weights + model.num_head_weights)
    # Two decode together for two steps and one alone for three more, behind one of prefill.
    work = work_of(model, [3, 6], num_steps=6, max_running=256)
    experts_read = 128 + 2 * 128 * (1 - (1 - 8 / 128) ** 2) + 3 * 8
    assert work.weight_bytes == pytest.approx(6 * dense + experts_read * each, rel=1e-6)
    # Where two run at a time, the third follows the first, and is prefilled by itself.
    work = work_of(model, [3, 6, 4], num_steps=7, max_running=2)
    experts_read = 2 * 128 + 5 * 128 * (1 - (1 - 8 / 128) ** 2)
    assert work.weight_bytes == pytest.approx(7 * dense + experts_read * each, rel=1e-6)


def test_the_roofline_of_a_prompt_counts_the_chosen_experts(tmp_path: Path) -> None:
    model = qwen3_30b_a3b(tmp_path)
    assert model.experts is not None
    work = work_of(model, [3, 6], num_steps=6, max_running=256)
    per_token = model.num_layer_weights + 48 * 8 * model.experts.num_weights
    pairs = 512 * 513 // 2 * 4 * 48 * 32 * 128
    assert work.prefill_operations == 2 * (512 * 2 * per_token + 2 * model.num_head_weights + pairs)
