"""The kernels of LoRA at sizes of Llama-3.1-8B and Qwen3-30B-A3B, in bfloat16, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support import (
    adapted_expert_cases,
    expert_cases,
    fp8_expert_cases,
    int4_expert_cases,
    mxfp4_expert_cases,
)

from minisgl.config import Activations
from minisgl.kernels.adapters import AdapterWeights, allocate, b_of, places_of_parts
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.dense_tiles import allocate_workspace
from minisgl.kernels.linear.epilogue import Epilogue
from minisgl.kernels.lora.expand_kernel import expand
from minisgl.kernels.lora.shrink_kernel import shrink
from minisgl.kernels.lora.sort_kernel import sort_rows
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import ByRouter, Routing

pytestmark = pytest.mark.gpu

GPU, DTYPE = torch.device("cuda", 0), torch.bfloat16
PRODUCTS = {"qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "down": ((4096,), 14336)}
NUM_SLOTS = 8


def weights_of(widths: tuple[int, ...], k: int, max_rank: int) -> AdapterWeights:
    weights = allocate(NUM_SLOTS, max_rank, k, widths, DTYPE, GPU)
    weights.a.normal_(std=k**-0.5)
    weights.b.normal_()
    ranks = [16 * (1 + slot % (max_rank // 16)) for slot in range(NUM_SLOTS)]
    weights.ranks.copy_(torch.tensor(ranks))
    return weights


def exact(x: Tensor, weights: AdapterWeights, adapters: Tensor) -> Tensor:
    """What the adapters add, in float64, with v rounded to bfloat16 as the kernels round it."""
    added = x.new_zeros((len(x), sum(weights.b.shape[1:]) // weights.max_rank)).double()
    for adapter in range(1, NUM_SLOTS + 1):
        mine, slot, rank = adapters == adapter, adapter - 1, int(weights.ranks[adapter - 1])
        for part, columns in enumerate(places_of_parts(weights)):
            v = (x[mine].double() @ weights.a[slot, part, :rank].double().T).to(DTYPE).double()
            added[mine, columns] = v @ b_of(weights, slot, rank)[columns].double().T
    return added


def assert_close(found: Tensor, expected: Tensor) -> None:
    """But for the rounding of results, and of v where its sums are next to a tie."""
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 0.004, error


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_with_adapters_match_float64(product: str, max_rank: int) -> None:
    """In graphs of a shrink and a GEMM or an expand, replayed with other adapters: launches
    overlap, and a row's bits are those it has with other neighbours."""
    widths, k = PRODUCTS[product]
    n, weights = sum(widths), weights_of(widths, k, max_rank)
    w = torch.randn(n, k, device=GPU, dtype=DTYPE) * k**-0.5
    room = allocate_workspace([(n, k)], 64, GPU)
    for m in (1, 8, 16, 32, 64, 300):
        source = torch.randn(m, k, device=GPU, dtype=DTYPE)
        adapters = torch.zeros(m, dtype=torch.int32, device=GPU)
        stream, start = torch.empty(m, n, device=GPU, dtype=DTYPE), torch.randn(m, n, device=GPU)

        def step(
            source: Tensor = source,
            adapters: Tensor = adapters,
            stream: Tensor = stream,
            start: Tensor = start,
        ) -> list[Tensor]:
            stream.copy_(start)
            rows = sort_rows(adapters, NUM_SLOTS)
            x = source * 1
            y = x @ w.T
            expand(y, shrink(x, weights, rows))
            if len(x) > 64:
                return [y]
            fused = linear(x, w, epilogue=Epilogue(delta=shrink(x, weights, rows)), workspace=room)
            epilogue = Epilogue(residual=stream, delta=shrink(x, weights, rows))
            linear(x, w, epilogue=epilogue, workspace=room)
            return [y, fused]

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        before: list[Tensor] = []
        for seed in range(3):
            torch.manual_seed(seed)
            adapters.copy_(torch.randint(0, NUM_SLOTS + 1, (m,)))
            adapters[0] = 3
            graph.replay()
            expected = source.double() @ w.double().T + exact(source, weights, adapters)
            for y in found:
                assert_close(y, expected)
            if m <= 64:
                assert_close(stream, start.to(DTYPE).double() + expected)
            assert all(map(torch.equal, before, [y[0] for y in found]))
            before = [y[0].clone() for y in found]
        assert not room.semaphores.any()


A3B = (128, 2048, 768)  # num_experts, hidden_size, size
MADE: dict[str, Callable[[], ExpertsProduct]] = {
    "dense": lambda: DenseExperts(expert_cases.random_experts(*A3B, DTYPE, GPU)),
    "fp8, blocks": lambda: fp8_expert_cases.random_experts(
        *A3B, ((128, 128), (128, 128)), Activations.GROUP, GPU
    ),
    "fp8, channels": lambda: fp8_expert_cases.random_experts(*A3B, None, Activations.TOKEN, GPU),
    "int4": lambda: int4_expert_cases.random_experts(*A3B, (128, 128), symmetric=True, device=GPU),
    "mxfp4": lambda: mxfp4_expert_cases.random_experts(*A3B, dtype=DTYPE, device=GPU),
}


@pytest.mark.parametrize(("num_rows", "as_many"), [(1, 0), (32, 0), (70, 1000), (300, 10_000)])
@pytest.mark.parametrize("kind", MADE)
def test_experts_with_adapters_match_float64(kind: str, num_rows: int, as_many: int) -> None:
    adapted_expert_cases.check(
        MADE[kind](),
        num_rows,
        *A3B,
        dtype=DTYPE,
        device=GPU,
        tolerance=6e-2 if kind.startswith("fp8") else 2e-2,
        pdl=True,
        top_k=8,
        drops=num_rows == 32,
        as_many=as_many,
    )


@pytest.mark.parametrize("num_rows", [1, 32, 300])
@pytest.mark.parametrize("kind", MADE)
def test_a_graph_of_adapted_experts_gives_the_bits_of_calm_launches(
    kind: str, num_rows: int
) -> None:
    """Of several layers, whose launches overlap, with other adapters and experts in each replay."""
    layers = []
    for _ in range(3):
        made = MADE[kind]()
        held = made.experts if isinstance(made, DenseExperts) else made
        layers.append((held, adapted_expert_cases.random_adapters(*A3B, DTYPE, GPU)))
    x = torch.randn(num_rows, A3B[1], device=GPU).to(DTYPE)
    logits = torch.randn(len(layers), num_rows, A3B[0], device=GPU).to(DTYPE)
    adapters = torch.ones(num_rows, dtype=torch.int32, device=GPU)

    def step(*, pdl: bool) -> list[Tensor]:
        found = [x]
        for of_layer, (held, weights) in zip(logits, layers, strict=True):
            choice = ByRouter(of_layer, Routing(8, normalize=True))
            y, _ = fused_experts(found[-1], choice, held, adapted=(weights, adapters), pdl=pdl)
            found.append(y)
        return found[1:]

    step(pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(pdl=True)
    for seed in range(3):
        torch.manual_seed(seed)
        adapters.copy_(torch.randint(0, len(adapted_expert_cases.RANKS) + 1, (num_rows,)))
        logits.normal_()
        graph.replay()
        for found, wanted in zip(captured, step(pdl=False), strict=True):
            assert found.isfinite().all() and torch.equal(found, wanted)
