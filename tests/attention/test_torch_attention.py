"""TorchAttention against one softmax at a time, in float64 and without pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cache import Cache, blocks_of
from support.paged import page_table, spec_of
from torch import Tensor

from minisgl.attention import torch_backend
from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec

ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(out: Tensor, expected: list[Tensor]) -> None:
    assert out.isfinite().all()
    error = (out.double() - torch.stack(expected)).abs().max()
    assert error < ERRORS[out.dtype] * torch.stack(expected).abs().max().clamp(min=1)


@dataclass(frozen=True)
class Features:
    """What a layer's attention has beyond the plain one."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    v_head_dim: int | None = None

    def num_unseen(self, length: int) -> int:
        """The number of tokens that the last of `length` tokens does not see."""
        return 0 if self.window is None else max(0, length - self.window)

    def spec(self, q: Tensor, kv: PagedKV) -> AttentionSpec:
        spec = spec_of(q, kv, 0.3)
        return replace(spec, window=self.window, softcap=self.softcap, sinks=self.sinks)

    def some_sinks(self, num_heads: int) -> Tensor | None:
        return 2 * torch.randn(num_heads) if self.sinks else None


PLAIN = Features()


def check_decode(
    lengths: list[int],
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    slack: int = 0,
    features: Features = PLAIN,
) -> None:
    torch.manual_seed(len(lengths))
    num_kv_heads, group, head_dim = heads
    v_head_dim, unseen = features.v_head_dim, list(map(features.num_unseen, lengths))
    cache = Cache(
        lengths, page_size, num_kv_heads, head_dim, dtype, v_head_dim=v_head_dim, unseen=unseen
    )
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(dtype)
    rows = DecodeBatch(
        page_table(cache.pages), torch.tensor(lengths, dtype=torch.int32), max(lengths) + slack
    )
    spec, sinks = features.spec(q, cache.kv), features.some_sinks(q.shape[1])
    out = TorchAttention().decode(AttentionCall(q, cache.kv, spec, sinks), rows)
    assert out.shape == (*q.shape[:2], v_head_dim or head_dim) and out.dtype == dtype
    assert_close(out, [cache.attend(q[i], i, n, spec, sinks) for i, n in enumerate(lengths)])


def check_prefill(
    chunks: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    features: Features = PLAIN,
    *,
    has_blocks: bool = False,
) -> None:
    """chunks: (tokens before it, tokens in it). has_blocks: some rows see later ones."""
    torch.manual_seed(len(chunks))
    num_kv_heads, group, head_dim = heads
    starts, lengths = zip(*chunks, strict=True)
    v_head_dim, unseen = features.v_head_dim, [features.num_unseen(n + 1) for n in starts]
    sums = list(map(sum, chunks))
    cache = Cache(
        sums, page_size, num_kv_heads, head_dim, dtype, v_head_dim=v_head_dim, unseen=unseen
    )
    q = torch.randn(sum(lengths), num_kv_heads * group, head_dim).to(dtype)
    rows = PrefillBatch.of(page_table(cache.pages), starts, lengths)
    spec, sinks = features.spec(q, cache.kv), features.some_sinks(q.shape[1])
    places = [(i, start + j) for i, (start, n) in enumerate(chunks) for j in range(n)]
    last = blocks_of(chunks, sum(sums)) if has_blocks else [p for _, p in places]
    last_seen = torch.tensor(last, dtype=torch.int32) if has_blocks else None
    out = TorchAttention().prefill(AttentionCall(q, cache.kv, spec, sinks), rows, last_seen)
    assert out.shape == (*q.shape[:2], v_head_dim or head_dim) and out.dtype == dtype
    attended: list[Tensor] = []
    for at, ((i, p), seen) in enumerate(zip(places, last, strict=True)):
        window = None if spec.window is None else spec.window + seen - p
        attended.append(cache.attend(q[at], i, seen + 1, replace(spec, window=window), sinks))
    assert_close(out, attended)


HEADS = st.tuples(
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 7]), st.sampled_from([8, 64])
)
PAGE_SIZES = st.sampled_from([1, 2, 16, 64, 256])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), PAGE_SIZES, HEADS)
def test_decode_matches_softmax_in_float64(
    lengths: list[int], page_size: int, heads: tuple[int, int, int]
) -> None:
    check_decode(lengths, page_size, heads)


CHUNKS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CHUNKS, PAGE_SIZES, HEADS)
def test_prefill_matches_softmax_in_float64(
    chunks: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int]
) -> None:
    check_prefill(chunks, page_size, heads)


