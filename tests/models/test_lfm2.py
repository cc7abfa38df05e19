"""LFM2 and LFM2-MoE, whose state is that of a convolution alone, against transformers, in
float32."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import load_reference
from support.parity import batch, greedy, load_engine
from support.quantized import FORMATS, edit_config
from support.state_cases import (
    FEW,
    LENGTHS,
    NUM_SHARED,
    NUM_TOKENS,
    StateCase,
    check_handover,
    check_hits,
    check_restart,
    drafter_of,
    save_case,
)
from transformers import AutoModelForCausalLM
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from minisgl.config import slot_bytes
from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError, MinisglError
from minisgl.kernels.gated_delta import reference
from minisgl.kernels.moe.grouped import ByScores, choose_grouped
from minisgl.kvcache.copies import LoadRule
from minisgl.layers import grouped_experts, short_conv
from minisgl.layers.linear import MergedMap
from minisgl.models import lfm2
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.lfm2 import ConvConfig
from minisgl.models.registry import read_model_config
from minisgl.runner import load

_FOLDER = TemporaryDirectory()
LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": [
        "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
    ],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "tie_word_embeddings": True,
}
MODELS = {
    "dense": (transformers.Lfm2Config, {"intermediate_size": 160, "block_multiple_of": 32}),
    "experts": (
        transformers.Lfm2MoeConfig,
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
}


@cache
def case(name: str = "dense") -> StateCase:
    make, more = MODELS[name]
    config = make(**SIZES, **more)
    folder = Path(_FOLDER.name) / name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        give_teeth(model)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("expert_bias"):
                buffer.normal_(std=0.3)
    return save_case(model, folder)


def check(case: StateCase, **options: Any) -> list[int]:
    """Ask the prompts together, then each alone again; returns the tokens that those found."""

    async def run() -> list[int]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, [greedy(NUM_TOKENS)] * len(LENGTHS))
            again = [
                (await batch(engine, [prompt], [greedy(NUM_TOKENS)]))[0] for prompt in case.prompts
            ]
        for output, wanted in zip([*outputs, *again], [*case.runs, *case.runs], strict=True):
            assert output.token_ids == wanted.token_ids, "a token differs"
        return [output.num_cached_tokens for output in again]

    return asyncio.run(run())


DP: dict[str, Any] = {"tp": 2, "dp_attention": True}


@pytest.mark.parametrize("options", [{"max_prefill_length": 7}, {"padded": 8}, DP])
def test_only_what_counts_of_a_run_advances_a_state(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(load, "NgramDrafter", drafter_of(case()))
    check(case(), speculative="ngram", draft_tokens=3, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_prefill_length": 7},
    "padded": {"padded": 8},
    "tp": {"tp": 2},
    "dp": DP,
    "pp": {"pp": 2},
    "ep": {"tp": 2, "ep": True},
    "dp-ep": DP | {"ep": True, "padded": 8},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # The mixture has dense layers, too, and the same convolutions.
        *(("dense", OPTIONS[each]) for each in ("plain", "padded", "dp")),
        *(("experts", options) for options in OPTIONS.values()),
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers_with_and_without_hits(
    name: str, options: dict[str, Any]
) -> None:
    found = check(case(name), page_size=4, **options)
    assert found == [(length - 1) // 4 * 4 for length in LENGTHS]


@pytest.mark.parametrize(("name", "options"), [("dense", {}), ("experts", {"tp": 2})], ids=str)
def test_states_come_back_from_host_memory(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    assert check_hits(case(name), host_cache=0.02, **FEW, **options) > NUM_SHARED


@pytest.mark.parametrize(
    "drafts", [{}, {"speculative": "ngram", "draft_tokens": 15}], ids=["", "larger states"]
)
def test_states_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any]
) -> None:
    """Also where what a run keeps makes them longer."""
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    monkeypatch.setattr(load, "NgramDrafter", drafter_of(case()))
    check_restart(case(), tmp_path / "disk", **drafts)


def test_states_come_from_another_engine_with_what_drafts_need(tmp_path: Path) -> None:
    check_handover(case(), tmp_path, speculative="ngram")


def test_stages_load_snapshots_that_take_more_pages_on_one_than_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which the device has lost some, with their pages."""
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    states = read_model_config(case().folder).facts().states
    few = {"num_pages": 79, "page_size": 2, "max_seq_len_override": 156, "max_running_requests": 2}
    options = {"host_cache": 0.02, "state_cache": 8.01 * slot_bytes(states) / 1e9, "pp": 2, **few}

    async def run() -> None:
        async with AsyncEngine(load_engine(case().folder, **options)) as engine:
            for asked in range(2):
                cached: list[int] = []
                for token in range(8 * asked):  # they push out pages and snapshots
                    await batch(engine, [[token] * 140], [greedy(1)])
                for prompt, wanted in zip(case().prompts, case().runs, strict=True):
                    (output,) = await batch(engine, [prompt], [greedy(NUM_TOKENS)])
                    assert output.token_ids == wanted.token_ids, "a token differs"
                    cached.append(output.num_cached_tokens)
            assert cached == [(length - 1) // 2 * 2 for length in LENGTHS]
            assert engine.stats().counters.num_host_tokens > NUM_SHARED
            snapshots = engine._scheduler.kv.snapshots
            assert snapshots is not None and len(snapshots.indices) > 1

    asyncio.run(run())


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_quantized_maps_equal_those_of_the_same_weights(
    name: str, tmp_path: Path
) -> None:
    """In INT4, with inputs as they are. Neither router, convolution nor embedding is quantised."""
    format, quantized, plain = FORMATS["ct-int4-64"], tmp_path / "quantized", tmp_path / "plain"
    for folder in (quantized, plain):
        shutil.copytree(case(name).folder, folder)
    tensors = load_file(plain / "model.safetensors")
    maps = {each for each in tensors if re.search(r"(\.w\d|_proj)\.weight$", each)}
    packed = {each: format.pack(tensors[each]) for each in maps}
    same = tensors | {each: packed[each].weight.contiguous() for each in maps}
    save_file(same, plain / "model.safetensors", {"format": "pt"})
    stored = {each: tensors[each] for each in tensors.keys() - maps} | {
        f"{each.removesuffix('weight')}{kind}": tensor.contiguous()
        for each, made in packed.items()
        for kind, tensor in made.tensors.items()
    }
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    edit_config(quantized, quantization_config=dict(format.config))
    wanted = save_case(load_reference(plain), tmp_path / "wanted")
    check(replace(wanted, folder=quantized))


def test_the_inner_size_of_a_checkpoint_is_adjusted_as_its_fields_say() -> None:
    assert read_model_config(case().folder).facts().intermediate_size == 128  # 2/3 of 160, in 32s


def config_of(tmp_path: Path, name: str = "dense", **changes: Any) -> Any:
    config = json.loads((case(name).folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return read_model_config(tmp_path)


def test_fields_that_older_checkpoints_have_are_read_as_by_transformers(tmp_path: Path) -> None:
    plain = {"rope_type": "default"}
    assert config_of(tmp_path, rope_parameters=plain).rope.theta == 1_000_000
    assert config_of(tmp_path, rope_parameters=plain, rope_theta=5e5).rope.theta == 500_000
    named = config_of(tmp_path, layer_types=None, full_attn_idxs=[1, 3])
    assert named.conv_layers == {0, 2, 4}
    tied = config_of(tmp_path, tie_word_embeddings=None, tie_embedding=False)
    assert not tied.tie_word_embeddings
    with pytest.raises(CheckpointError, match="one of which attends at least"):
        config_of(tmp_path, layer_types=None, full_attn_idxs=[])


def test_the_published_config_of_experts_is_read(tmp_path: Path) -> None:
    """That of LFM2-8B-A1B."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LFM2_8B_A1B))
    config = read_model_config(tmp_path)
    assert isinstance(config, ConvConfig) and config.experts is not None
    assert config.experts.layers == {*range(2, 24)} and len(config.conv_layers) == 18
    assert config.rope.theta == 1_000_000 and config.tie_word_embeddings
    facts = config.facts()
    assert facts.experts is not None
    num_weights = facts.num_layer_weights + facts.num_head_weights
    num_weights += facts.experts.num_layers * facts.experts.num_experts * facts.experts.num_weights
    assert num_weights == pytest.approx(8.3e9, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "7 experts for each token are more than the 6 that there are"),
        ({"layer_types": None}, "layer_types is None, not a list"),
        ({"use_expert_bias": "yes"}, "use_expert_bias is 'yes', not true or false"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MinisglError, match=message):
        config_of(tmp_path, "experts", **changes)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_experts_and_their_weights_are_those_of_transformers(
    tmp_path: Path, normalize: bool, has_bias: bool
) -> None:
    """Also where weights that add up to little are made to add up to less than 1."""
    read = config_of(tmp_path, "experts", norm_topk_prob=normalize, use_expert_bias=has_bias)
    assert read.experts.router_bias == has_bias
    made = transformers.Lfm2MoeConfig(
        **SIZES, **MODELS["experts"][1], norm_topk_prob=normalize, use_expert_bias=has_bias
    )
    router = Lfm2MoeTopKRouter(made)
    router.weight.data = torch.eye(6, 64)
    logits = torch.randn(40, 6) - 6 * torch.arange(4).repeat(10)[:, None]
    bias = torch.randn(6) if has_bias else None
    _, weights, chosen = router(F.pad(logits, (0, 58)), bias)
    found, their_weights = choose_grouped(ByScores(logits, read.experts.routing, bias))
    assert found.equal(chosen.int())
    torch.testing.assert_close(their_weights, weights)


def _shift_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference._convolve
    monkeypatch.setattr(
        reference, "_convolve", lambda x, weight, silu: whole(x, weight.roll(1, -1), silu)
    )


def _add_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("causal_conv", "causal_conv_runs"):
        whole = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *arguments, silu, whole=whole: whole(*arguments, silu=True)
        )


def _swap_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = MergedMap("in_proj", ("c", "b", "x"))
    monkeypatch.setattr(short_conv, "MergedMap", lambda *_: swapped)


def _swap_maps_of_mlps(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {".w1": ".up_proj", ".w3": ".gate_proj"}
    monkeypatch.setattr(lfm2, "_NAMES", lfm2._NAMES | swapped)


def _leave_bias_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grouped_experts.ByScores
    monkeypatch.setattr(
        grouped_experts, "ByScores", lambda logits, routing, _: whole(logits, routing)
    )


def _leave_factor_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lfm2.GroupRouting
    monkeypatch.setattr(lfm2, "GroupRouting", lambda **values: whole(**values | {"factor": 1.0}))


IN_EITHER = (_shift_convolution, _add_silu, _swap_gates, _swap_maps_of_mlps)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        *(("dense", mistake) for mistake in IN_EITHER),
        *(("experts", mistake) for mistake in (*IN_EITHER, _leave_bias_out, _leave_factor_out)),
    ],
)
def test_mistakes_change_tokens(name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case(name)
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="a token differs"):
        check(case(name), max_prefill_length=20)
