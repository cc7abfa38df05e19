"""Qwen3-Next and Qwen3.5, dense and with experts, against transformers, in float32."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support.divided_tiers import check_own_tiers
from support.parity import NOISE, batch, greedy, load_engine
from support.state_cases import (
    EXPERTS,
    FEW,
    HYBRID,
    NUM_SHARED,
    NUM_TOKENS,
    StateCase,
    check_hits,
    check_restart,
    drafter_of,
    save_case,
)

from minisgl.config import page_bytes, slot_bytes
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import scheduler_of
from minisgl.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
)
from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.gated_delta import reference
from minisgl.kvcache.copies import LoadRule
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.snapshots import SnapshotStats
from minisgl.layers.attention import SelfAttention
from minisgl.layers.gated_delta import DeltaHeads
from minisgl.models import decoder_reader, targets
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.qwen3_5 import NEXT, TEXT, WITH_TOWER
from minisgl.models.registry import read_model_config
from minisgl.runner import computation, load

_FOLDER = TemporaryDirectory()
SIZES = HYBRID | {"vocab_size": 257, "num_hidden_layers": 5}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


@cache
def case_of(architecture: str) -> StateCase:
    folder = Path(_FOLDER.name) / architecture
    model_class = getattr(transformers, architecture)
    has_experts = "Moe" in architecture or architecture == NEXT
    text = SIZES | (EXPERTS if has_experts else {})
    if architecture in WITH_TOWER:
        config = model_class.config_class(text_config=text, vision_config=TOWER)
    else:
        config = model_class.config_class(**text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class._from_config(config, dtype=torch.float32).eval()
        give_teeth(model)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # a state of long and of short memory
                weight.data.uniform_(-4, 0.5)
            if name.endswith("conv1d.weight"):
                weight.data.normal_(std=0.5)
    return save_case(model, folder)


def check(case: StateCase, **options: Any) -> None:
    """Compare each token up to a close call, of which there may be one."""

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, [greedy(NUM_TOKENS)] * len(case.prompts))
        close_calls = 0
        for output, run in zip(outputs, case.runs, strict=True):
            for step, (got, token) in enumerate(zip(output.token_ids, run.token_ids, strict=True)):
                if got != token:
                    assert run.margins[step] < NOISE * float(run.logits[step].abs().max())
                    close_calls += 1
                    break
        assert close_calls <= 1

    asyncio.run(run())


@pytest.mark.parametrize("architecture", [NEXT, *TEXT, *WITH_TOWER])
def test_tokens_equal_those_of_transformers(architecture: str) -> None:
    check(case_of(architecture))


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_prefill_length": 7},
    "one-row-chunks": {"max_prefill_length": 1},
    "few-requests": {"max_running_requests": 2},
    "pages-of-one": {"page_size": 1},
    "calm": {"overlap": False},
    "padded": {"padded": 8},
    "retracted": {"num_pages": 40, "page_size": 4, "schedule_conservativeness": 0.02}
    | {"max_seq_len_override": 100},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_depend_on_no_option(name: str) -> None:
    check(case_of(TEXT[0]), **OPTIONS[name])


DP: dict[str, Any] = {"tp": 2, "dp_attention": True}


@pytest.mark.parametrize("architecture", [NEXT, WITH_TOWER[1]])
@pytest.mark.parametrize("split", [{"tp": 2}, {"tp": 2, "pp": 2, "ep": True}, DP], ids=str)
def test_ranks_divide_heads_or_requests_and_stages_layers(
    architecture: str, split: dict[str, Any]
) -> None:
    check(case_of(architecture), max_prefill_length=20, **split)


def test_a_rank_keeps_the_states_of_its_own_requests() -> None:
    options = {"num_pages": 20, "page_size": 4, "max_running_requests": 6, "state_cache": 0.002}
    loaded = load_engine(case_of(TEXT[0]).folder, **DP, **options)
    num_bytes, capacity = loaded.runner._own.state_bytes, loaded.capacity
    loaded.runner.close()
    layers = loaded.model.layer_specs("float32")
    assert capacity.num_snapshots == 2_000_000 // (2 * slot_bytes(layers)) > 1
    num_states = 6 // 2 + 1 + capacity.num_snapshots
    assert num_bytes == 20 * page_bytes(layers, 4) + num_states * slot_bytes(layers)
    stats = scheduler_of(loaded).kv.snapshot_stats()
    assert stats == SnapshotStats(2 * capacity.num_snapshots, 0)


def room_for(num_snapshots: int) -> float:
    """GB for so few that the device loses some of those that it needs again."""
    states = read_model_config(case_of(TEXT[0]).folder).facts().states
    return (num_snapshots + 0.01) * slot_bytes(states) / 1e9


@pytest.mark.parametrize(
    "options", [{}, {"max_prefill_length": 7}, {"padded": 8}, {"tp": 2}, {"pp": 2}], ids=str
)
def test_a_hit_in_host_memory_changes_no_token(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    num_host_tokens = check_hits(case_of(TEXT[0]), host_cache=0.02, **FEW, **options)
    assert num_host_tokens > NUM_SHARED


def test_ranks_that_divide_requests_load_states_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    check_own_tiers(case_of(TEXT[0]), state_cache=room_for(2 * 3))


@pytest.mark.parametrize(
    "drafts",
    [{}, {"speculative": "ngram", "draft_tokens": 15}, {"pp": 3}],
    ids=["", "larger states", "stages"],
)
def test_states_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any]
) -> None:
    """And where a file is lost that has some of them, the tokens are computed. The last of three
    stages has no full layer."""
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    case = case_of(TEXT[0])
    monkeypatch.setattr(load, "NgramDrafter", drafter_of(case))
    check_restart(case, tmp_path / "disk", **drafts)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefill_length": 7}, {"padded": 8}, {"pp": 2}, DP, {**DP, "padded": 8}],
    ids=str,
)
def test_a_hit_changes_no_token(options: dict[str, Any]) -> None:
    check_hits(case_of(TEXT[0]), **options)


def test_without_memory_for_snapshots_nothing_is_found() -> None:
    with pytest.raises(AssertionError):
        check_hits(case_of(TEXT[0]), state_cache=0)
    check(case_of(TEXT[0]), state_cache=0)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (NEXT, {}),
        (TEXT[0], {"max_prefill_length": 7}),
        (TEXT[0], {"padded": 8}),
        (TEXT[0], {**DP, "padded": 8}),
    ],
)
def test_only_what_counts_of_a_run_advances_a_state(
    monkeypatch: pytest.MonkeyPatch, architecture: str, options: dict[str, Any]
) -> None:
    """Also where a request goes on from a snapshot."""
    case = case_of(architecture)
    monkeypatch.setattr(load, "NgramDrafter", drafter_of(case))
    check_hits(case, speculative="ngram", draft_tokens=3, **options)


# -- mistakes that must show ----------------------------------------------------------------------


def _keep_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on from the state of the one that had its slot before."""
    monkeypatch.setattr(torch.Tensor, "index_fill_", lambda tensor, *_: tensor)


