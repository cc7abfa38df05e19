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

from minisgl.models import filling
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.targets import checkpoint_targets
from minisgl.models.transformer import CausalLM
from minisgl.shards import (
    Shard,
    even_shard,
    kv_head_shard,
    split_layers,
    uneven_shard,
    vocab_shard,
)


def load(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    load_format: str = "safetensors",
    layers: range | None = None,
) -> CausalLM:
    return load_model(
        read_model_config(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,
        max_seq_len=64,
        ranks=Rank(rank, size),
        layers=layers,
    )


@given(st.integers(1, 8), st.integers(1, 300_000))
def test_vocabulary_shards_cover_each_token_once(size: int, vocab_size: int) -> None:
    parts = [vocab_shard(vocab_size, rank, size) for rank in range(size)]
    assert len({part.size for part in parts}) == 1
    assert sum(part.num_real for part in parts) == vocab_size
    for part, following in pairwise(parts):
        assert part.first + part.size == following.first
        assert size == 1 or following.first % 4 == 0  # the noise of ids comes in fours


@given(st.integers(1, 100), st.integers(1, 8), st.floats(0, 50))
def test_stages_have_all_layers_and_the_slowest_is_as_fast_as_can_be(
    num_layers: int, num_stages: int, head: float
) -> None:
    num_layers += num_stages - 1
    stages = split_layers(num_layers, num_stages, head)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    *others, last = map(len, stages)
    assert last >= 1
    if others:
        assert min(others) >= 1 and max(others) - min(others) <= 1
        for size in range(1, num_layers - len(others) + 1):
            rest = -(-(num_layers - size) // len(others))
            assert max(*others, last + head) <= max(size + head, rest)


def test_a_head_with_a_large_vocabulary_counts_as_layers() -> None:
    """Qwen3-32B: the head has as many weights as 1.6 layers."""
    assert [len(stage) for stage in split_layers(64, 2, 1.6)] == [33, 31]
    assert [len(stage) for stage in split_layers(4, 3, 0.1)] == [1, 2, 1]


@pytest.mark.parametrize("name", ["qwen3", "moe-60", "llama-biased"])
def test_stages_hold_together_what_one_rank_holds(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named(name), tmp_path)
    alone = load(folder)
    held: dict[str, int] = {}
    for layers in split_layers(alone.num_layers, 2, 0.0):
        for path, weight in load(folder, layers=layers).named_parameters():
            assert torch.equal(weight, alone.get_parameter(path))
            held[path] = held.get(path, 0) + 1
    twice = {"embed_tokens.weight"} if alone.is_tied else set()
    assert held == {path: 1 + (path in twice) for path, _ in alone.named_parameters()}


def test_a_tied_head_of_random_weights_is_the_embedding_of_the_first_stage(tmp_path: Path) -> None:
    folder = make_checkpoint(spec_named("qwen3"), tmp_path)
    first, last = (
        load(folder, load_format="dummy", layers=layers).get_parameter("embed_tokens.weight")
        for layers in (range(1), range(1, 3))
    )
    assert torch.equal(first, last)


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
    whole = {name: target.weight for name, target in checkpoint_targets(load(folder), None).items()}
    read = 0

    def reading(stored: Any, cut: tuple[Shard, ...]) -> torch.Tensor:
        nonlocal read
        part = part_of(stored, cut)
        read += part.nbytes
        return part

    part_of = filling.part_of
    monkeypatch.setattr(filling, "part_of", reading)
    for rank in range(size):
        read = 0
        targets = checkpoint_targets(load(folder, rank, size), None)
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


@given(size=st.integers(1, 300), num_ranks=st.integers(1, 16))
def test_uneven_parts_follow_each_other_and_differ_by_one_at_most(
    size: int, num_ranks: int
) -> None:
    num_ranks = min(num_ranks, size)
    parts = [uneven_shard(size, rank, num_ranks) for rank in range(num_ranks)]
    assert [entry for part in parts for entry in range(part.first, part.first + part.size)] == [
        *range(size)
    ]
    sizes = {part.size for part in parts}
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert all(part.whole == size for part in parts)
