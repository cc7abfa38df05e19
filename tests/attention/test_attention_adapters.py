"""The adapters of FlashInfer and flash-attn against TorchAttention, without the packages or a GPU.

support/attention_packages.py has the substitutes for the packages.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cache import Cache
from support.attention_packages import (
    SCALE,
    DecodeWrapper,
    LatentWrapper,
    PagedWrapper,
    PrefillWrapper,
)
from support.paged import page_table
from torch import Tensor

from minisgl.attention import flashinfer_backend
from minisgl.attention.backends import make_attention
from minisgl.attention.base import (
    Attention,
    AttentionBackend,
    AttentionCall,
    AttentionShape,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    HostPlanned,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec, KVScales
from minisgl.kernels.elementwise.reference import to_stored
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments


@dataclass(frozen=True)
class Case:
    """One layer of one step: rows of either kind over one cache."""

    spec: AttentionSpec
    kv: PagedKV
    shape: AttentionShape
    decode_q: Tensor
    decodes: DecodeBatch
    chunk_q: Tensor
    chunks: PrefillBatch

    @staticmethod
    def of(
        lengths: list[int],
        chunks: list[tuple[int, int]],
        page_size: int,
        heads: tuple[int, int, int],
        slack: int = 0,
        window: int | None = None,
        softcap: float | None = None,
        value_dim: int | None = None,
    ) -> Case:
        """lengths: of the decode rows; chunks: (tokens before it, tokens in it); value_dim: the
        width of values that are the first numbers of the keys."""
        torch.manual_seed(len(lengths) + 10 * len(chunks))
        num_kv_heads, group, head_dim = heads
        num_heads = num_kv_heads * group
        sums = [sum(chunk) for chunk in chunks]
        cache = Cache(lengths + sums, page_size, num_kv_heads, head_dim, torch.float32)
        num_queries = tuple(length for _, length in chunks)
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=SCALE,
            window=window,
            softcap=softcap,
            value_dim=value_dim,
            v_in_k=value_dim is not None,
        )
        kv = cache.kv
        if value_dim is not None:
            kv = PagedKV(kv.k, kv.k[..., :value_dim], v_in_k=True)
        return Case(
            spec=spec,
            kv=kv,
            shape=AttentionShape(
                layers=frozenset((spec,)),
                page_size=page_size,
                dtype=torch.float32,
                kv_dtype=torch.float32,
            ),
            decode_q=torch.randn(len(lengths), num_heads, head_dim),
            decodes=DecodeBatch(
                page_table(cache.pages[: len(lengths)]),
                torch.tensor(lengths, dtype=torch.int32),
                max(lengths, default=0) + slack,
                lengths_host=lengths,
            ),
            chunk_q=torch.randn(sum(num_queries), num_heads, head_dim),
            chunks=PrefillBatch.of(
                page_table(cache.pages[len(lengths) :]),
                tuple(start for start, _ in chunks),
                num_queries,
            ),
        )

    def inputs(self) -> ForwardBatch:
        nothing = torch.empty(0, dtype=torch.int64)
        slots = BatchSlots(nothing, Segments(nothing, nothing, nothing))
        rows = Rows.of(nothing, nothing)
        return ForwardBatch(nothing, rows, rows, nothing, self.decodes, self.chunks, slots)

    def attend(self, attention: Attention) -> list[Tensor]:
        outputs = []
        if self.decodes.num_rows:
            decode = attention.decode_backend.decode
            outputs.append(decode(AttentionCall(self.decode_q, self.kv, self.spec), self.decodes))
        if self.chunks.lengths:
            prefill = attention.prefill_backend.prefill
            outputs.append(prefill(AttentionCall(self.chunk_q, self.kv, self.spec), self.chunks))
        return outputs


def check(name: str, case: Case) -> Attention:
    reference = TorchAttention()
    expected = case.attend(Attention(reference, reference))
    attention = make_attention(*name.split(",") * (1 if "," in name else 2), case.shape)
    attention.prepare(case.inputs())
    for _ in range(2):  # two layers on one plan
        for out, right in zip(case.attend(attention), expected, strict=True):
            assert out.shape == right.shape
            torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)
    return attention


HEADS = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 5, 7, 8]), st.just(16))
LENGTHS = st.lists(st.integers(1, 90), max_size=6)
CHUNKS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), max_size=4)
law = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("fi", [1, 2, 16, 64]), ("trtllm", [16, 32, 64]), ("fi,trtllm", [16, 64])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flashinfer_adapters_match_the_reference(
    packages: Callable[..., None], name: str, sizes: list[int]
) -> None:
    @law
    @given(LENGTHS, CHUNKS, st.sampled_from(sizes), HEADS)
    def run(
        lengths: list[int],
        chunks: list[tuple[int, int]],
        page_size: int,
        heads: tuple[int, int, int],
    ) -> None:
        check(name, Case.of(lengths, chunks, page_size, heads))

    run()


def test_flashinfer_over_latents_matches_the_reference(packages: Callable[..., None]) -> None:
    @law
    @given(LENGTHS, CHUNKS, st.sampled_from([1, 2, 16, 64]), st.sampled_from([1, 5, 20]))
    def run(
        lengths: list[int], chunks: list[tuple[int, int]], page_size: int, num_heads: int
    ) -> None:
        check("fi", Case.of(lengths, chunks, page_size, (1, num_heads, 24), value_dim=16))

    run()
    assert LatentWrapper.made and not DecodeWrapper.made and not PrefillWrapper.made


def test_layers_over_latents_have_plans_by_their_scale(packages: Callable[..., None]) -> None:
    case = Case.of([5, 40], [(3, 20)], 16, (1, 4, 24), value_dim=16)
    other = dataclasses.replace(case.spec, scale=0.1)
    shape = dataclasses.replace(case.shape, layers=frozenset((case.spec, other)))
    attention, reference = make_attention("fi", "fi", shape), TorchAttention()
    attention.prepare(case.inputs())
    for spec in (case.spec, other):
        layer = dataclasses.replace(case, spec=spec)
        expected = layer.attend(Attention(reference, reference))
        for out, right in zip(layer.attend(attention), expected, strict=True):
            torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("num_queries", "fits"), [([160] * 12, True), ([161] * 12, False)])
def test_a_step_with_more_tiles_over_latents_than_a_plan_has_is_refused(
    packages: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    num_queries: list[int],
    fits: bool,
) -> None:
    """Tiles of 128 pairs of a query and one of its 4 heads: 5 or 6 of each chunk."""
    monkeypatch.setattr(flashinfer_backend, "_MOST_LATENT_TILES", 60)
    chunks = [(0, number) for number in num_queries]
    case = Case.of([], chunks, 64, (1, 4, 24), value_dim=16)
    attention = make_attention("fi", "fi", case.shape)
    if fits:
        attention.prepare(case.inputs())
    else:
        with pytest.raises(ValueError, match=r"72: lower --max-prefill-length, or .* triton"):
            attention.prepare(case.inputs())


@pytest.mark.parametrize("name", ["fi", "trtllm"])
def test_an_fp8_cache_is_scaled(packages: Callable[..., None], name: str) -> None:
    """And FlashInfer prefills by its kernel that reads one."""
    case = Case.of([1, 40, 17], [(3, 20), (0, 9)], 16, (2, 4, 16))
    scales = KVScales(0.02, 0.011)
    k, v = (
        to_stored(cache.nan_to_num(), scale)
        for cache, scale in ((case.kv.k, scales.k), (case.kv.v, scales.v))
    )
    shape = dataclasses.replace(case.shape, kv_dtype=torch.float8_e4m3fn)
    check(name, dataclasses.replace(case, kv=PagedKV(k, v, scales), shape=shape))
    assert [wrapper.backend for wrapper in PrefillWrapper.made] == ["fa2"]
    check(name, case)
    assert [wrapper.backend for wrapper in PrefillWrapper.made] == ["fa2", "auto"]


@pytest.mark.parametrize(
    ("generation", "sizes"),
    [("fa2", [256]), ("fa3", [1, 3, 16, 64]), ("fa4", [1, 3, 16, 64])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flash_attn_adapters_match_the_reference(
    packages: Callable[..., None], generation: str, sizes: list[int]
) -> None:
    packages(generation)

    @law
    @given(LENGTHS, CHUNKS, st.sampled_from(sizes), HEADS)
    def run(
        lengths: list[int],
        chunks: list[tuple[int, int]],
        page_size: int,
        heads: tuple[int, int, int],
    ) -> None:
        check("fa", Case.of(lengths, chunks, page_size, heads))

    run()


@pytest.mark.parametrize("name", ["fi", "trtllm", "fa2", "fa3", "fa4"])
def test_windows_and_soft_caps_match_the_reference(
    packages: Callable[..., None], name: str
) -> None:
    size = 256 if name == "fa2" else 16
    lengths, chunks = [1, 6, 7, 8, 40, 300], [(0, 20), (30, 3), (280, 9)]
    softcaps = (None,) if name == "trtllm" else (None, 1.5)
    if name.startswith("fa"):
        packages(name)
    for window, softcap in itertools.product((None, 1, 7, 1000), softcaps):
        case = Case.of(lengths, chunks, size, (2, 2, 16), window=window, softcap=softcap)
        check("fa" if name.startswith("fa") else name, case)


def test_layers_that_differ_in_more_than_their_scale_have_plans_of_their_own(
    packages: Callable[..., None],
) -> None:
    plain = Case.of([5, 40], [(3, 20)], 16, (2, 2, 16))
    specs = [
        plain.spec,
        dataclasses.replace(plain.spec, scale=0.1),
        dataclasses.replace(plain.spec, window=4),
        dataclasses.replace(plain.spec, window=4, softcap=2.0),
    ]
    shape = dataclasses.replace(plain.shape, layers=frozenset(specs))
    attention, reference = make_attention("fi", "fi", shape), TorchAttention()
    attention.prepare(plain.inputs())
    assert len(DecodeWrapper.made) == len(PrefillWrapper.made) == 3
    for spec in specs:
        layer = dataclasses.replace(plain, spec=spec)
        expected = layer.attend(Attention(reference, reference))
        for out, right in zip(layer.attend(attention), expected, strict=True):
            torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)


# Page boundaries, one row, cached prefixes, a chunk of one token, and many rows.
EDGES: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1], []),
    ([16], []),
    ([17], []),
    ([15, 16, 17, 32, 33], []),
    ([], [(0, 1)]),
    ([], [(16, 16)]),
    ([], [(15, 1), (16, 1), (17, 1)]),
    ([], [(0, 16), (31, 2), (64, 33)]),
    ([3, 64], [(48, 16), (0, 5)]),
    ([1 + 7 * i % 50 for i in range(64)], [(i, 1 + i % 3) for i in range(20)]),
]


@pytest.mark.parametrize("name", ["fi", "trtllm", "fa", "torch,trtllm", "fi,torch"])
@pytest.mark.parametrize(("lengths", "chunks"), EDGES)
def test_lengths_at_the_edges_match_the_reference(
    packages: Callable[..., None], name: str, lengths: list[int], chunks: list[tuple[int, int]]
) -> None:
    packages("fa3")
    check(name, Case.of(lengths, chunks, 16, (2, 2, 16)))


@pytest.mark.parametrize("name", ["fi", "trtllm", "fa"])
def test_adapters_accept_an_upper_bound_of_the_longest_row(
    packages: Callable[..., None], name: str
) -> None:
    packages("fa3")
    check(name, Case.of([5, 17], [], 16, (2, 2, 16), slack=40))


def test_adapters_accept_strided_queries(packages: Callable[..., None]) -> None:
    """Queries are strided when they are part of a merged projection."""
    case = Case.of([5, 40], [], 16, (2, 2, 16))
    wide = torch.cat((case.decode_q, torch.full_like(case.decode_q, torch.nan)), dim=1)
    attention = make_attention("trtllm", "trtllm", case.shape)
    attention.prepare(case.inputs())
    views = wide[:, :4]
    assert not views.is_contiguous()
    out = attention.decode_backend.decode(AttentionCall(views, case.kv, case.spec), case.decodes)
    right = TorchAttention().decode(AttentionCall(case.decode_q, case.kv, case.spec), case.decodes)
    torch.testing.assert_close(out, right)


@pytest.mark.parametrize(
    ("heads", "uses"), [((8, 2), False), ((8, 4), False), ((8, 5), True), ((8, 8), True)]
)
def test_flashinfer_uses_tensor_cores_from_a_group_size_on(
    packages: Callable[..., None], heads: tuple[int, int], uses: bool
) -> None:
    check("fi", Case.of([20], [], 16, (*heads, 16)))
    [wrapper] = DecodeWrapper.made
    assert isinstance(wrapper, DecodeWrapper) and wrapper.use_tensor_cores == uses


def run_behind(attention: Attention, cases: list[Case], steps_in_flight: int) -> None:
    """The device does a step when the host has planned so many steps, that one included."""
    reference = TorchAttention()
    waiting: deque[tuple[Case, list[Tensor], list[Callable[[], None]]]] = deque()
    for case in cases:
        PagedWrapper.stream = []
        attention.prepare(case.inputs())
        waiting.append((case, case.attend(attention), PagedWrapper.stream))
        if len(waiting) == steps_in_flight:
            oldest, outputs, kernels = waiting.popleft()
            for kernel in kernels:
                kernel()
            expected = oldest.attend(Attention(reference, reference))
            for out, right in zip(outputs, expected, strict=True):
                torch.testing.assert_close(out, right)


def test_a_host_plan_is_kept_until_its_step_has_run(
    packages: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedWrapper, "stream", None)
    backend = importlib.import_module("minisgl.attention.flashinfer_backend").FlashInferAttention
    cases = [Case.of([5 + 16 * i, 33], [(i, 7)], 16, (2, 2, 16)) for i in range(9)]
    for steps in (1, 2, 3):
        fi = backend(cases[0].shape, steps_in_flight=steps)
        run_behind(Attention(fi, fi), cases, steps)
        assert len(DecodeWrapper.made) == len(PrefillWrapper.made) == sum(range(steps + 1))
        fi = backend(cases[0].shape, steps_in_flight=steps)
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            run_behind(Attention(fi, fi), cases, steps + 1)
        del DecodeWrapper.made[-steps:], PrefillWrapper.made[-steps:]


def test_attention_of_unplanned_rows_is_refused(packages: Callable[..., None]) -> None:
    case, other = (Case.of([5], [(0, 5)], 16, (2, 2, 16)) for _ in range(2))
    attention = make_attention("fi", "fi", case.shape)
    with pytest.raises(RuntimeError, match="prepare"):
        case.attend(attention)
    attention.prepare(other.inputs())
    with pytest.raises(RuntimeError, match="prepare"):
        case.attend(attention)


def test_a_host_plan_reads_the_lengths_that_only_the_device_knows(
    packages: Callable[..., None],
) -> None:
    case = Case.of([5, 6, 1], [], 16, (2, 2, 16))
    known = case.decodes.lengths.clone()
    known[2] = 0  # a row of the scratch slot
    decodes = DecodeBatch(case.decodes.page_table, known, 6, run=3)
    attention = make_attention("fi", "fi", case.shape)
    assert isinstance(attention.decode_backend, HostPlanned)
    attention.decode_backend.plan_decode(decodes)
    found = attention.decode_backend.decode(
        AttentionCall(case.decode_q, case.kv, case.spec), decodes
    )
    expected = TorchAttention().decode(
        AttentionCall(case.decode_q, case.kv, case.spec), case.decodes
    )
    torch.testing.assert_close(found[:2], expected[:2])


class Recorder(TorchAttention):
    """Plans, and writes down what."""

    def __init__(self) -> None:
        self.planned: list[DecodeBatch | PrefillBatch] = []

    def plan_decode(self, rows: DecodeBatch) -> None:
        self.planned.append(rows)

    def plan_prefill(self, rows: PrefillBatch) -> None:
        self.planned.append(rows)


@pytest.mark.parametrize(("lengths", "chunks"), [([5], []), ([], [(0, 5)]), ([5], [(0, 5)])])
def test_prepare_plans_only_the_kinds_of_rows_in_the_step(
    lengths: list[int], chunks: list[tuple[int, int]]
) -> None:
    inputs = Case.of(lengths, chunks, 16, (1, 1, 8)).inputs()
    prefill, decode = Recorder(), Recorder()
    Attention(prefill, decode).prepare(inputs)
    assert [rows is inputs.decodes for rows in decode.planned] == [True] * bool(lengths)
    assert [rows is inputs.chunks for rows in prefill.planned] == [True] * bool(chunks)
    torch_only: AttentionBackend = TorchAttention()
    assert not isinstance(torch_only, HostPlanned)
    Attention(torch_only, torch_only).prepare(inputs)
