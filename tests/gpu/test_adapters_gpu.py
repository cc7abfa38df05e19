"""The adapters on a GPU, with the packages themselves, against TorchAttention in float32."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.paged import page_table
from torch import Tensor

from minisgl.attention.backends import available_backends, make_attention
from minisgl.attention.base import (
    Attention,
    AttentionCall,
    AttentionShape,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionSpec
from minisgl.kernels.rows import Rows

# The packages compile a kernel for minutes before its first test.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

ERRORS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAMES = pytest.mark.parametrize("name", ["fi", "trtllm", "fa"])


@dataclass(frozen=True)
class Step:
    """One layer of one step. Slots that no request wrote hold large numbers."""

    kv: PagedKV
    spec: AttentionSpec
    shape: AttentionShape
    q: Tensor
    inputs: ForwardBatch

    @staticmethod
    def of(
        lengths: list[int],
        chunks: list[tuple[int, int]],
        page_size: int,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        **extras: Any,
    ) -> Step:
        """lengths: of the decode rows; chunks: (tokens before it, tokens in it); extras: of the
        attention, whose values are the first numbers of keys if they say so."""
        torch.manual_seed(0)
        num_heads, num_kv_heads, head_dim = heads
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.5 * head_dim**-0.5,  # peaked, and not the packages' default
            **extras,
        )
        device = torch.device("cuda")
        sums = lengths + [sum(chunk) for chunk in chunks]
        counts = [math.ceil(length / page_size) for length in sums]
        free = random.Random(1).sample(range(1, sum(counts) + 2), sum(counts))
        pages = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 2, page_size, num_kv_heads, head_dim)
        caches = torch.randn(2, *shape, device=device).to(dtype)
        for row, length in zip(pages, sums, strict=True):
            if length % page_size:
                caches[:, row[-1], length % page_size :] = 1000
        caches[:, 0] = 1000
        decodes = DecodeBatch(
            page_table(pages[: len(lengths)]).to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            max(lengths, default=0),
            lengths_host=lengths,
        )
        starts, num_queries = zip(*chunks, strict=True) if chunks else ((), ())
        rows = PrefillBatch.of(page_table(pages[len(lengths) :]).to(device), starts, num_queries)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        none = Rows.of(nothing, nothing)
        return Step(
            kv=PagedKV(caches[0], caches[0][..., : spec.value_dim], v_in_k=True)
            if spec.v_in_k
            else PagedKV(*caches),
            spec=spec,
            shape=AttentionShape(
                layers=frozenset((spec,)),
                page_size=page_size,
                dtype=dtype,
                kv_dtype=dtype,
            ),
            q=torch.randn(len(lengths) + sum(num_queries), num_heads, head_dim, device=device).to(
                dtype
            ),
            inputs=ForwardBatch(
                *(nothing, none, none, nothing, decodes, rows, BatchSlots(nothing, nothing))
            ),
        )

    def attend(self, attention: Attention, kv: PagedKV, q: Tensor) -> Tensor:
        num_decodes = self.inputs.decodes.num_rows
        parts = []
        if num_decodes:
            call = AttentionCall(q[:num_decodes], kv, self.spec)
            parts.append(attention.decode_backend.decode(call, self.inputs.decodes))
        if num_decodes < len(q):
            call = AttentionCall(q[num_decodes:], kv, self.spec)
            parts.append(attention.prefill_backend.prefill(call, self.inputs.chunks))
        return torch.cat(parts)

    def expected(self) -> Tensor:
        """From float32 copies of the same numbers."""
        reference = TorchAttention()
        kv = replace(self.kv, k=self.kv.k.float(), v=self.kv.v.float())
        return self.attend(Attention(reference, reference), kv, self.q.float())


def require(name: str, spec: AttentionSpec, page_size: int) -> None:
    found = available_backends(torch.cuda.get_device_capability(), (spec,))
    for part in name.split(","):
        if part in found.missing:
            pytest.skip(found.missing[part])
    for backend in found.backends:
        if backend.name in name.split(","):
            if backend.page_sizes and page_size not in backend.page_sizes:
                pytest.skip(f"{backend.name} has pages of {backend.page_sizes} tokens")
            if page_size % backend.page_multiple:
                pytest.skip(f"{backend.name} has pages of a multiple of {backend.page_multiple}")


def check_close(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape and out.isfinite().all()
    error = (out.float() - expected).abs().max()
    assert error < ERRORS[out.dtype] * expected.abs().max().clamp(min=1)


def check(name: str, step: Step) -> None:
    require(name, step.spec, step.shape.page_size)
    prefill, *decode = name.split(",")
    attention = make_attention(prefill, decode[0] if decode else prefill, step.shape)
    attention.prepare(step.inputs)
    for _ in range(2):
        check_close(step.attend(attention, step.kv, step.q), step.expected())


# The packages compile a kernel for each dtype, size of heads and, for XQA, size of pages and number
# of heads to a KV head, at a minute and more of a CPU. Each of these varies while the others stay.
@NAMES
@pytest.mark.parametrize(
    "dtype, page_size, heads",
    [
        *((torch.bfloat16, page_size, (16, 8)) for page_size in (1, 16, 64, 256)),
        *((torch.bfloat16, 64, heads) for heads in ((32, 8), (40, 8), (64, 8), (28, 4), (8, 8))),
        *((torch.float16, page_size, (16, 8)) for page_size in (64, 256)),
    ],
    ids=str,
)
def test_mixed_decode_and_prefill_steps_match_the_reference(
    name: str, dtype: torch.dtype, page_size: int, heads: tuple[int, int]
) -> None:
    lengths = [1, 15, 16, 17, 64, 65, 800, 3000]
    chunks = [(0, 1), (0, 130), (64, 64), (511, 2), (1000, 300)]
    check(name, Step.of(lengths, chunks, page_size, (*heads, 128), dtype))


@NAMES
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_every_supported_head_dim_matches_the_reference(name: str, head_dim: int) -> None:
    page_size = 256 if name == "fa" else 64
    check(name, Step.of([5, 700], [(60, 70)], page_size, (16, 8, head_dim), torch.bfloat16))


@NAMES
@pytest.mark.parametrize(
    "head_dim, softcap, window",
    [
        *((128, None, window) for window in (1, 64, 100, 2000)),
        *((256, 3.0, window) for window in (None, 100)),
    ],
)
def test_windows_and_soft_caps_match_the_reference(
    name: str, head_dim: int, softcap: float | None, window: int | None
) -> None:
    page_size = 256 if name == "fa" else 64
    lengths, chunks = [1, 64, 65, 101, 3000], [(0, 300), (700, 90), (2500, 1)]
    heads, extras = (16, 8, head_dim), {"window": window, "softcap": softcap}
    check(name, Step.of(lengths, chunks, page_size, heads, torch.bfloat16, **extras))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_heads", [16, 20, 64])
def test_flashinfer_over_latents_matches_the_reference(num_heads: int, page_size: int) -> None:
    """The heads of DeepSeek-V2-Lite, of GLM-4.7-Flash, and of DeepSeek-V3 on two ranks."""
    lengths, chunks = [1, 63, 64, 65, 3000], [(0, 1), (0, 300), (700, 90), (2500, 1)]
    heads, extras = (num_heads, 1, 576), {"value_dim": 512, "v_in_k": True}
    step = Step.of(lengths, chunks, page_size, heads, torch.bfloat16, **extras)
    check("fi", step)
    check("fi,triton", step)
    check("fi", Step.of([9000], [], page_size, heads, torch.bfloat16, **extras))


def test_layers_with_plans_of_their_own_match_the_reference() -> None:
    """And which of them runs first does not matter."""
    lengths, chunks = [65, 1000], [(0, 300), (700, 90)]
    make: Callable[[int | None], Step] = lambda window: Step.of(  # noqa: E731
        lengths, chunks, 16, (16, 8, 128), torch.bfloat16, window=window
    )
    steps = [make(None), make(100), make(33)]
    for step in steps:
        require("fi", step.spec, 16)
    shape = replace(steps[0].shape, layers=frozenset(step.spec for step in steps))
    attention = make_attention("fi", "fi", shape)
    attention.prepare(steps[0].inputs)
    for step in (*steps, *reversed(steps)):
        layer = replace(step, inputs=steps[0].inputs)
        check_close(layer.attend(attention, step.kv, step.q), step.expected())


@NAMES
@pytest.mark.parametrize("lengths", [[1], [64], [65], [20_000], [3 * i + 1 for i in range(256)]])
def test_decode_steps_match_the_reference(name: str, lengths: list[int]) -> None:
    page_size = 256 if name == "fa" else 64
    check(name, Step.of(lengths, [], page_size, (32, 8, 128), torch.bfloat16))


@NAMES
@pytest.mark.parametrize("chunks", [[(0, 1)], [(63, 1), (64, 1)], [(0, 8192)], [(4096, 1000)]])
def test_prefill_steps_match_the_reference(name: str, chunks: list[tuple[int, int]]) -> None:
    page_size = 256 if name == "fa" else 64
    check(name, Step.of([], chunks, page_size, (32, 8, 128), torch.bfloat16))


@pytest.mark.parametrize("name", ["fi,trtllm", "trtllm,fi", "torch,fi", "fi,torch"])
def test_different_prefill_and_decode_backends_match_the_reference(name: str) -> None:
    check(name, Step.of([5, 700], [(60, 70)], 64, (16, 8, 128), torch.bfloat16))


def busy(seconds: float = 0.3) -> None:
    """Keep the stream occupied, so that what is queued behind waits."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.mark.parametrize("heads", [(16, 8), (40, 8)], ids=str)
