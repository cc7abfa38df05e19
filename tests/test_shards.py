"""The part of the weights that each rank holds and reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import SPECS, make_checkpoint, spec_named
from support.ranks import Rank

from minisgl.models import loader
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.targets import checkpoint_targets
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, even_shard, kv_head_shard, vocab_shard


def load(folder: Path, rank: int = 0, size: int = 1, load_format: str = "safetensors") -> CausalLM:
    return load_model(
        read_model_config(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,
        max_seq_len=64,
        ranks=Rank(rank, size),
    )


@given(st.integers(1, 8), st.integers(1, 300_000))
def test_vocabulary_shards_cover_each_token_once(size: int, vocab_size: int) -> None:
    parts = [vocab_shard(vocab_size, rank, size) for rank in range(size)]
    assert len({part.size for part in parts}) == 1
    assert sum(part.num_real for part in parts) == vocab_size
    for part, following in pairwise(parts):
        assert part.first + part.size == following.first
        assert size == 1 or following.first % 4 == 0  # the noise of ids comes in fours


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_query_heads_are_on_the_rank_of_their_kv_head(num_kv_heads: int, power: int) -> None:
    size, num_heads = 2**power, 32
    group = num_heads // num_kv_heads
    for rank in range(size):
        heads = even_shard(num_heads, rank, size)
        kv_heads = kv_head_shard(num_kv_heads, rank, size)
        wanted = {head // group for head in range(heads.first, heads.first + heads.size)}
        assert wanted == set(range(kv_heads.first, kv_heads.first + kv_heads.size))
        assert heads.size % kv_heads.size == 0


@pytest.mark.parametrize(
    ("name", "size"), [(spec.name, 2) for spec in SPECS] + [("llama3", 4), ("qwen3-biased", 4)]
)
def test_the_ranks_together_hold_the_whole_checkpoint(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(spec_named(name), tmp_path)
    whole = {name: target.weight for name, target in checkpoint_targets(load(folder)).items()}
    read = 0

    def reading(stored: Any, cut: tuple[Shard, ...]) -> torch.Tensor:
        nonlocal read
        part = part_of(stored, cut)
        read += part.nbytes
        return part

    part_of = loader._part
    monkeypatch.setattr(loader, "_part", reading)
    for rank in range(size):
        read = 0
        targets = checkpoint_targets(load(folder, rank, size))
        assert targets.keys() == whole.keys()
        for tensor_name, target in targets.items():
            wanted = whole[tensor_name]
            real = tuple(slice(shard.first, shard.first + shard.num_real) for shard in target.cut)
            there = tuple(slice(shard.num_real) for shard in target.cut)
            assert torch.equal(target.weight[there], wanted[real]), tensor_name
            padding = target.weight.clone()
            padding[there] = 0
            assert not padding.any()
        # Nothing but what it holds: no padding, no other rank's part.
        held = sum(target.weight.nbytes for target in targets.values())
        assert read <= held
        assert held < 0.75 * sum(tensor.nbytes for tensor in whole.values())


def test_dummy_weights_differ_by_rank_and_have_the_scale_of_a_single_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named("llama"), tmp_path)
    first, second = (load(folder, rank, 2, "dummy").layers["0"] for rank in range(2))
    alone = load(folder, load_format="dummy").layers["0"]
    for path in ("mlp.down_proj", "self_attn.o_proj", "self_attn.qkv_proj"):
        one, other = first.get_submodule(path).weight, second.get_submodule(path).weight
        assert not torch.equal(one, other)
        ratio = float(one.std() / alone.get_submodule(path).weight.std())
        assert ratio == pytest.approx(1, abs=0.05), path