def _forget_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.gated_delta_prefill

    def prefill(rows: Any, state: Any, segments: Any) -> Any:
        state[segments.sources] = 0
        return whole(rows, state, segments)

    monkeypatch.setattr(reference, "gated_delta_prefill", prefill)


def _shift_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference._convolve
    monkeypatch.setattr(
        reference, "_convolve", lambda x, weight, silu: whole(x, weight.roll(1, -1), silu)
    )


def _leave_gate_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference, "gated_rms_norm", lambda x, gate, weight, eps: rms_norm(x, weight, eps)
    )


def _leave_gate_of_attention_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SelfAttention.forward

    def forward(self: SelfAttention, residual: Any, norm: Any, step: Any) -> Any:
        outputs = -self.spec.num_heads * self.spec.head_dim
        product = self.qkv_proj.product
        with monkeypatch.context() as patch:
            of_norm = type(product).of_norm

            def open_gate(*given: Any) -> Any:
                y, stream = of_norm(*given)
                y[:, outputs:] = 100
                return y, stream

            patch.setattr(type(product), "of_norm", open_gate)
            return whole(self, residual, norm, step)

    monkeypatch.setattr(SelfAttention, "forward", forward)


def _rotate_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_reader, "_rotary_dim", lambda fields, head_dim, share: head_dim)


