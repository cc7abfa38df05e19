"""Cases of bench_kernels.py: products of which rows have adapters (LoRA).

`minisgl` is the shrink and our GEMM, which adds the delta; `cuBLAS` shrink, cuBLAS and expand; of
0 adapters the GEMMs alone. `shrink` is the shrink alone, and `gemm` our GEMM with v from before.
Weights and adapters are as cold as in a model, and x is written before each call, which counts.
What a case takes more than that of 0 adapters, by the faster of both, summed up over a layer's
products and times the layers, is what adapters cost a step. Bytes: of W, and of A and B once for
each adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from kernel_timer import DEVICE, DTYPE, MODELS, Case, Problem, copies, in_turn, random
from linear_kernels import NUM_CALLS, SEMAPHORES, WORKSPACE_FLOATS, Shape, dense_weights, shapes_of
from torch import Tensor

from minisgl.kernels.adapters import AdapterWeights, allocate
from minisgl.kernels.linear.epilogue import Epilogue

RANK = 16
ADAPTERS = (
    *((1, 0), (1, 1), (8, 0), (8, 1), (8, 8), (16, 0), (16, 8)),
    *((32, 0), (32, 1), (32, 8), (32, 32)),
)  # rows, and adapters


def slots_of(num_slots: int, k: int, widths: tuple[int, ...], rank: int) -> AdapterWeights:
    weights = allocate(num_slots, rank, k, widths, DTYPE, DEVICE)
    weights.a.normal_(std=k**-0.5)
    weights.b.normal_(std=0.1)
    weights.ranks.fill_(rank)
    return weights


def lora_problem(
    shape: Shape, widths: tuple[int, ...], m: int, num_adapters: int, rank: int = RANK
) -> Problem:
    """Rows have the adapters in turn; none: of no adapters."""
    from minisgl.kernels.linear.dense_gemm import linear
    from minisgl.kernels.linear.tiles import LinearWorkspace
    from minisgl.kernels.lora import reference
    from minisgl.kernels.lora.expand_kernel import expand
    from minisgl.kernels.lora.shrink_kernel import shrink
    from minisgl.kernels.lora.sort_kernel import sort_rows

    workspace = LinearWorkspace.allocate([(WORKSPACE_FLOATS, SEMAPHORES)], DEVICE)
    num_slots = max(num_adapters, 1)
    adapters = (torch.arange(m, device=DEVICE) % num_slots + 1).int()
    rows, source = sort_rows(adapters, num_slots), random(m, shape.k)

    def make() -> tuple[Tensor, AdapterWeights]:
        slots = slots_of(num_slots, shape.k, widths, rank)
        return dense_weights(shape.n, shape.k), slots

    adapted = num_adapters > 0
    num_bytes = 2.0 * (shape.size + num_adapters * rank * (len(widths) * shape.k + shape.n))
    pairs = copies(make, num_bytes)

    before = shrink(source, pairs[0][1], rows)

    def ours(pair: tuple[Tensor, AdapterWeights]) -> Tensor:
        x, delta = source * 1, None
        if adapted:
            delta = shrink(x, pair[1], rows)
        return linear(x, pair[0], epilogue=Epilogue(delta=delta), workspace=workspace)

    def by_cublas(pair: tuple[Tensor, AdapterWeights]) -> Tensor:
        x = source * 1
        if not adapted:
            return x @ pair[0].T
        delta = shrink(x, pair[1], rows)
        y = x @ pair[0].T
        expand(y, delta)
        return y

    def alone(pair: tuple[Tensor, AdapterWeights]) -> Tensor:
        shrink(source * 1, pair[1], rows)
        return expected

    def gemm(pair: tuple[Tensor, AdapterWeights]) -> Tensor:
        epilogue = Epilogue(delta=before._replace(weights=pair[1]))
        return linear(source * 1, pair[0], epilogue=epilogue, workspace=workspace)

    w, slots = pairs[0]
    expected = source @ w.T
    if adapted:
        reference.expand(expected, reference.shrink(source, slots, rows))
    ways = {"minisgl": ours, "cuBLAS": by_cublas}
    ways |= {"shrink": alone, "gemm": gemm} if adapted else {}
    return Problem(
        calls={name: lambda way=way: in_turn(way, pairs, NUM_CALLS) for name, way in ways.items()},
        num_bytes=num_bytes,
        expected=expected,
    )


def sort_problem(m: int, num_slots: int) -> Problem:
    from minisgl.kernels.lora.sort_kernel import sort_rows

    adapters = torch.randint(num_slots + 1, (m,), device=DEVICE, dtype=torch.int32)
    return Problem(calls={"minisgl": lambda: [partial(sort_rows, adapters, num_slots)] * NUM_CALLS})


def lora_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    config = MODELS["Llama-3.1-8B"]
    inner, kv = config["intermediate_size"], config["num_key_value_heads"] * config["head_dim"]
    parts = {"qkv": (kv, kv), "gate_up": (inner,)}
    for shape in shapes_of(config):
        if shape.name in ("qkv", "o", "gate_up", "down"):
            others = parts.get(shape.name, ())
            widths = (shape.n - sum(others), *others)
            for m, count in ADAPTERS:
                if rows is None or m in rows:
                    make = partial(lora_problem, shape, widths, m, count)
                    yield Case(f"{shape}, {m} rows of {count} adapters", make)
    for m, slots in itertools.product(rows or (1, 32, 256, 8192), (8, 32)):
        yield Case(f"sort {m} rows, {slots} slots", partial(sort_problem, m, slots))