FEATURES = st.builds(
    Features,
    window=st.sampled_from([None, 1, 2, 15, 16, 17, 33, 64, 1000]),
    softcap=st.sampled_from([None, 2.0, 50.0]),
    sinks=st.booleans(),
    v_head_dim=st.sampled_from([None, 4, 48]),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), PAGE_SIZES, HEADS, FEATURES)
def test_decode_with_features_matches_softmax_in_float64(
    lengths: list[int], page_size: int, heads: tuple[int, int, int], features: Features
) -> None:
    check_decode(lengths, page_size, heads, features=features)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(CHUNKS, PAGE_SIZES, HEADS, FEATURES)
def test_prefill_with_features_matches_softmax_in_float64(
    chunks: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int], features: Features
) -> None:
    check_prefill(chunks, page_size, heads, features=features)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CHUNKS, PAGE_SIZES, HEADS, FEATURES)
def test_rows_that_see_later_ones_match_softmax_in_float64(
    chunks: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int], features: Features
) -> None:
    check_prefill(chunks, page_size, heads, features=features, has_blocks=True)


def test_sinks_must_be_given_exactly_if_the_layer_has_them() -> None:
    cache = Cache([5], 16, 1, 8, torch.float32)
    q = torch.randn(1, 2, 8)
    rows = DecodeBatch(page_table(cache.pages), torch.tensor([5], dtype=torch.int32), 5)
    for features, sinks in ((PLAIN, torch.zeros(2)), (Features(sinks=True), None)):
        with pytest.raises(AssertionError):
            TorchAttention().decode(
                AttentionCall(q, cache.kv, features.spec(q, cache.kv), sinks), rows
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_matches_softmax_in_float64(dtype: torch.dtype) -> None:
    check_decode([1, 33, 200], 16, (2, 4, 64), dtype)
    check_prefill([(0, 33), (57, 20)], 16, (2, 4, 64), dtype)


@pytest.mark.parametrize("longest", [0, 1, 40])
def test_decode_accepts_an_upper_bound_of_the_longest_row(longest: int) -> None:
    check_decode([5, 17], 16, (2, 2, 64), slack=longest)


def test_large_batches_computed_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, and one query, at a time give the same as all at once."""
    monkeypatch.setattr(torch_backend, "_CPU_GATHERED_BYTES", 1)
    monkeypatch.setattr(torch_backend, "_CPU_QUERIES", 1)
    for features in (PLAIN, Features(window=6, softcap=3.0, sinks=True)):
        check_decode([3, 17, 40], 16, (2, 2, 64), features=features)
        for has_blocks in (False, True):
            chunks = [(0, 9), (20, 11)]
            check_prefill(chunks, 16, (2, 2, 64), features=features, has_blocks=has_blocks)


def test_the_arithmetic_used_on_gpus_matches_softmax_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer keys than rows and more, one head and several."""
    monkeypatch.setattr(torch_backend, "_attend_fused", torch_backend._attend_plainly)
    for heads in ((1, 1, 8), (2, 4, 64), (3, 7, 64)):
        check_decode([1, 33, 200], 16, heads)
        check_prefill([(0, 33), (57, 20), (32, 1), (100, 29)], 16, heads)
    check_decode([1, 33, 200], 16, (2, 4, 64), torch.bfloat16)
    check_prefill([(0, 33), (57, 20)], 16, (2, 4, 64), torch.bfloat16)


def test_prefill_without_host_lengths_equals_prefill_with_them() -> None:
    """Without the host's figures, with empty chunks, and with rows that belong to no chunk."""
    torch.manual_seed(0)
    cache = Cache([40, 5, 17], 16, 2, 64, torch.float32)
    q = torch.randn(30, 4, 64)
    known = PrefillBatch.of(page_table(cache.pages), (35, 3, 0), (5, 0, 17))
    unknown = replace(known, starts=(), lengths=(), num_rows=30)
    expected = TorchAttention().prefill(
        AttentionCall(q[:22], cache.kv, spec_of(q, cache.kv, 0.3)), known
    )
    out = TorchAttention().prefill(AttentionCall(q, cache.kv, spec_of(q, cache.kv, 0.3)), unknown)
    assert torch.equal(out[:22], expected)


def test_decode_of_many_rows_matches_softmax_in_float64() -> None:
    check_decode([1 + 3 * i % 50 for i in range(64)], 16, (2, 2, 64))