def _add_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_store_one_more", lambda weight, part: weight.copy_(part))


def _merge_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps of Qwen3-Next, which interleave."""
    whole = targets._merged_maps

    def merged_maps(path: str, module: Any, scheme: Any) -> Any:
        module.merged = tuple(
            dataclasses.replace(each, num_heads=1) if each.name == "in_proj_qkvz" else each
            for each in module.merged
        )
        return whole(path, module, scheme)

    monkeypatch.setattr(targets, "_merged_maps", merged_maps)


MISTAKES = (
    *(_keep_states, _forget_between_chunks, _shift_convolution, _leave_gate_out),
    *(_leave_gate_of_attention_out, _rotate_whole_heads, _add_no_one, _merge_in_turn),
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_tokens(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(NEXT)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, max_prefill_length=20, max_running_requests=2)


def _begin_without_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computation, "snapshot_slot", lambda _, scratch: scratch)


def _begin_from_another_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = computation.snapshot_slot
    monkeypatch.setattr(computation, "snapshot_slot", lambda _, scratch: whole(0, scratch))


def _take_it_a_page_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCacheManager.take_snapshots

    def take_snapshots(*arguments: Any) -> Any:
        taken = whole(*arguments)
        return tuple(each._replace(end=max(each.end - 4, arguments[2])) for each in taken)

    monkeypatch.setattr(KVCacheManager, "take_snapshots", take_snapshots)


def _take_it_at_the_end_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCacheManager.take_snapshots

    def take_snapshots(*arguments: Any) -> Any:
        return tuple(each._replace(end=arguments[3]) for each in whole(*arguments))

    monkeypatch.setattr(KVCacheManager, "take_snapshots", take_snapshots)


MISTAKES_WITH_SNAPSHOTS = (
    *(_begin_without_the_snapshot, _begin_from_another_snapshot),
    *(_take_it_a_page_early, _take_it_at_the_end_of_chunks),
)


@pytest.mark.parametrize("mistake", MISTAKES_WITH_SNAPSHOTS)
def test_mistakes_with_snapshots_change_tokens(
    mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(TEXT[0])
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="a token differs"):
        check_hits(case)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_cache": 1e300}, "allowed: a number of GB up to 1,000,000"),
        (
            {"state_cache": 0.0, "host_cache": 1.0},
            "of use only with snapshots .* --state-cache above",
        ),
        ({"state_cache": -1.0}, "allowed: a number of GB up to 1,000,000"),
        ({"state_cache": 1e-6}, r"a snapshot takes .* GB; allowed: 0, or more"),
        ({"state_cache": 1.0, "cache_type": "naive"}, "it is for --cache-type radix"),
    ],
)
def test_a_state_cache_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine(case_of(TEXT[0]).folder, **options)


def test_snapshots_that_do_not_fit_are_named_with_their_option() -> None:
    with pytest.raises(DeviceMemoryError, match=r"snapshots of states: .* --state-cache or"):
        load_engine(case_of(TEXT[0]).folder, state_cache=1e6)


def test_a_share_of_the_head_is_named_from_where_it_is(tmp_path: Path) -> None:
    folder = shutil.copytree(case_of(TEXT[0]).folder, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.3, not a share"):
        load_engine(folder)


def test_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(case_of(TEXT[0]).folder, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    config["linear_key_head_dim"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"linear_attn\.\w+\.weight has the shape"):
        load_engine(folder)


def test_the_memory_of_a_request_is_counted() -> None:
    """Of the published sizes of Qwen3.8-27B."""
    heads = DeltaHeads(
        num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4
    )
    spec = heads.state("bfloat16")
    assert spec.bytes_per_slot == 48 * 128 * 128 * 4 + 10_240 * 3 * 2
    assert spec.on_rank(4).bytes_per_slot * 4 == spec.bytes_per_slot
