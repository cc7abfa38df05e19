"""Times linear layers on a GPU: Triton's, cuBLAS's with its default algorithm, and `tuned`, which
is cuBLAS's with the algorithm that the engine chooses.

python scripts/bench/bench_linear.py                  # the tiles in use
python scripts/bench/bench_linear.py --tune           # candidates, too; the best two of each case
python scripts/bench/bench_linear.py --chain          # the launches of a layer, one after the other

Each figure is a median over replays of a CUDA graph of several calls, whose weights together do not
fit into the L2 cache, so that each is read from memory as in a model. TB/s counts the weight, the
input and the output once. `limit` is these bytes at 4.28 TB/s or the operations at 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from graph_timer import graph_s
from linear_cases import (
    BYTES_PER_S,
    DEVICE,
    DTYPE,
    NUM_SMS,
    OPERATIONS_PER_S,
    ROTATED_BYTES,
    WORKSPACE_FLOATS,
    Shape,
    compile_all,
    make_workspace,
    random,
    spelled,
)
from torch import Tensor

from minisgl.kernels.linear.epilogue import GATED, Epilogue, FusedNorm

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace

MIN_CALLS = 20
SHAPES = {
    "Qwen3-0.6B": [
        Shape("qkv", 4096, 1024),
        Shape("o", 1024, 2048),
        Shape("gate_up", 6144, 1024),
        Shape("gated", 6144, 1024, gated=True),
        Shape("down", 1024, 3072),
        Shape("head", 151936, 1024),
    ],
    "Qwen3-14B": [
        Shape("qkv", 7168, 5120),
        Shape("o", 5120, 5120),
        Shape("gate_up", 34816, 5120),
        Shape("gated", 34816, 5120, gated=True),
        Shape("down", 5120, 17408),
        Shape("head", 151936, 5120),
    ],
    "Llama-3.1-8B": [
        Shape("qkv", 6144, 4096),
        Shape("o", 4096, 4096),
        Shape("gate_up", 28672, 4096),
        Shape("gated", 28672, 4096, gated=True),
        Shape("down", 4096, 14336),
        Shape("head", 128256, 4096),
    ],
}


# -- timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A shape with its weights, at some rows."""

    shape: Shape
    weights: list[Tensor]
    x: Tensor
    workspace: LinearWorkspace

    def calls(self, call: Callable[[Tensor, Tensor], object]) -> list[Callable[[], object]]:
        count = max(len(self.weights), 6 if weight_bytes(self.shape) > 100 << 20 else MIN_CALLS)
        weights = [self.weights[i % len(self.weights)] for i in range(count)]
        return [partial(call, self.x, weight) for weight in weights]

    def run(self, x: Tensor, weight: Tensor, how: LinearTiles | None, pdl: bool) -> Tensor:
        from minisgl.kernels.linear.dense_gemm import linear

        epilogue = Epilogue(self.shape.gated)
        return linear(x, weight, epilogue=epilogue, workspace=self.workspace, tiles=how, pdl=pdl)

    def time_s(self, how: LinearTiles | None, pdl: bool) -> float:
        return graph_s(self.calls(lambda x, weight: self.run(x, weight, how, pdl)))

    def cublas(self, x: Tensor, weight: Tensor) -> Tensor:
        from minisgl.kernels.elementwise.activation import gated_mul

        out = F.linear(x, weight)
        return gated_mul(out) if self.shape.gated else out

    def is_right(self, how: LinearTiles | None) -> bool:
        out, expected = self.run(self.x, self.weights[0], how, True), self.cublas_out
        return bool((out - expected).norm() < 0.01 * expected.norm())

    @property
    def cublas_out(self) -> Tensor:
        return self.cublas(self.x, self.weights[0])


def problems(shape: Shape, rows: list[int], workspace: LinearWorkspace) -> Iterator[Problem]:
    count = math.ceil(ROTATED_BYTES / weight_bytes(shape))
    weights = [random(shape.n, shape.k) / shape.k**0.5 for _ in range(count)]
    for m in rows:
        yield Problem(shape, weights, random(m, shape.k), workspace)


def weight_bytes(shape: Shape) -> int:
    return shape.n * shape.k * 2


def moved_bytes(shape: Shape, m: int) -> int:
    """The weight, the input and the output."""
    return weight_bytes(shape) + 2 * m * (shape.k + shape.num_outputs)


def limit_s(shape: Shape, m: int) -> float:
    operations = 2 * m * shape.n * shape.k
    return max(moved_bytes(shape, m) / BYTES_PER_S, operations / OPERATIONS_PER_S)


