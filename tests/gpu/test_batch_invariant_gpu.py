"""--batch-invariant on a GPU, in bfloat16: the bits of tokens and logprobs depend on the request
alone, with CUDA graphs and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.invariance import SPECS, Bits, bits, bits_in, engine_of, jobs_of, num_equal
from torch import Tensor

from minisgl.attention import invariant_attention
from minisgl.attention.base import AttentionCall, PrefillBatch
from minisgl.attention.invariant_attention import InvariantAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.device.lanes import Lanes
from minisgl.kernels.elementwise.norm import rms_norm
from minisgl.kernels.linear import invariant_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.invariant_product import InvariantProduct, tiles_of
from minisgl.kernels.tuning import PrefillTiles, tuning_of
from minisgl.models import invariant
from minisgl.parts import device
from minisgl.parts.scores.device import ScoreStep
from minisgl.parts.scores.host import ScorePlan

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "page_size": 16, "num_pages": 800}
NAMES = pytest.mark.parametrize("name", ["wide", "wide-moe"])
GRAPHS = pytest.mark.parametrize("graphs", [0, 16])
# Within a tile of keys, up to its end, and over several.
LENGTHS = (9, 63, 64, 65, 200, 3, 127, 128, 129, 310, 17, 40)
NUM_TOKENS = 24


def jobs(name: str, lengths: Sequence[int] = LENGTHS) -> list[Any]:
    return jobs_of(SPECS[name], lengths, NUM_TOKENS)


@cache
def alone(name: str, lengths: Sequence[int] = LENGTHS) -> list[Bits]:
    """Each request by itself, with neither graphs nor a prefix cache."""
    options = {**ON_GPU, "cuda_graph_max_bs": 0, "cache_type": "naive"}
    return bits_in(name, jobs(name, lengths), together=False, **options)


def assert_equal(found: Sequence[Bits], expected: Sequence[Bits]) -> None:
    assert num_equal(found, expected) == len(expected), [
        index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]
    ]


@NAMES
@GRAPHS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_length": 7},
        {"max_prefill_length": 100, "overlap": False},
        {"page_size": 64, "num_pages": 200, "max_running_requests": 3},
        {"cache_type": "naive"},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company(name: str, graphs: int, options: dict[str, Any]) -> None:
    options = {**ON_GPU, "cuda_graph_max_bs": graphs, **options}
    assert_equal(bits_in(name, jobs(name), **options), alone(name))


@NAMES
@GRAPHS
def test_bits_do_not_depend_on_what_is_cached(name: str, graphs: int) -> None:
    expected = alone(name)

    async def run() -> None:
        async with engine_of(name, **ON_GPU, cuda_graph_max_bs=graphs) as engine:
            for together in (True, False, True):
                assert_equal(await bits(engine, jobs(name), together=together), expected)
            assert engine.stats().counters.num_cached_tokens > sum(LENGTHS)

    asyncio.run(run())


@NAMES
@GRAPHS
def test_bits_do_not_depend_on_retraction(name: str, graphs: int) -> None:
    options = {**ON_GPU, "cuda_graph_max_bs": graphs, "num_pages": 30}
    options |= {"max_seq_len_override": 400, "schedule_conservativeness": 0.02}
    expected = alone(name)

    async def run() -> None:
        async with engine_of(name, **options) as engine:
            assert_equal(await bits(engine, jobs(name)), expected)
            assert engine.stats().counters.num_retractions > 0

    asyncio.run(run())


@NAMES
def test_bits_do_not_depend_on_200_others(name: str) -> None:
    """Whose decode rows take the largest tiles, with graphs of all sizes."""
    lengths = (*LENGTHS, *(5 + 3 * index % 90 for index in range(188)))
    options = {**ON_GPU, "num_pages": 3000, "cuda_graph_max_bs": 256}
    found = bits_in(name, jobs(name, lengths), **options)
    assert_equal(found[: len(LENGTHS)], alone(name))


@NAMES
def test_a_wide_head_is_pinned_too(name: str) -> None:
    options: dict[str, Any] = {**ON_GPU, "head_dtype": "float32"}
    one_by_one = bits_in(name, jobs(name), together=False, cuda_graph_max_bs=0, **options)
    assert_equal(bits_in(name, jobs(name), cuda_graph_max_bs=8, **options), one_by_one)


@pytest.mark.parametrize(("n", "k"), [(5120, 17408), (6144, 2048), (151_936, 1024), (128, 2050)])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["bfloat16", "float32"])
def test_each_row_of_a_product_is_that_of_the_row_alone(
    n: int, k: int, dtype: torch.dtype | None
) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    weight = (torch.randn(n, k, generator=generator, device=GPU) / k**0.5).bfloat16()
    x = torch.randn(1023, k, generator=generator, device=GPU).bfloat16()
    product = InvariantProduct(DenseProduct(weight), dtype)
    whole, exact = product(x), x.double() @ weight.double().t()
    assert (whole.double() - exact).abs().max() < 1e-2 * exact.abs().max()
    for count in (1, 2, 8, 16, 17, 63, 64, 65, 129, 512):
        for first in (0, 1, 100, 1023 - count):
            rows = slice(first, first + count)
            assert torch.equal(product(x[rows]), whole[rows]), (count, first)


@pytest.mark.parametrize("size", [1024, 2048, 5120])
def test_each_row_of_a_norm_is_that_of_the_row_alone(size: int) -> None:
    """Of as many rows as a step may have."""
    x = torch.randn(1023, size, device=GPU).bfloat16()
    weight = torch.ones(size, device=GPU).bfloat16()
    whole = rms_norm(x, weight, 1e-6)
    for count in (1, 2, 64, 700):
        assert torch.equal(rms_norm(x[:count], weight, 1e-6), whole[:count])


def test_tiles_take_the_tensor_cores_of_a_kind() -> None:
    tuning = tuning_of(GPU)
    tiles = [tiles_of(num_rows, tuning) for num_rows in (1, 16, 17, 64, 65, 1023)]
    assert {(each.block_k, each.groups, each.splits, each.burst) for each in tiles} == {
        (invariant_product.BLOCK_K, 1, 1, False)
    }
    assert all(each.block_n >= 64 and each.num_warps % 4 == 0 for each in tiles)


# -- what comes of a kernel that is not pinned -----------------------------------------------------


class SplitChunks(InvariantAttention):
    """Splits the keys of few chunks, by all of them."""

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> torch.Tensor:
        tiles = PrefillTiles(128, 64, num_warps=8, num_stages=3, min_split=64)
        return TritonAttention(prefill=tiles).prefill(call, batch)


def assert_unpinned(name: str) -> None:
    """Together, requests have other bits than one by one."""
    options = {**ON_GPU, "cuda_graph_max_bs": 0}
    one_by_one = bits_in(name, jobs(name), together=False, **options)
    assert num_equal(bits_in(name, jobs(name), **options), one_by_one) < len(LENGTHS)


@pytest.mark.parametrize("attention", [TritonAttention, SplitChunks])
def test_attention_that_is_not_pinned_shows(
    attention: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant_attention, "InvariantAttention", attention)
    assert_unpinned("wide")


def test_products_that_are_not_pinned_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS chooses by the number of rows, and our kernels split k."""
    monkeypatch.setattr(InvariantProduct, "__call__", lambda self, x, rows=None: self.plain(x))
    assert_unpinned("wide")


class WholeChunks(ScoreStep):
    """Scores the prompt rows of a chunk together, of which the alignment in memory differs."""

    def __init__(
        self, lanes: Lanes, whole_logits: Callable[[Tensor], Tensor], num_rows: int, plan: ScorePlan
    ) -> None:
        super().__init__(lanes, whole_logits, 1 << 20, plan)


def test_prompts_that_are_not_scored_row_by_row_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch adds up a row of so many logits in an order that depends on where it begins."""
    monkeypatch.setitem(SPECS, "odd", replace(SPECS["wide"], name="odd", vocab_size=32003))
    monkeypatch.setattr(device, "ScoreStep", WholeChunks)
    options = {**ON_GPU, "cuda_graph_max_bs": 0}
    chunked = bits_in("odd", jobs("odd"), max_prefill_length=7, **options)
    assert num_equal(chunked, bits_in("odd", jobs("odd"), **options)) < len(LENGTHS)


def test_experts_that_are_not_pinned_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "_pin_experts", lambda module: None)
    assert_unpinned("wide-moe")
