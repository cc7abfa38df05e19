"""LFM2, whose state is that of a convolution alone, against transformers, in float32."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support.parity import batch, greedy, load_engine
from support.state_cases import LENGTHS, NUM_TOKENS, StateCase, drafter_of, save_case

from minisgl.engine import AsyncEngine
from minisgl.errors import CheckpointError
from minisgl.kernels.gated_delta import reference
from minisgl.layers import short_conv
from minisgl.layers.linear import MergedMap
from minisgl.models import lfm2
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.registry import read_model_config
from minisgl.runner import load

_FOLDER = TemporaryDirectory()


@cache
def case() -> StateCase:
    config = transformers.Lfm2Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        block_multiple_of=32,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        tie_word_embeddings=True,
    )
    folder = Path(_FOLDER.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.Lfm2ForCausalLM._from_config(config, dtype=torch.float32).eval()
        give_teeth(model)
    return save_case(model, folder)


def check(**options: Any) -> list[int]:
    """Ask the prompts together, then each alone again; returns the tokens that those found."""

    async def run() -> list[int]:
        async with AsyncEngine(load_engine(case().folder, **options)) as engine:
            outputs = await batch(engine, case().prompts, [greedy(NUM_TOKENS)] * len(LENGTHS))
            again = [
                (await batch(engine, [prompt], [greedy(NUM_TOKENS)]))[0]
                for prompt in case().prompts
            ]
        for output, wanted in zip([*outputs, *again], [*case().runs, *case().runs], strict=True):
            assert output.token_ids == wanted.token_ids, "a token differs"
        return [output.num_cached_tokens for output in again]

    return asyncio.run(run())


DP: dict[str, Any] = {"tp": 2, "dp_attention": True}


@pytest.mark.parametrize("options", [{"max_prefill_length": 7}, {"padded": 8}, DP])
def test_only_what_counts_of_a_run_advances_a_state(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(load, "NgramDrafter", drafter_of(case()))
    check(speculative="ngram", draft_tokens=3, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_prefill_length": 7},
    "padded": {"padded": 8},
    "tp": {"tp": 2},
    "dp": DP,
    "pp": {"pp": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_equal_those_of_transformers_with_and_without_hits(name: str) -> None:
    assert check(page_size=4, **OPTIONS[name]) == [(length - 1) // 4 * 4 for length in LENGTHS]


def test_the_inner_size_of_a_checkpoint_is_adjusted_as_its_fields_say() -> None:
    assert read_model_config(case().folder).facts().intermediate_size == 128  # 2/3 of 160, in 32s


def config_of(tmp_path: Path, **changes: Any) -> Any:
    config = json.loads((case().folder / "config.json").read_text())
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


def _shift_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference._convolve
    monkeypatch.setattr(
        reference, "_convolve", lambda x, weight, bias: whole(x, weight.roll(1, -1), bias)
    )


def _add_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("causal_conv", "causal_conv_decode"):
        whole = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *arguments, silu, whole=whole: whole(*arguments, silu=True)
        )


def _swap_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = MergedMap("in_proj", ("c", "b", "x"))
    monkeypatch.setattr(short_conv, "MergedMap", lambda *_: swapped)


def _swap_maps_of_mlps(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"feed_forward.w1": "mlp.up_proj", "feed_forward.w3": "mlp.gate_proj"}
    monkeypatch.setattr(lfm2, "_NAMES", lfm2._NAMES | swapped)


@pytest.mark.parametrize(
    "mistake", [_shift_convolution, _add_silu, _swap_gates, _swap_maps_of_mlps]
)
def test_mistakes_change_tokens(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case()
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="a token differs"):
        check(max_prefill_length=20)
