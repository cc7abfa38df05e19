"""The arithmetic of layouts: what ranks hold and read, and which layout it prefers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dummy_config import config_of
from support.adopted_checkpoints import write_checkpoint
from support.checkpoints import make_checkpoint, spec_named
from support.gemma_checkpoints import checkpoint_of
from support.parity import load_engine
from support.quantized import edit_config
from support.ranks import Rank
from support.resolving import CPU, GPU, MODEL, resolved
from torch import nn

from minisgl.config import (
    AttentionSpec,
    DeviceFacts,
    EngineConfig,
    ExpertFacts,
    ModelFacts,
    with_layout,
)
from minisgl.config.parallel import (
    USUAL_TOKENS,
    Layout,
    Load,
    _expected_largest,
    advise,
    rank_share,
)
from minisgl.engine.startup import scheduler_of
from minisgl.errors import ConfigError
from minisgl.models.formats.int4 import Awq
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.ranks.several_ranks import SeveralRanks
from minisgl.runner.setup import read_setup

DIVIDED = [Layout(2), Layout(4), Layout(2, ep=True), Layout(4, ep=True)]
LAYOUTS = [Layout(1), *DIVIDED, *(replace(layout, dp_attention=True) for layout in DIVIDED)]
FLOAT32: dict[str, str] = {"dtype": "float32", "kv_dtype": "float32"}


def matrix_bytes(module: nn.Module) -> int:
    """Of what the arithmetic counts: matrices, not norms and biases."""
    named = dict(module.named_parameters())
    return sum(
        weight.nbytes for name, weight in named.items() if weight.dim() > 1 and "bias" not in name
    )


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "llama-biased": lambda folder: make_checkpoint(spec_named("llama-biased"), folder),
    "llama3": lambda folder: make_checkpoint(spec_named("llama3"), folder),  # one KV head, tied
    "moe-5": lambda folder: make_checkpoint(spec_named("moe-5"), folder),
    "moe-60": lambda folder: make_checkpoint(spec_named("moe-60"), folder),
    "gpt-oss": lambda folder: make_checkpoint(spec_named("gpt-oss"), folder),
    "deepseek-v2": lambda folder: make_checkpoint(spec_named("deepseek-v2"), folder),
    "deepseek-v3": lambda folder: make_checkpoint(spec_named("deepseek-v3"), folder),
    "gemma": lambda folder: checkpoint_of("experts")[0],
    "qwen2-moe": lambda folder: write_checkpoint("Qwen2MoeForCausalLM", folder),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ranks_hold_what_the_arithmetic_says(name: str, tmp_path: Path) -> None:
    impl = "adopted" if name == "qwen2-moe" else "auto"
    folder = CHECKPOINTS[name](tmp_path)
    config = read_model_config(folder, model_impl=impl)
    facts, num_compared = config.facts(), 0
    for layout in LAYOUTS:
        if not layout.can_divide(facts) or (layout.dp_attention and impl == "adopted"):
            continue
        held: list[int] = []
        divided = config.by_request() if layout.dp_attention else config
        for rank in range(layout.tp):
            model: Any = load_model(
                replace(divided, experts_by_rank=layout.ep),
                folder,
                dtype=torch.float32,
                device=torch.device("cpu"),
                load_format="dummy",
                max_seq_len=64,
                ranks=Rank(rank, layout.tp),
            )
            held.append(matrix_bytes(getattr(model, "module", model)))
            kv = sum(spec.bytes_per_token for spec in model.layer_specs("float32"))
        share = rank_share(facts, layout, **FLOAT32)
        # A map to keys that are values, too, counts twice where several ranks have a copy.
        close = 0.04 if name == "gemma" else 1e-3
        assert share.weight_bytes == pytest.approx(max(held), rel=close), layout
        assert share.kv_bytes * (layout.tp if layout.dp_attention else 1) == kv
        num_compared += 1
    assert num_compared >= {"llama-biased": 4, "llama3": 5, "qwen2-moe": 3}.get(name, 6)


KV_BYTES = 1_000_000


@pytest.mark.parametrize(
    ("name", "tp", "gain"), [("qwen3", 2, 1), ("qwen3", 4, 2), ("deepseek-v3", 2, 2)]
)
def test_engines_have_room_for_the_tokens_of_the_arithmetic(
    name: str, tp: int, gain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a memory that the ranks share. gain: how many times the tokens there are if ranks divide
    the requests; of a Qwen3 of two KV heads, and latents, which are alike for all heads."""
    small = replace(CPU, free_cpu_bytes=4 * KV_BYTES)  # a quarter of which is for the KV cache
    monkeypatch.setattr("minisgl.runner.setup.device_facts", lambda facts: small)
    folder = make_checkpoint(spec_named(name), tmp_path)
    facts, found = read_model_config(folder).facts(), list[int]()
    for by_request in (False, True):
        layout = Layout(tp, dp_attention=by_request)
        share = rank_share(facts, layout, **FLOAT32)
        loaded = load_engine(
            folder,
            tp=tp,
            dp_attention=by_request,
            num_pages=None,
            page_size=1,
            load_format="dummy",
        )
        num_bytes = loaded.runner._own.state_bytes
        loaded.runner.close()
        num_tokens, num_owners = loaded.capacity.num_tokens, tp if by_request else 1
        assert scheduler_of(loaded).kv.num_pages - 1 == num_tokens
        left_over = share.num_tokens(share.weight_bytes + KV_BYTES // tp) - num_tokens
        assert 0 <= left_over < num_owners
        # With a scratch page on each rank.
        assert num_bytes == (num_tokens + num_owners) * share.kv_bytes
        found.append(num_tokens)
    assert found[1] == pytest.approx(gain * found[0], abs=tp)


@pytest.mark.parametrize("ep", [False, True])
def test_an_engine_of_two_ranks_allocates_what_the_arithmetic_says(
    ep: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(spec_named("moe-5"), tmp_path)
    loaded = load_engine(folder, tp=2, ep=ep, num_pages=9, page_size=4, load_format="dummy")
    runner = loaded.runner
    assert isinstance(runner, SeveralRanks)
    try:
        share = rank_share(loaded.model, Layout(2, ep), **FLOAT32)
        assert runner._own.state_bytes == 9 * 4 * share.kv_bytes
        # Rank 0 has two of five experts.
        held = matrix_bytes(runner._own._computation._model)  # type: ignore[arg-type]
        expert_bytes = share.expert_bytes * 2 // 3 if ep else share.expert_bytes
        assert held == share.weight_bytes - share.expert_bytes + expert_bytes
    finally:
        runner.close()


# -- what a step reads ----------------------------------------------------------------------------


def facts_of(name: str, folder: Path) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return read_model_config(folder).facts()


@pytest.mark.parametrize(("num_rows", "worst"), [(1, 2.6), (64, 1.05), (256, 1.001)])
def test_the_fullest_rank_reads_more_experts_with_few_rows(
    num_rows: int, worst: float, tmp_path: Path
) -> None:
    """As often as drawing experts shows: of 128 a row chooses 8, and 8 ranks have 16 each."""
    facts = facts_of("Qwen3-30B-A3B", tmp_path)
    assert facts.experts is not None
    facts = replace(facts, experts=replace(facts.experts, num_experts=128, num_chosen=8))
    shares = [
        rank_share(facts, Layout(4, ep), dtype="bfloat16", kv_dtype="bfloat16")
        for ep in (False, True)
    ]
    load = Load(num_rows=num_rows, num_tokens=0)
    cut, whole = (share.step_bytes(load) - share.dense_bytes for share in shares)
    random.seed(0)
    fullest = 0.0
    num_draws = 300
    for _ in range(num_draws):
        chosen = {e for _ in range(num_rows) for e in random.sample(range(128), 8)}
        fullest += max(sum(e // 32 == rank for e in chosen) for rank in range(4)) / num_draws
    per_expert = shares[1].expert_bytes / 32
    assert whole / per_expert == pytest.approx(fullest, rel=0.05)
    assert 1 <= whole / cut <= worst


@pytest.mark.parametrize(
    ("sizes", "probability", "expected"),
    [([1, 1], 0.5, 0.75), ([2], 0.25, 0.5), ([3, 2], 1.0, 3.0), ([4, 4], 0.0, 0.0)],
)
def test_the_expected_largest(sizes: list[int], probability: float, expected: float) -> None:
    assert _expected_largest(sizes, probability) == pytest.approx(expected)


def test_attention_by_requests_keeps_each_token_once(tmp_path: Path) -> None:
    """Of 4 KV heads 8 ranks have a copy each; divided by requests, a token is on one rank."""
    facts = facts_of("Qwen3-30B-A3B", tmp_path)
    cut = rank_share(facts, Layout(8, ep=True), dtype="bfloat16", kv_dtype="bfloat16")
    apart = rank_share(
        facts, Layout(8, ep=True, dp_attention=True), dtype="bfloat16", kv_dtype="bfloat16"
    )
    assert cut.kv_bytes == 48 * 2 * 128 * 2 and apart.kv_bytes == cut.kv_bytes / 2
    # With all of its attention: q, k, v and o of 32, 4, 4 and 32 heads.
    assert apart.dense_bytes - cut.dense_bytes == 48 * 2048 * 128 * 2 * (72 - (64 / 8 + 2))
    few, many = (Load(num_rows=256, num_tokens=number) for number in (1000, 1_000_000))
    assert cut.step_bytes(few) < apart.step_bytes(few)
    assert cut.step_bytes(many) > apart.step_bytes(many)


# -- what is preferred ----------------------------------------------------------------------------


def best(facts: ModelFacts, tp: int, memory_bytes: int = 80 * 10**9) -> Layout:
    layouts = [each for each in (Layout(tp), Layout(tp, ep=True)) if each.can_divide(facts)]
    return advise(
        facts,
        layouts,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        memory_bytes=memory_bytes,
        max_rows=256,
    ).best


def test_parts_are_preferred_unless_they_are_padded_or_cannot_be_cut(tmp_path: Path) -> None:
    qwen = facts_of("Qwen3-30B-A3B", tmp_path)
    assert best(qwen, 2) == Layout(2)
    # Of 45 chunks of an expert's inner dimension each of 8 ranks has 6.
    gpt_oss = facts_of("gpt-oss-120b", tmp_path)
    assert best(gpt_oss, 8) == Layout(8, ep=True)
    assert qwen.experts is not None
    narrow = replace(qwen, experts=replace(qwen.experts, size=770))
    assert best(narrow, 4) == Layout(4, ep=True)


def test_int4_experts_are_not_cut_below_what_kernels_take() -> None:
    scheme = Awq(group_size=32)
    experts = ExpertFacts(
        num_layers=2,
        num_experts=8,
        num_chosen=2,
        num_weights=3 * 96 * 256,
        size=96,
        quantized=scheme.quantized([(96, 256), (96, 256), (256, 96)]),
    )
    facts = replace(MODEL, experts=experts)
    assert not Layout(2).can_divide(facts) and Layout(2, ep=True).can_divide(facts)


def machine(num_gpus: int) -> DeviceFacts:
    return replace(GPU, num_gpus=num_gpus, gpu_bytes=80 * 10**9)


def test_auto_takes_the_gpus_of_the_machine(tmp_path: Path) -> None:
    gpt_oss = facts_of("gpt-oss-120b", tmp_path)

    def taken(gpus: int, **options: Any) -> tuple[int, bool]:
        config = EngineConfig(parallel="auto", **options)
        config = with_layout(config, gpt_oss, machine(gpus))
        assert config.parallel == "given"
        return config.tp, config.ep

    assert taken(8) == (8, True)
    assert taken(7) == (4, taken(4)[1])  # seven do not divide its heads
    assert taken(8, pp=2)[0] == 4
    assert taken(8, tp=2)[0] == 2
    assert taken(1) == (1, False)
    assert taken(8, device="cpu") == (1, False)


def test_an_engine_takes_what_is_best_of_its_ranks(tmp_path: Path) -> None:
    """Of two ranks on a CPU, for whose experts no two parts are alike."""
    folder = make_checkpoint(spec_named("moe-5"), tmp_path)
    edit_config(folder, moe_intermediate_size=93)
    options = EngineConfig(model=str(folder), device="cpu", tp=2, load_format="dummy")
    taken = read_setup(replace(options, parallel="auto")).config
    assert (taken.tp, taken.ep) == (2, True)
    assert any(note.endswith("arithmetic --tp 2 --ep is best") for note in taken.notes)


def test_what_was_given_stays(tmp_path: Path) -> None:
    config = EngineConfig(tp=2)
    assert with_layout(config, MODEL, machine(8)) is config
    with pytest.raises(ConfigError, match="--parallel auto: it decides about --ep itself"):
        EngineConfig(parallel="auto", ep=True, tp=2)


def test_the_log_compares_the_layouts(tmp_path: Path) -> None:
    facts = facts_of("Qwen3-30B-A3B", tmp_path)
    notes = resolved(facts, machine(2), tp=2).notes
    said = [note.removeprefix("layouts: ") for note in notes if note.startswith("layouts: ")]
    assert [line.partition(":")[0] for line in said[:-1]] == [
        "--tp 2",
        "--tp 2 --ep",
        "--tp 2 --dp-attention",
        "--tp 2 --ep --dp-attention",
    ]
    assert all("GB for the KV cache" in line and "a full step reads" in line for line in said[:-1])
    # Each GPU has half of its four KV heads.
    assert said[2].endswith("; never less than --tp 2")
    assert said[-1].endswith("by this arithmetic --tp 2 is best")
    notes = resolved(facts, machine(8), tp=8, speculative="ngram").notes
    compared = [note for note in notes if " --dp-attention (for comparison): " in note]
    assert len(compared) == 2 and not any("less than" in note for note in compared)
    assert not any("layouts" in note for note in resolved(MODEL, CPU).notes)


def taken_by_auto(facts: ModelFacts, num_gpus: int, **options: Any) -> Layout:
    config = EngineConfig(parallel="auto", **options)
    config = with_layout(config, facts, machine(num_gpus))
    return Layout(config.tp, config.ep, config.dp_attention)


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "DeepSeek-V2-Lite", "Qwen3-30B-A3B"])
def test_auto_divides_requests_where_that_reads_less(name: str, tmp_path: Path) -> None:
    """Latents, and four KV heads on eight GPUs, but not on four."""
    facts = facts_of(name, tmp_path)
    latents = name != "Qwen3-30B-A3B"
    num_gpus = 4 if name == "GLM-4.7-Flash" else 8  # of its 20 heads
    taken = taken_by_auto(facts, num_gpus)
    assert taken == Layout(num_gpus, dp_attention=True)
    assert taken_by_auto(facts, 4) == Layout(4, dp_attention=latents)
    notes = resolved(facts, machine(num_gpus), parallel="auto").notes
    assert any(f"arithmetic {taken} is best" in note for note in notes)
    tiers = {"host_cache": 1.0, "disk_cache": "folder"}
    assert taken_by_auto(facts, num_gpus, **tiers) == taken
    # Of so few requests each has to have more tokens than requests have.
    assert taken_by_auto(facts, num_gpus, max_running_requests=8) == Layout(num_gpus)


def test_requests_are_divided_only_if_that_reads_less_with_usual_lengths(tmp_path: Path) -> None:
    """Of Qwen3.8-27B much is attention."""
    facts = facts_of("Qwen3.8-27B", tmp_path)
    share = {
        by_request: rank_share(
            facts, Layout(8, dp_attention=by_request), dtype="bfloat16", kv_dtype="bfloat16"
        )
        for by_request in (False, True)
    }
    notes = resolved(facts, machine(8), parallel="auto").notes
    [said] = [note for note in notes if "layouts: --tp 8 --dp-attention: " in note]
    least = int(said.partition("less than --tp 8 with 256 rows of ")[2].split()[0].replace(",", ""))
    assert least > 4 * USUAL_TOKENS and said.endswith(" tokens or more")
    for each, is_less in ((least - 1, False), (least, True)):
        load = Load(num_rows=256, num_tokens=256 * each)
        assert (share[True].step_bytes(load) < share[False].step_bytes(load)) is is_less
    assert any("arithmetic --tp 8 is best" in note for note in notes)


NOT_COUNTED: list[dict[str, Any]] = [
    {"host_cache": 1.0, "whole_pages": True},
    {"speculative": "ngram"},
    {"task": "embed"},
    {"max_running_requests": 3},
]


@pytest.mark.parametrize("options", NOT_COUNTED, ids=str)
def test_auto_divides_no_requests_beside_what_does_not_go_with_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    facts = facts_of("GLM-4.7-Flash", tmp_path)
    assert taken_by_auto(facts, 4, **options) == Layout(4)


def test_auto_divides_no_requests_of_models_that_do_without(tmp_path: Path) -> None:
    """The windows of gemma-4-26B are not counted, and gemma-3 is adopted."""
    gemma = facts_of("gemma-4-26B-A4B", tmp_path)
    assert not taken_by_auto(gemma, 8).dp_attention
    unbounded = tuple(
        replace(layer, window=None) if isinstance(layer, AttentionSpec) else layer
        for layer in gemma.layers
    )
    assert taken_by_auto(replace(gemma, layers=unbounded), 8).dp_attention
    adopted = facts_of("Gemma-3-12B", tmp_path)
    assert not Layout(8, dp_attention=True).can_divide(adopted)
    assert Layout(8, dp_attention=True).can_divide(gemma)


def test_what_was_given_is_compared_with_ranks_that_divide_heads(tmp_path: Path) -> None:
    """Although the facts are those of a model whose ranks do not."""
    facts = facts_of("Qwen3-30B-A3B", tmp_path)
    apart = replace(facts, divides_heads=False)
    notes = resolved(apart, machine(8), tp=8, dp_attention=True).notes
    assert [note for note in notes if "layouts: " in note] == [
        note for note in resolved(facts, machine(8), tp=8).notes if "layouts: " in note
    ]
    given = {"tp": 4, "dp_attention": True}
    assert taken_by_auto(apart, 8, **given) == Layout(4, dp_attention=True)
    adopted = facts_of("Gemma-3-12B", tmp_path)
    assert taken_by_auto(adopted, 8, **given) == Layout(4, dp_attention=True)


def test_an_engine_divides_the_requests_if_auto_says_so(tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named("deepseek-v3"), tmp_path)
    options = EngineConfig(model=str(folder), device="cpu", tp=2, load_format="dummy", num_pages=64)
    setup = read_setup(replace(options, parallel="auto"))
    assert setup.config.dp_attention and not setup.facts.divides_heads
    assert setup.facts == setup.model.facts()
    # Notes tell of the memory that was free when they were written.
    asked = read_setup(replace(options, dp_attention=True)).config
    assert replace(setup.config, notes=()) == replace(asked, ep=setup.config.ep, notes=())


def test_a_drafter_attends_as_its_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the layout is chosen after both were read."""
    folder = str(make_checkpoint(spec_named("qwen3"), tmp_path))
    options = EngineConfig(
        model=folder, device="cpu", tp=2, load_format="dummy", speculative=folder, num_pages=64
    )  # else their number depends on the memory that is free
    given = read_setup(replace(options, dp_attention=True))
    assert given.network is not None and not given.network.layers.divides_heads
    chosen = {"dp_attention": True, "parallel": "given"}
    monkeypatch.setattr(
        "minisgl.runner.setup.with_layout", lambda config, *facts: replace(config, **chosen)
    )
    found = read_setup(replace(options, parallel="auto"))
    assert replace(found, config=replace(found.config, notes=given.config.notes)) == given


def test_a_layout_that_does_not_fit_is_not_preferred(tmp_path: Path) -> None:
    """Of five experts a rank has three, which take more than its half."""
    facts = facts_of("Qwen3-30B-A3B", tmp_path)
    assert facts.experts is not None
    facts = replace(facts, experts=replace(facts.experts, num_experts=5, num_chosen=2))
    held = [
        rank_share(facts, Layout(2, ep), dtype="bfloat16", kv_dtype="bfloat16").weight_bytes
        for ep in (False, True)
    ]
    assert held[0] < held[1]
    assert best(facts, 2, memory_bytes=sum(held) // 2) == Layout(2)
