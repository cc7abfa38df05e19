"""Paged caches at random, hostile on purpose, and what a backend makes of them.

Pages are scattered, what no sequence wrote is NaN, and the undefined columns of a page table point
outside the cache. So is what lies before a window, and so do the entries of its pages.
TorchAttention on the same device is the reference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.attention_cache import blocks_of
from support.layer_cases import EPS, assert_rounded_alike
from support.paged import UNDEFINED_PAGE
from torch import Tensor

from minisgl.attention.base import (
    AttentionBackend,
    AttentionCall,
    DecodeBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import UNSCALED, AttentionSpec, KVScales
from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.slots.slot_state import slot_mapping_of
from minisgl.layers.rope import rotary_table

E4M3_NAN = 0x7F

# Relative to the largest output; half precision rounds weights and outputs to 11 or 8 bits.
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    """The properties that a model and its options determine."""

    group: int
    head_dim: int
    page_size: int
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kv_scales: KVScales | None = None  # of a cache in FP8; None: it is in `dtype`
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None  # None: head_dim
    norms_v: bool = False  # where queries and keys are normed
    v_is_k: bool = False
    v_in_k: bool = False  # as in AttentionSpec

    @property
    def spec(self) -> AttentionSpec:
        """Peaked: over random keys the model's own scale gives nearly uniform weights."""
        return AttentionSpec(
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=2 * self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=self.has_sinks,
            value_dim=self.value_dim,
            v_in_k=self.v_in_k,
        )

    @property
    def sinks(self) -> Tensor | None:
        """Some weigh more than all keys, and others hardly anything."""
        if not self.has_sinks:
            return None
        return torch.linspace(-5, 15, self.num_kv_heads * self.group, device=self.device)

    def call(self, q: Tensor, kv: PagedKV, norm_rope: NormRope | None = None) -> AttentionCall:
        return AttentionCall(q, kv, self.spec, self.sinks, norm_rope)

    def queries(self, num_rows: int) -> Tensor:
        """A part of a wider tensor, as of one projection to q, k and v."""
        heads = self.num_kv_heads * self.group
        wide = torch.randn(num_rows, heads + 3, self.head_dim, device=self.device)
        return wide.to(self.dtype)[:, 1 : heads + 1]

    def qkv(self, num_rows: int) -> Tensor:
        """A random output of the projection to q, k and v."""
        size = self.num_kv_heads * (self.group + 2 - self.v_is_k) * self.head_dim
        return torch.randn(num_rows, size, device=self.device).to(self.dtype)

    def norm_rope(self, max_seq_len: int, *, normed: bool) -> NormRope:
        frequencies = 1e4 ** -torch.linspace(0, 1, self.head_dim // 2, device=self.device)
        table = rotary_table(frequencies, max_seq_len, scale=1.1)
        if not normed:
            return NormRope(table, v_is_k=self.v_is_k)
        weights = (1 + 0.3 * torch.randn(2, self.head_dim, device=self.device)).to(self.dtype)
        return NormRope(table, *weights, EPS, self.norms_v, self.v_is_k)


def paged_cache(
    shape: Shape, lengths: Sequence[int], seed: int = 0, starts: Sequence[int] | None = None
) -> tuple[PagedKV, Tensor]:
    """The cache of sequences this long, and their page table. starts: the position of the first
    query of each, by default its last token."""
    torch.manual_seed(seed)
    if starts is None:
        starts = [max(0, length - 1) for length in lengths]
    unseen = [start + 1 - shape.spec.num_visible(start + 1) for start in starts]
    counts = [-(-length // shape.page_size) for length in lengths]
    num_pages = sum(counts) + 3
    free = random.Random(seed).sample(range(1, num_pages), sum(counts))
    table = torch.full((len(lengths), max(counts) + 2), UNDEFINED_PAGE, dtype=torch.int32)
    written = torch.zeros(num_pages, shape.page_size, dtype=torch.bool)
    for row, (length, count, first) in enumerate(zip(lengths, counts, unseen, strict=True)):
        pages = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        table[row, : first // shape.page_size] = UNDEFINED_PAGE
        slots = torch.zeros(count * shape.page_size, dtype=torch.bool)
        slots[first:length] = True
        written[pages] = slots.view(count, shape.page_size)
    size = (num_pages, shape.page_size, shape.num_kv_heads)
    unwritten = ~written[:, :, None, None].to(shape.device)
    k, v = (
        torch.randn((*size, width), device=shape.device)
        .to(shape.dtype)
        .masked_fill_(unwritten, torch.nan)
        for width in (shape.head_dim, shape.value_dim or shape.head_dim)
    )
    scales = shape.kv_scales
    if scales is not None:
        k, v = reference.to_stored(k, scales.k), reference.to_stored(v, scales.v)
    kept = shape.spec.kv("", scales or UNSCALED)
    return PagedKV.of(kept, k, v), table.to(shape.device)


def check_decode(
    backend: AttentionBackend, shape: Shape, lengths: Sequence[int], seed: int = 0
) -> Tensor:
    kv, table = paged_cache(shape, lengths, seed)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=shape.device)
    rows = DecodeBatch(table, on_device, max(lengths))
    q = shape.queries(len(lengths))
    out = backend.decode(shape.call(q, kv), rows)
    expected = TorchAttention().decode(shape.call(*in_float32(q, kv)), rows)
    assert_close(out, expected, shape)
    return out


def check_decode_runs(
    backend: AttentionBackend, shape: Shape, run: int, runs: Sequence[tuple[int, int]]
) -> Tensor:
    """runs: the length of the first row of each, and how many of its `run` rows are real."""
    starts = [max(0, first - 1) for first, _ in runs]
    lengths_of_all = [max(0, first + count - 1) for first, count in runs]
    kv, table = paged_cache(shape, lengths_of_all, starts=starts)
    lengths = torch.zeros((len(runs), run), dtype=torch.int32)
    for index, (first, count) in enumerate(runs):
        lengths[index, :count] = torch.arange(first, first + count)
    on_device, table = lengths.flatten().to(shape.device), table.repeat_interleave(run, dim=0)
    rows = DecodeBatch(table, on_device, int(lengths.max()), run=run)
    q = shape.queries(len(on_device))
    out = backend.decode(shape.call(q, kv), rows)
    live = on_device > 0
    one_by_one = DecodeBatch(table[live], on_device[live], rows.longest)
    arguments = in_float32(q[live], kv)
    expected = TorchAttention().decode(shape.call(*arguments), one_by_one)
    assert_close(out[live], expected, shape)
    assert (out[~live] == 0).all()
    return out


def check_decode_qkv(
    backend: AttentionBackend, shape: Shape, lengths: Sequence[int], *, normed: bool, seed: int = 0
) -> None:
    """Runs twice, bitwise equal: the second time the rows' own tokens are in the cache already."""
    kv, table = paged_cache(shape, lengths, seed)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=shape.device)
    longest = max(1, *lengths)
    rows = DecodeBatch(table, on_device, longest)
    qkv, norm_rope = shape.qkv(len(lengths)), shape.norm_rope(longest, normed=normed)
    forget_own(kv, rows)
    expected, expected_kv = turned_and_attended(qkv, kv, rows, norm_rope, shape)
    out = backend.decode(shape.call(qkv, kv, norm_rope), rows)
    assert_close(out, expected, shape)
    assert_stored(kv, expected_kv, rows, normed_values=shape.norms_v and normed)
    again = backend.decode(shape.call(qkv, kv, norm_rope), rows)
    assert torch.equal(again, out)
    assert_stored(kv, expected_kv, rows, normed_values=shape.norms_v and normed)


def own_places(kv: PagedKV, rows: DecodeBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The non-empty rows; position and cache location of each one's own token."""
    live = rows.lengths.nonzero().flatten()
    positions = rows.lengths[live].long() - 1
    return live, positions, slot_mapping_of(rows.page_table, live, positions, kv.page_size)


def forget_own(kv: PagedKV, rows: DecodeBatch) -> None:
    for cache in (kv.k, kv.v):
        slots = cache.flatten(0, 1)
        own = own_places(kv, rows)[2]
        if cache.dtype == torch.float8_e4m3fn:
            slots.view(torch.uint8)[own] = E4M3_NAN
        else:
            slots[own] = torch.nan


def turned_and_attended(
    qkv: Tensor, kv: PagedKV, rows: DecodeBatch, norm_rope: NormRope, shape: Shape
) -> tuple[Tensor, PagedKV]:
    """Expected result of a fused decode, in float32, and the expected cache."""
    live, positions, slots = own_places(kv, rows)
    kv = replace(kv, k=kv.k.clone(), v=kv.v.clone())
    q = reference.qk_norm_rope_store_kv(
        qkv[live], positions, slots, kv.k, kv.v, norm_rope, kv.scales
    )
    live_rows = DecodeBatch(rows.page_table[live], rows.lengths[live], rows.longest)
    out = q.new_zeros((qkv.shape[0], *q.shape[1:]), dtype=torch.float32)
    out[live] = TorchAttention().decode(shape.call(*in_float32(q, kv)), live_rows)
    return out, kv


def assert_stored(
    kv: PagedKV, expected: PagedKV, rows: DecodeBatch, *, normed_values: bool = False
) -> None:
    """Own keys, and own values that are normed, are equal up to rounding; all else is bitwise
    equal, NaN included."""
    slots = own_places(kv, rows)[2]
    for found, wanted, is_rounded in ((kv.k, expected.k, True), (kv.v, expected.v, normed_values)):
        own, wanted_own = (cache.flatten(0, 1) for cache in (found, wanted))
        assert_rounded_alike(at(own, slots), at(wanted_own, slots).cpu())
        found, wanted = in_half(found), in_half(wanted)
        if is_rounded:
            own = found.flatten(0, 1)[slots]
            wanted = wanted.flatten(0, 1).index_copy(0, slots, own).view(found.shape)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def check_blocks(
    backend: Any, shape: Shape, chunks: Sequence[tuple[int, int]], seed: int = 0
) -> None:
    """As check_prefill, with rows that see later ones. backend: with an argument for that."""
    starts, lengths = zip(*chunks, strict=True)
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks], seed, starts)
    rows = PrefillBatch.of(table, starts, lengths)
    q = shape.queries(rows.num_rows)
    last = torch.tensor(blocks_of(chunks, seed), dtype=torch.int32, device=shape.device)
    expected = TorchAttention().prefill(shape.call(*in_float32(q, kv)), rows, last)
    assert_close(backend.prefill(shape.call(q, kv), rows, last), expected, shape)


def check_prefill(
    backend: AttentionBackend, shape: Shape, chunks: Sequence[tuple[int, int]], seed: int = 0
) -> Tensor:
    """chunks: (cached tokens, new tokens) of each."""
    starts, lengths = zip(*chunks, strict=True)
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks], seed, starts)
    rows = PrefillBatch.of(table, starts, lengths)
    q = shape.queries(rows.num_rows)
    out = backend.prefill(shape.call(q, kv), rows)
    expected = TorchAttention().prefill(shape.call(*in_float32(q, kv)), rows)
    assert_close(out, expected, shape)
    return out


def at(places: Tensor, index: Tensor) -> Tensor:
    """places[index], also of e4m3, for which torch indexes bytes alone."""
    return (
        places.view(torch.uint8)[index].view(places.dtype)
        if places.itemsize == 1
        else places[index]
    )


def in_half(cache: Tensor) -> Tensor:
    """e4m3 in float16, for which torch can compare; others as they are."""
    return cache.half() if cache.dtype == torch.float8_e4m3fn else cache


def in_float32(q: Tensor, kv: PagedKV) -> tuple[Tensor, PagedKV]:
    return q.float(), replace(kv, k=kv.k.float(), v=kv.v.float())


def assert_close(out: Tensor, expected: Tensor, shape: Shape) -> None:
    assert out.shape == expected.shape and out.dtype == shape.dtype
    assert out.is_contiguous() and out.isfinite().all()
    error = (out.float() - expected).abs().max()
    assert error <= ERRORS[shape.dtype] * expected.abs().max().clamp(min=1), error
