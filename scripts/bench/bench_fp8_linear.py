"""Times FP8 linear layers on a GPU: ours, torch's scaled product, and cuBLAS's in bfloat16.

python scripts/bench/bench_fp8_linear.py                 # the tiles in use
python scripts/bench/bench_fp8_linear.py --tune          # candidates, too; the best three
python scripts/bench/bench_fp8_linear.py --chain         # the launches of a layer
python scripts/bench/bench_fp8_linear.py --round         # the kernels that round activations

Each figure is a median over replays of a CUDA graph of several calls, whose weights together do not
fit into the L2 cache, so that each is read from memory as in a model. x is rounded before, but in
--chain. TB/s counts the weight, x and y once. `limit` is these bytes at 4.28 TB/s or the operations
at 1,600 TFLOP/s.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
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
    compile_all,
    make_workspace,
    random,
    spelled,
)
from torch import Tensor

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.fp8_rows import Fp8Rows
    from minisgl.kernels.linear.quantized import Fp8Weights
    from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace

FP8_OPERATIONS_PER_S = 2 * OPERATIONS_PER_S
MODELS = {  # n, k
    "Qwen3-14B": {
        "qkv": (7168, 5120),
        "o": (5120, 5120),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
    },
    "Qwen3-32B": {
        "qkv": (10240, 5120),
        "o": (5120, 8192),
        "gate_up": (51200, 5120),
        "down": (5120, 25600),
    },
    "Llama-3.1-8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "Qwen3-0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
    },
}
BLOCKS = {"channel": None, "block": (128, 128)}


def random_weights(n: int, k: int, block: tuple[int, int] | None) -> Fp8Weights:
    from minisgl.kernels.linear.quantized import Fp8Weights

    data = random(n, k).mul_(64).to(torch.float8_e4m3fn)
    shape = (n,) if block is None else (-(-n // block[0]), -(-k // block[1]))
    return Fp8Weights(data, torch.rand(shape, device=DEVICE) / (64 * k**0.5), block)


def rounded(m: int, k: int, group: int | None) -> Fp8Rows:
    from minisgl.kernels.elementwise.quantize import quantize

    x = random(m, k)
    torch.cuda.synchronize()
    return quantize(x, group)


@dataclass(frozen=True)
class Case:
    """Several weights of one shape, at some rows."""

    weights: list[Fp8Weights]
    x: Fp8Rows
    workspace: LinearWorkspace

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self.x), *self.weights[0].data.shape)

    @property
    def num_bytes(self) -> int:
        m, n, k = self.shape
        return n * k + m * (k + 2 * n)

    def time_s(self, call: Callable[[Fp8Weights], object]) -> float:
        count = max(len(self.weights), 6)
        return graph_s([partial(call, self.weights[i % len(self.weights)]) for i in range(count)])

    def ours(self, weights: Fp8Weights, how: LinearTiles | None = None) -> Tensor:
        from minisgl.kernels.linear.fp8.fp8_gemm import linear

        return linear(self.x, weights, None, workspace=self.workspace, tiles=how)

    def expected(self) -> Tensor:
        """In float32, of the first weights."""
        data, scale, block = self.weights[0]
        x, n, k = self.x, *self.weights[0].data.shape
        wide = data.float()
        if block is None:
            return (x.data.float() @ wide.T) * x.scale[:, None] * scale
        wide *= scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
        return (x.data.float() * x.scale.repeat_interleave(block[1], 1)[:, :k]) @ wide.T

    def is_right(self, out: Tensor, expected: Tensor) -> bool:
        return bool((out - expected).norm() < 0.004 * expected.norm())

    def result(self, took_s: float) -> str:
        m, n, k = self.shape
        rate = f"{self.num_bytes / took_s / 1e12:4.2f} TB/s"
        return f"{took_s * 1e6:8.2f} µs {rate} {2 * m * n * k / took_s / 1e12:5.0f} TFLOP/s"


# -- what is in use --------------------------------------------------------------------------------


def compare(name: str, n: int, k: int, kind: str, rows: list[int]) -> None:
    from minisgl.kernels.linear.fp8 import scaled_mm
    from minisgl.kernels.linear.fp8.fp8_tiles import choose_tiles
    from minisgl.kernels.tuning import tuning_of

    block, workspace = BLOCKS[kind], make_workspace()
    weights = [random_weights(n, k, block) for _ in range(math.ceil(ROTATED_BYTES / (n * k)))]
    for m in rows:
        case = Case(weights, rounded(m, k, weights[0].group), workspace)
        limit_s = max(case.num_bytes / BYTES_PER_S, 2 * m * n * k / FP8_OPERATIONS_PER_S)
        line = f"{name:>7} {n}x{k} {kind:7} m={m:<5} limit {limit_s * 1e6:7.2f}"
        expected = case.expected()
        how = choose_tiles(m, n, k, tuning_of(DEVICE), group=weights[0].group)
        right = "" if case.is_right(case.ours(weights[0]), expected) else " WRONG"
        line += f" | ours {case.result(case.time_s(case.ours))} {spelled(how)}{right}"
        if scaled_mm.takes(case.x, weights[0], None):
            call = partial(scaled_mm.linear, case.x, bias=None)
            right = "" if case.is_right(call(weights=weights[0]), expected) else " WRONG"
            took_s = case.time_s(lambda weights, call=call: call(weights=weights))
            line += f" | torch {case.result(took_s)}{right}"
        print(line, flush=True)


def compare_half(name: str, n: int, k: int, rows: list[int]) -> None:
    count = math.ceil(ROTATED_BYTES / (2 * n * k))
    weights = [random(n, k) for _ in range(count)]
    for m in rows:
        x = random(m, k)
        took_s = graph_s([partial(F.linear, x, weights[i % count]) for i in range(max(count, 6))])
        print(f"{name:>7} {n}x{k} bf16 m={m:<5} F.linear {took_s * 1e6:8.2f} µs", flush=True)


# -- the tuner -------------------------------------------------------------------------------------


def candidates(m: int, n: int, k: int, group: int | None) -> list[LinearTiles]:
    """Candidate tiles; those in use come first."""
    from minisgl.kernels.linear.fp8.fp8_tiles import choose_tiles
    from minisgl.kernels.linear.tiles import LinearTiles, split_k, workspace_size
    from minisgl.kernels.tuning import tuning_of

    found = [choose_tiles(m, n, k, tuning_of(DEVICE), group=group)]
    block_m = next((size for size in (8, 16, 32, 64, 128) if m <= size), 128)
    blocks_k = [group] if group else [128, 256]
    shapes = [(64, 4), (128, 4), (128, 8)] if block_m <= 64 else [(64, 4), (128, 8)]
    if m > 128:
        shapes = [(128, 8), (128, 4)]
    sizes_m = [block_m] if m <= 64 else [64, 128]
    for size_m in sizes_m:
        for block_n, num_warps in shapes:
            for block_k in blocks_k:
                stage = (block_n + size_m) * block_k
                for resident in (1, 2, 3, 4):
                    deepest = min((227 * 1024 // resident - 3072) // stage, 8)
                    for stages in {deepest, min(deepest, 4)}:
                        if stages < 3 or num_warps * resident > 16:
                            continue
                        num_tiles = math.ceil(n / block_n) * math.ceil(m / size_m)
                        most = max(k // 512, 1)
                        for splits in {1, max(1, min(NUM_SMS * resident // num_tiles, most))}:
                            how = LinearTiles(
                                block_n, size_m, block_k, splits, 1, num_warps, stages,
                                prefetch=512,
                            )  # fmt: skip
                            found.append(replace(how, splits=split_k(k, how)[0]))
    return [
        how for how in dict.fromkeys(found) if workspace_size(m, n, k, how)[0] <= WORKSPACE_FLOATS
    ]


def launch(key: tuple[LinearTiles, bool, bool]) -> None:
    from minisgl.kernels.linear.fp8.fp8_gemm import linear

    how, blocks, split = key
    block, k = ((128, how.block_k), how.block_k * 16) if blocks else (None, how.block_k * 16)
    n = how.block_n * 4 if not blocks else max(how.block_n * 4, 256)
    weights = random_weights(n, k, block)
    x, how = rounded(16, k, weights.group), replace(how, splits=2 if split else 1)
    linear(x, weights, None, workspace=make_workspace(), tiles=how)


def tune(shapes: dict[str, tuple[int, int]], kinds: list[str], rows: list[int]) -> None:
    keys = {
        (replace(how, splits=1, prefetch=0), kind == "block", how.splits > 1)
        for n, k in shapes.values()
        for kind in kinds
        for m in rows
        for how in candidates(m, n, k, None if kind == "channel" else 128)
    }
    compile_all(launch, sorted(keys, key=str))
    workspace = make_workspace()
    for name, (n, k) in shapes.items():
        for kind in kinds:
            count = math.ceil(ROTATED_BYTES / (n * k))
            weights = [random_weights(n, k, BLOCKS[kind]) for _ in range(count)]
            for m in rows:
                case = Case(weights, rounded(m, k, weights[0].group), workspace)
                expected, times = case.expected(), []
                for how in candidates(m, n, k, weights[0].group):
                    try:
                        if not case.is_right(case.ours(weights[0], how), expected):
                            print("wrong:", spelled(how))
                            continue
                        call = partial(case.ours, how=how)
                        times.append((case.time_s(call), how))
                    except Exception as error:
                        print("not:", spelled(how), str(error)[:80])
                in_use_s = times[0][0]
                times.sort(key=lambda pair: pair[0])
                best = " | ".join(
                    f"{took_s * 1e6:6.2f} {case.num_bytes / took_s / 1e12:4.2f}T {spelled(how)}"
                    for took_s, how in times[:3]
                )
                line = f"{name:>7} {n}x{k} {kind:7} m={m:<4}"
                print(f"{line} now {in_use_s * 1e6:6.2f} | {best}", flush=True)


# -- a layer ---------------------------------------------------------------------------------------


def chain(model: str, kind: str, rows: list[int]) -> None:
    """All launches of a layer but attention's, whose result is always the same; many layers one
    behind the other; and the same in bfloat16."""
    from types import SimpleNamespace

    from minisgl.config import Activations
    from minisgl.kernels.linear.dense_product import DenseProduct
    from minisgl.kernels.linear.dense_product import share_kernels as share_dense
    from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
    from minisgl.kernels.linear.product import Product
    from minisgl.kernels.residual import Residual

    shapes = MODELS[model]
    layer_bytes = sum(n * k for n, k in shapes.values())
    num_layers = max(math.ceil(ROTATED_BYTES / layer_bytes), 4)
    size, inner = shapes["qkv"][1], shapes["o"][1]
    activations = Activations.TOKEN if kind == "channel" else Activations.GROUP
    fp8 = [
        {
            name: TensorCoreProduct(random_weights(n, k, BLOCKS[kind]), activations=activations)
            for name, (n, k) in shapes.items()
        }
        for _ in range(num_layers)
    ]
    half = [
        {name: DenseProduct(random(n, k) / k**0.5) for name, (n, k) in shapes.items()}
        for _ in range(num_layers)
    ]
    share_kernels([product for layer in fp8 for product in layer.values()])
    share_dense([product for layer in half for product in layer.values()])
    norm = SimpleNamespace(weight=torch.randn(size, device=DEVICE, dtype=DTYPE), eps=1e-6)

    def run(layers: list[dict[str, Product]], x: Tensor, attended: Tensor) -> None:
        residual = Residual(x.clone())
        for layer in layers:
            _, stream = layer["qkv"].of_norm(residual, norm)
            residual = layer["o"].add_to(attended, stream)
            hidden, stream = layer["gate_up"].gated_mul_of_norm(residual, norm, layer["down"])
            residual = layer["down"].add_to(hidden, stream)

    limit_us = layer_bytes / BYTES_PER_S * 1e6
    print(f"{model} {kind}: a layer of {limit_us:.2f} µs at least")
    for m in rows:
        x, attended = (random(m, width) for width in (size, inner))
        torch.cuda.synchronize()
        fp8_us, half_us = (
            graph_s([partial(run, layers, x, attended)]) / num_layers * 1e6
            for layers in (fp8, half)
        )
        print(f"  m={m}: FP8 {fp8_us:.2f} bf16 {half_us:.2f} µs a layer", flush=True)


def round_rows(rows: list[int]) -> None:
    from minisgl.kernels.elementwise import quantize as q
    from minisgl.kernels.elementwise.activation import gated_mul
    from minisgl.kernels.elementwise.norm import add_rms_norm

    size, inner = 5120, 17408
    weight = torch.randn(size, device=DEVICE, dtype=DTYPE)
    for m in rows:
        x, delta = (random(m, size) for _ in range(2))
        gate_up = random(m, 2 * inner)
        torch.cuda.synchronize()
        line = f"m={m:<5}"
        calls: dict[str, Callable[[], object]] = {
            "norm": partial(add_rms_norm, delta, x, weight, 1e-6),
            "silu": partial(gated_mul, gate_up),
        }
        for name, group in (("token", None), ("group", 128)):
            calls[f"norm {name}"] = partial(q.add_rms_norm_quantize, delta, x, weight, 1e-6, group)
            calls[f"silu {name}"] = partial(q.gated_mul_quantize, gate_up, group)
            calls[f"alone {name}"] = partial(q.quantize, x, group)
        for name, call in calls.items():
            line += f" {name} {graph_s([call] * 20) * 1e6:.2f}"
        print(line, "µs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["Qwen3-14B"])
    parser.add_argument("--only", nargs="+", help="names of products, such as qkv")
    parser.add_argument("--kinds", nargs="+", choices=sorted(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--round", action="store_true")
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    if args.round:
        round_rows(args.rows or [1, 8, 32, 256, 8192])
        return
    for model in args.models:
        print(model)
        if args.chain:
            for kind in args.kinds:
                chain(model, kind, args.rows or [1, 8, 32, 64, 128, 256])
            continue
        shapes = {
            name: shape
            for name, shape in MODELS[model].items()
            if args.only is None or name in args.only
        }
        if args.tune:
            tune(shapes, args.kinds, args.rows or [1, 16, 32, 64, 128])
            continue
        rows = args.rows or [1, 8, 32, 64, 128, 256, 1024, 8192]
        for name, (n, k) in shapes.items():
            compare_half(name, n, k, rows)
            for kind in args.kinds:
                compare(name, n, k, kind, rows)


if __name__ == "__main__":
    main()