def result(problem: Problem, took_s: float, how: LinearTiles) -> str:
    num_bytes = moved_bytes(problem.shape, len(problem.x))
    return f"{took_s * 1e6:7.2f} {num_bytes / took_s / 1e12:4.2f}T {spelled(how)}"


def start(problem: Problem, cublas_s: float) -> str:
    m, shape = len(problem.x), problem.shape
    line = f"{shape.name:>7} {shape.k}>{shape.n} m={m}"
    return f"{line:28} limit {limit_s(shape, m) * 1e6:6.2f} cublas {cublas_s * 1e6:6.2f}"


# -- the tuner -------------------------------------------------------------------------------------


def candidates(shape: Shape, m: int) -> list[LinearTiles]:
    """Candidate tiles; those in use come first."""
    from minisgl.kernels.linear.dense_tiles import choose_tiles
    from minisgl.kernels.linear.tiles import LinearTiles, workspace_size
    from minisgl.kernels.tuning import tuning_of

    halves = 2 if shape.gated else 1
    n, k = shape.n // halves, shape.k
    found = [choose_tiles(m, shape.n, k, tuning_of(DEVICE), gated=shape.gated)]
    block_m = max(16, 1 << (m - 1).bit_length())

    def add(how: LinearTiles, *waves: float) -> None:
        """The tiles with k split to give this many programs per multiprocessor."""
        how = replace(how, prefetch=how.block_k * 4)
        num_tiles = math.ceil(n / how.block_n) * math.ceil(m / how.block_m)
        for wave in waves:
            splits = max(1, min(int(wave * NUM_SMS / num_tiles), k // (how.block_k * 2), 16))
            found.append(replace(how, splits=splits))

    if m <= 32 and k <= 6144 and weight_bytes(shape) <= 32 << 20:
        rows_m = 8 if m <= 8 else block_m
        for block_n, groups in [(16, 8), (32, 8), (16, 16), (32, 16), (64, 16)]:
            for block_k in (1024, 2048) if k > 1024 else (1024,):
                held = math.ceil(k / block_k) * block_k
                if (block_n * halves + rows_m) * held * 2 <= groups * 25 << 10:
                    how = LinearTiles(block_n, rows_m, block_k, 1, groups, groups, burst=True)
                    found.append(how)
    if m <= 64 and weight_bytes(shape) <= 40 << 20:
        add(LinearTiles(16, block_m, 256, groups=4, num_warps=4, num_stages=4), 1, 2)
        add(LinearTiles(16, block_m, 512, groups=8, num_warps=8, num_stages=4), 1)
        add(LinearTiles(32, block_m, 256, groups=4, num_warps=4, num_stages=4), 1)
    if m <= 64:
        add(LinearTiles(64, block_m, 128, num_stages=4), 1, 2, 3)
        add(LinearTiles(64, block_m, 64, num_stages=6), 2, 3)
        add(LinearTiles(64, block_m, 128, num_stages=6), 1)
        if not shape.gated or m <= 32:
            add(LinearTiles(128, block_m, 64, num_stages=4), 1, 2, 3)
        add(LinearTiles(128, block_m, 128, num_warps=8, num_stages=3), 1, 2)
    else:
        add(LinearTiles(64, 64, 64, num_stages=5), 2, 3)
        add(LinearTiles(64, 128, 64, num_stages=4), 1, 2)
        add(LinearTiles(128, 64, 64, num_stages=4), 1, 2)
        add(LinearTiles(128, 128, 64, num_warps=8, num_stages=4), 1, 2)
        add(LinearTiles(128, 128, 64, num_warps=8, num_stages=6), 1)
        add(LinearTiles(128, 128, 128, num_warps=8, num_stages=3), 1)
        if not shape.gated:
            add(LinearTiles(64, 256, 64, num_warps=4, num_stages=4), 1)
            add(LinearTiles(64, 256, 64, num_warps=8, num_stages=4), 1)
            add(LinearTiles(128, 256, 64, num_warps=8, num_stages=3), 1)
            add(LinearTiles(128, 256, 64, num_warps=8, num_stages=4), 1)
            add(LinearTiles(256, 128, 64, num_warps=8, num_stages=4), 1)

    def fits(how: LinearTiles) -> bool:
        tile = (how.block_n * halves + how.block_m) * how.block_k * 2
        room, _ = workspace_size(m, shape.n, k, how, gated=shape.gated)
        in_flight = tile if how.burst else tile * how.num_stages
        return in_flight <= 220 << 10 and room <= WORKSPACE_FLOATS

    return [how for how in dict.fromkeys(found) if fits(how)]


@dataclass(frozen=True)
class Variant:
    """The key of a kernel that is compiled once for all its shapes."""

    how: LinearTiles
    k: int
    gated: bool

    @classmethod
    def of(cls, shape: Shape, how: LinearTiles) -> Variant:
        k = shape.k if how.burst or shape.k % how.block_k else how.block_k * 16
        return cls(replace(how, splits=min(how.splits, 2), prefetch=0), k, shape.gated)


def launch(variant: Variant) -> None:
    from minisgl.kernels.linear.dense_gemm import linear

    epilogue = Epilogue(variant.gated)
    n = variant.how.block_n * (4 if variant.gated else 2)
    x, weight = random(16, variant.k), random(n, variant.k)
    linear(x, weight, epilogue=epilogue, workspace=make_workspace(), tiles=variant.how)


def tune(shapes: list[Shape], rows: list[int]) -> None:
    choices = {(shape, m): candidates(shape, m) for shape in shapes for m in rows}
    variants = {Variant.of(shape, how) for (shape, _), hows in choices.items() for how in hows}
    by_size = sorted(variants, key=lambda variant: -variant.how.block_m * variant.how.block_n)
    compile_all(launch, by_size)
    workspace = make_workspace()
    began = time.monotonic()
    for shape in shapes:
        for problem in problems(shape, rows, workspace):
            times = []
            for how in choices[shape, len(problem.x)]:
                try:
                    if problem.is_right(how):
                        times.append((problem.time_s(how, True), how))
                    else:
                        print("wrong:", spelled(how))
                except Exception as error:
                    print("not:", spelled(how), str(error)[:80])
            cublas_s = graph_s(problem.calls(problem.cublas))
            in_use_s = times[0][0]
            times.sort(key=lambda pair: pair[0])
            best_how = times[0][1]
            if not best_how.burst:
                for prefetch in (0, 1024, 4096):
                    how = replace(best_how, prefetch=prefetch)
                    times.append((problem.time_s(how, True), how))
                times.sort(key=lambda pair: pair[0])
            best = " | ".join(result(problem, took_s, how) for took_s, how in times[:2])
            print(f"{start(problem, cublas_s)} now {in_use_s * 1e6:6.2f} | {best}", flush=True)
        torch.cuda.empty_cache()
    print(f"timed in {time.monotonic() - began:.0f} s")


# -- what is in use --------------------------------------------------------------------------------


def compare(shapes: list[Shape], rows: list[int]) -> None:
    from minisgl.kernels.linear.cublaslt import load_products
    from minisgl.kernels.linear.dense_tiles import choose_tiles
    from minisgl.kernels.tuning import tuning_of

    workspace, products = make_workspace(), load_products(DTYPE, DEVICE)
    for shape in shapes:
        if products is not None and not shape.gated:
            products.tune(next(problems(shape, rows, workspace)).weights)
        for problem in problems(shape, rows, workspace):
            line = start(problem, graph_s(problem.calls(problem.cublas)))
            if products is not None and products(problem.x, problem.weights[0]) is not None:
                line += f" tuned {graph_s(problem.calls(products)) * 1e6:6.2f}"
            if len(problem.x) <= 256:
                size = (len(problem.x), shape.n, shape.k)
                how = choose_tiles(*size, tuning_of(DEVICE), gated=shape.gated)
                right = "" if problem.is_right(how) else " WRONG"
                alone_s, took_s = (problem.time_s(how, pdl) for pdl in (False, True))
                line += f" no pdl {alone_s * 1e6:6.2f} pdl {result(problem, took_s, how)}{right}"
            print(line, flush=True)
        torch.cuda.empty_cache()


def chain(model: str, rows: list[int], prefetches: list[int]) -> None:
    """All launches of a layer, many layers one behind the other, each on what the last one wrote.
    Attention is a norm of the heads."""
    from minisgl.kernels.elementwise.activation import gated_mul
    from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv
    from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm
    from minisgl.kernels.elementwise.reference import NormRope
    from minisgl.kernels.linear.dense_gemm import linear
    from minisgl.kernels.linear.dense_tiles import choose_tiles
    from minisgl.kernels.tuning import tuning_of

    shapes = {shape.name: shape for shape in SHAPES[model] if shape.name not in ("head", "gate_up")}
    layer_bytes = sum(weight_bytes(shape) for shape in shapes.values())
    num_layers = max(math.ceil(2 * ROTATED_BYTES / layer_bytes), 8)
    layers = [
        {name: random(shape.n, shape.k) / shape.k**0.5 for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]
    size, head_dim, eps = shapes["qkv"].k, 128, 1e-6
    norm, head_norm, table = random(size), random(head_dim), torch.rand(4096, head_dim).to(DEVICE)
    norm_rope = NormRope(table, head_norm, head_norm, eps)
    caches = torch.zeros(2, 64, 16, 8, head_dim, device=DEVICE, dtype=DTYPE)
    workspace = make_workspace()

    def attend(qkv: Tensor) -> Tensor:
        place = places[: len(qkv)]
        q = qk_norm_rope_store_kv(qkv, place, place, *caches, norm_rope)
        return rms_norm(q.view(-1, head_dim), head_norm, eps).view(len(qkv), -1)

    def cublas(residual: Tensor) -> None:
        delta = torch.zeros_like(residual)
        for weights in layers:
            x, residual = add_rms_norm(delta, residual, norm, eps)
            delta = F.linear(attend(F.linear(x, weights["qkv"])), weights["o"])
            x, residual = add_rms_norm(delta, residual, norm, eps)
            delta = F.linear(gated_mul(F.linear(x, weights["gated"])), weights["down"])

    def separate(residual: Tensor) -> None:
        delta = torch.zeros_like(residual)
        for weights in layers:
            x, residual = add_rms_norm(delta, residual, norm, eps)
            qkv = linear(x, weights["qkv"], workspace=workspace)
            delta = linear(attend(qkv), weights["o"], workspace=workspace)
            x, residual = add_rms_norm(delta, residual, norm, eps)
            x = linear(x, weights["gated"], epilogue=GATED, workspace=workspace)
            delta = linear(x, weights["down"], workspace=workspace)

    def fused(residual: Tensor, prefetch: int | None = None) -> None:
        m = len(residual)
        how = {
            name: choose_tiles(m, shape.n, shape.k, tuning_of(DEVICE), gated=shape.gated)
            for name, shape in shapes.items()
        }
        if prefetch is not None:
            how = {name: replace(tiles, prefetch=prefetch) for name, tiles in how.items()}
        squares = residual.float().square().sum(1, keepdim=True)
        for weights in layers:
            its_norm = FusedNorm(norm, eps, squares)
            qkv = linear(
                residual, weights["qkv"], norm=its_norm, workspace=workspace, tiles=how["qkv"]
            )
            squares = linear(
                attend(qkv),
                weights["o"],
                epilogue=Epilogue(residual=residual),
                workspace=workspace,
                tiles=how["o"],
            )
            its_norm = FusedNorm(norm, eps, squares)
            x = linear(
                residual,
                weights["gated"],
                epilogue=GATED,
                norm=its_norm,
                workspace=workspace,
                tiles=how["gated"],
            )
            squares = linear(
                x,
                weights["down"],
                epilogue=Epilogue(residual=residual),
                workspace=workspace,
                tiles=how["down"],
            )

    kinds: dict[str, Callable[[Tensor], None]] = {
        "cuBLAS": cublas,
        "ours": separate,
        "ours, fused": fused,
    }
    for prefetch in prefetches:
        kinds[f"p{prefetch}"] = partial(fused, prefetch=prefetch)
    print(f"{model}: a layer of {layer_bytes / BYTES_PER_S * 1e6:.2f} µs at least")
    for m in rows:
        places = torch.arange(m, device=DEVICE)
        residual = random(m, size)
        torch.cuda.synchronize()
        results = []
        for kind, run in kinds.items():
            took_s = graph_s([partial(lambda run, x: run(x.clone()), run, residual)])
            results.append(f"{kind} {took_s / num_layers * 1e6:.2f}")
        print(f"  m={m}: " + "; ".join(results), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", nargs="+", help="names of products, such as qkv")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument(
        "--prefetch", nargs="+", type=int, default=[], help="of --chain: instead of the tiles' own"
    )
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    shapes = [
        shape
        for model in args.models
        for shape in SHAPES[model]
        if args.only is None or shape.name in args.only
    ]
    if args.tune:
        tune(shapes, args.rows or [1, 8, 32, 256])
    elif args.chain:
        for model in args.models:
            chain(model, args.rows or [1, 8, 16, 32], args.prefetch)
    else:
        compare(shapes, args.rows or [1, 8, 16, 32, 64, 128, 256])


if __name__ == "__main__":
    main()