def test_host_plans_neither_synchronize_nor_overwrite_each_other(heads: tuple[int, int]) -> None:
    """Three steps are planned and queued while the stream is held up."""
    lengths = [[700, 5], [64, 1300], [1, 2000]]
    chunks = [[(0, 100)], [(640, 7)], [(5, 64)]]
    steps = [
        Step.of(n, c, 64, (*heads, 128), torch.bfloat16)
        for n, c in zip(lengths, chunks, strict=True)
    ]
    require("fi", steps[0].spec, 64)
    attention = make_attention("fi", "fi", steps[0].shape)
    for step in steps:  # compile, and make every wrapper
        attention.prepare(step.inputs)
        step.attend(attention, step.kv, step.q)
    torch.cuda.synchronize()
    busy()
    held = torch.cuda.Event()
    held.record()
    outputs = []
    for step in steps:
        attention.prepare(step.inputs)
        outputs.append(step.attend(attention, step.kv, step.q))
    assert not held.query(), "planning waited for the device"
    for out, step in zip(outputs, steps, strict=True):
        check_close(out, step.expected())


@pytest.mark.parametrize("name", ["trtllm", "fa"])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_captured_decode_matches_the_reference_at_other_lengths(name: str, num_rows: int) -> None:
    """Captured once over the widest table, replayed for short and long rows."""
    page_size = 256 if name == "fa" else 64
    heads = (16, 8, 128)
    longest = 4096
    make: Callable[[int], list[int]] = lambda length: [  # noqa: E731
        max(1, length - 3 * row) for row in range(num_rows)
    ]
    step = Step.of(make(longest), [], page_size, heads, torch.bfloat16)
    require(name, step.spec, page_size)
    attention = make_attention(name, name, step.shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention.prepare(step.inputs)
        step.attend(attention, step.kv, step.q)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step.attend(attention, step.kv, step.q)
    for length in (longest, 100, 1, 65, 2000, longest):
        step.inputs.decodes.lengths.copy_(torch.tensor(make(length), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        check_close(out, step.expected())
