"""Times linear layers with INT4 or e4m3 weights and plain x on a GPU.

python scripts/bench/bench_int4_linear.py                 # the tiles in use
python scripts/bench/bench_int4_linear.py --tune          # candidates, too; the best three
python scripts/bench/bench_int4_linear.py --bits 8        # e4m3 with a scale of each block

Each figure is a median over replays of a CUDA graph of several calls, whose weights together do not
fit into the L2 cache. `limit` is the larger of the bytes of W, x and y at 4.28 TB/s and the
operations at 800 TFLOP/s; the percentage is the share of it that was reached. `bf16` is F.linear
with dense weights, `stream` our kernel for them; `dequantised` writes W in bfloat16 first.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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

from minisgl.kernels.linear.epilogue import Epilogue

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace
    from minisgl.kernels.linear.weight_only.weights import WeightWords

MIN_CALLS = 12
SHAPES = {
    "Qwen3-14B": [
        Shape("qkv", 7168, 5120),
        Shape("o", 5120, 5120),
        Shape("gated", 34816, 5120, gated=True),
        Shape("gate_up", 34816, 5120),
        Shape("down", 5120, 17408),
    ],
    "Qwen3-32B": [
        Shape("qkv", 10240, 5120),
        Shape("o", 5120, 8192),
        Shape("gated", 51200, 5120, gated=True),
        Shape("down", 5120, 25600),
    ],
}


@dataclass(frozen=True)
class Weights:
    """How W is quantised."""

    bits: int
    group: int
    zeros: bool

    def bytes_of(self, shape: Shape) -> float:
        return shape.n * shape.k * self.bits / 8 + shape.n * shape.k / self.group * 4

    def random(self, shape: Shape) -> WeightWords:
        from minisgl.kernels.linear.weight_only.weights import e4m3_words, int4_words

        n, k = shape.n, shape.k
        groups = k // self.group
        if self.bits == 4:
            data = torch.randint(-(1 << 15), 1 << 15, (n, k // 4), device=DEVICE, dtype=torch.int16)
            scale = (torch.rand(groups, n, device=DEVICE) + 0.5).to(DTYPE) / (8 * k**0.5)
            zero = None
            if self.zeros:
                zero = torch.randint(0, 16, (groups, n), device=DEVICE, dtype=torch.uint8)
            return int4_words(data, scale, zero, DTYPE)
        data = random(n, k).to(torch.float8_e4m3fn)
        scale = (torch.rand(-(-n // 128), groups, device=DEVICE) + 0.5) / k**0.5
        words = e4m3_words(data, scale, (128, self.group), DTYPE)
        assert words is not None
        return words


def rotated(items: list[Any], num_bytes: float) -> list[Any]:
    count = max(len(items), 4 if num_bytes > 60 << 20 else MIN_CALLS)
    return [items[i % len(items)] for i in range(count)]


def run(
    shape: Shape, x: Tensor, words: WeightWords, workspace: LinearWorkspace, how: LinearTiles | None
) -> Tensor:
    from minisgl.kernels.linear.weight_only.weight_only_gemm import linear

    return linear(x, words, epilogue=Epilogue(shape.gated), workspace=workspace, tiles=how)


def candidates(shape: Shape, m: int, span: int, bits: int) -> list[LinearTiles]:
    """Candidate tiles; those in use come first."""
    from minisgl.kernels.linear.tiles import LinearTiles, workspace_size
    from minisgl.kernels.linear.weight_only.weight_only_tiles import choose_tiles
    from minisgl.kernels.tuning import tuning_of

    halves = 2 if shape.gated else 1
    found = [choose_tiles(m, shape.n, shape.k, span, bits, tuning_of(DEVICE), gated=shape.gated)]
    rows = max(8 if span == 128 else 16, 1 << (m - 1).bit_length())
    # rows of W, of x, k, warps, stages
    if m <= 64:
        sizes = [
            (64, rows, 128, 4, 3), (64, rows, 128, 4, 4), (64, rows, 256, 4, 3),
            (128, rows, 128, 4, 3), (128, rows, 128, 4, 4), (128, rows, 256, 4, 3),
            (128, rows, 128, 8, 4), (256, rows, 128, 8, 3), (32, rows, 256, 2, 3),
        ]  # fmt: skip
        waves, prefetches = [1, 2, 3, 4, 5], (0, 512)
    else:
        sizes = [
            (64, 128, 128, 4, 3), (128, 64, 128, 4, 3), (128, 64, 128, 8, 4),
            (128, 128, 128, 4, 3), (128, 128, 128, 8, 4), (128, 256, 128, 8, 3),
            (256, 64, 128, 8, 4), (256, 128, 128, 8, 4),
        ]  # fmt: skip
        waves, prefetches = [1, 2, 3], (0,)
    for block_n, block_m, block_k, num_warps, num_stages in sizes:
        how = LinearTiles(
            block_n // halves, block_m, block_k, num_warps=num_warps, num_stages=num_stages
        )
        num_tiles = math.ceil(shape.n // halves / how.block_n) * math.ceil(m / block_m)
        for wave in waves:
            splits = max(1, min(int(wave * NUM_SMS / num_tiles), shape.k // (block_k * 2), 16))
            for prefetch in prefetches:
                found.append(replace(how, splits=splits, prefetch=prefetch))

    def fits(how: LinearTiles) -> bool:
        if shape.k % how.block_k or how.block_k % span:
            return False
        tile = (how.block_n * halves * bits // 8 + how.block_m * 2) * how.block_k
        room, _ = workspace_size(m, shape.n, shape.k, how, gated=shape.gated)
        return tile * (how.num_stages - 1) <= 220 << 10 and room <= WORKSPACE_FLOATS

    return [how for how in dict.fromkeys(found) if fits(how)]


def launch(job: tuple[Weights, LinearTiles, bool]) -> None:
    weights, how, gated = job
    shape = Shape("", how.block_n * (4 if gated else 2), how.block_k * 16, gated)
    run(shape, random(16, shape.k), weights.random(shape), make_workspace(), how)


def measure(shape: Shape, weights: Weights, all_rows: list[int], *, tune: bool) -> None:
    from minisgl.kernels.elementwise.activation import gated_mul
    from minisgl.kernels.linear.dense_gemm import linear as dense_linear
    from minisgl.kernels.linear.weight_only.weight_only_gemm import dequantize
    from minisgl.kernels.linear.weight_only.weights import values

    num_bytes = weights.bytes_of(shape)
    every = [weights.random(shape) for _ in range(math.ceil(ROTATED_BYTES / num_bytes))]
    dense_bytes = 2 * shape.n * shape.k
    exact = values(every[0], DTYPE)
    copies = [exact.clone() for _ in range(math.ceil(ROTATED_BYTES / dense_bytes))]
    room, workspace = torch.empty(shape.n * shape.k, device=DEVICE, dtype=DTYPE), make_workspace()

    def cublas(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return gated_mul(y) if shape.gated else y

    def stream(x: Tensor, weight: Tensor) -> Tensor:
        return dense_linear(x, weight, epilogue=Epilogue(shape.gated), workspace=workspace)

    def dequantised(x: Tensor, words: WeightWords) -> Tensor:
        return cublas(x, dequantize(words, room))

    for m in all_rows:
        x = random(m, shape.k)
        moved = num_bytes + 2 * m * (shape.k + shape.num_outputs)
        limit_s = max(moved / BYTES_PER_S, 2 * m * shape.n * shape.k / OPERATIONS_PER_S)
        expected = cublas(x, exact)

        def timed(
            how: LinearTiles | None, x: Tensor = x, expected: Tensor = expected
        ) -> float | None:
            """None, and a line, if the result is wrong or there is none."""
            try:
                out = run(shape, x, every[0], workspace, how)
                error = float((out - expected).float().norm() / expected.float().norm())
                if not error < 0.01:
                    print("wrong:", how and spelled(how), error)
                    return None
                return graph_s(
                    [partial(run, shape, x, words, workspace, how) for words in rotated(every, 0)]
                )
            except Exception as failure:
                print("not:", how and spelled(how), str(failure)[:100])
                return None

        line = f"{shape.name:>7} {shape.n}x{shape.k} m={m:<5} limit {limit_s * 1e6:7.1f}"
        took_s = timed(None)
        if took_s is not None:
            share = limit_s / took_s
            line += f" | ours {took_s * 1e6:7.1f} {moved / took_s / 1e12:4.2f}T {share:4.0%}"
        dense_s = graph_s([partial(cublas, x, weight) for weight in rotated(copies, dense_bytes)])
        line += f" | bf16 {dense_s * 1e6:7.1f}"
        if m <= 128:
            stream_s = graph_s([partial(stream, x, w) for w in rotated(copies, dense_bytes)])
            line += f" | stream {stream_s * 1e6:7.1f}"
        if m >= 128:
            twice_s = graph_s(
                [partial(dequantised, x, words) for words in rotated(every, dense_bytes)]
            )
            line += f" | dequantised {twice_s * 1e6:7.1f}"
        print(line, flush=True)
        if tune and m <= 2048:
            times = [
                (found_s, how)
                for how in candidates(shape, m, every[0].span, weights.bits)
                if (found_s := timed(how)) is not None
            ]
            for found_s, how in sorted(times, key=lambda pair: pair[0])[:3]:
                print(f"{'':24} {found_s * 1e6:7.1f} {spelled(how)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["Qwen3-14B"])
    parser.add_argument("--only", nargs="+", help="names of products, such as qkv")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 1024, 8192])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zeros", action="store_true", help="INT4 with zero points")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    weights = Weights(args.bits, args.group, args.zeros)
    shapes = [
        shape
        for model in args.models
        for shape in SHAPES[model]
        if args.only is None or shape.name in args.only
    ]
    if args.tune:
        span = max(args.group, 64) if args.bits == 4 else args.group
        jobs = {
            (weights, replace(how, splits=min(how.splits, 2), prefetch=0), shape.gated)
            for shape in shapes
            for m in args.rows
            if m <= 2048
            for how in candidates(shape, m, span, args.bits)
        }
        compile_all(launch, sorted(jobs, key=str))
    for shape in shapes:
        measure(shape, weights, args.rows, tune=args.tune)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
