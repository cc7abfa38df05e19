"""Times the experts of an MoE layer on a GPU, routing included.

python scripts/bench/bench_experts.py                 # the tiles in use
python scripts/bench/bench_experts.py --tune          # candidates, too; the best three of each kind
python scripts/bench/bench_experts.py --weights fp8-block
python scripts/bench/bench_experts.py --model gpt-oss-20b --weights mxfp4

Each figure is a median over replays of a CUDA graph of several calls, whose rows choose other
experts, so that their weights come from memory as in a model. `limit` is the bytes of the experts
that were chosen, and of the rows, at 4.28 TB/s or the operations at 800 TFLOP/s, in FP8 1,600, the
larger.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from graph_timer import graph_s
from linear_cases import BYTES_PER_S, DEVICE, OPERATIONS_PER_S, compile_all, random
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import E4M3, Fp8Weights, Int4Weights
from minisgl.kernels.moe.mxfp4 import EXPONENT_BIAS, Mxfp4Experts, Mxfp4Weights, packed_scales
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
from minisgl.kernels.moe.reference import ByRouter, ExpertWeights, Routing, topk_softmax

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.tuning import ExpertTiles, FewTiles, ManyTiles, PairTiles


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's experts."""

    hidden_size: int
    size: int
    num_experts: int
    top_k: int

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k, normalize=True)

    @property
    def num_weights(self) -> int:
        return 3 * self.hidden_size * self.size


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
}
MAX_FEW_ROWS = 8
NUM_CALLS = 12
GROUP = 128  # of INT4
FORMATS = ("bf16", "fp8-channel", "fp8-block", "int4", "mxfp4")
Weights = ExpertWeights | Fp8Experts | Int4Experts | Mxfp4Experts


@dataclass(frozen=True)
class ExpertsProblem:
    """Several steps of so many rows."""

    shape: Shape
    weights: Weights
    rows: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def of(cls, num_rows: int, shape: Shape, weights: Weights) -> ExpertsProblem:
        rows = [random(num_rows, shape.hidden_size) for _ in range(NUM_CALLS)]
        logits = [random(num_rows, shape.num_experts) for _ in rows]
        return cls(shape, weights, rows, logits)

    @property
    def num_rows(self) -> int:
        return len(self.rows[0])

    @property
    def limit_s(self) -> float:
        num_weights, routing = self.shape.num_weights, self.shape.routing
        chosen = [topk_softmax(logits, routing)[0].unique().numel() for logits in self.logits]
        is_fp8 = isinstance(self.weights, Fp8Experts)
        sizes = {Fp8Experts: 1, Int4Experts: 0.5 + 2 / GROUP, Mxfp4Experts: 0.5 + 2 / 32}
        weight_bytes = sizes.get(type(self.weights), 2)
        num_bytes = sum(chosen) / len(chosen) * num_weights * weight_bytes
        num_bytes += 4 * self.num_rows * self.shape.hidden_size
        operations = 2 * self.num_rows * routing.top_k * num_weights
        rate = OPERATIONS_PER_S * (2 if is_fp8 else 1)
        return max(num_bytes / BYTES_PER_S, operations / rate)

    def fused_experts(
        self, x: Tensor, logits: Tensor, how: FewTiles | PairTiles | ManyTiles | None
    ) -> Tensor:
        from minisgl.kernels.moe import fp8_experts, fused_experts, int4_experts, mxfp4_experts

        choice = ByRouter(logits, self.shape.routing)
        if isinstance(self.weights, Mxfp4Experts):
            return mxfp4_experts.fused_experts(x, choice, self.weights, tiles=how)[0]
        if isinstance(self.weights, Int4Experts):
            return int4_experts.fused_experts(x, choice, self.weights, tiles=how)[0]
        if isinstance(self.weights, Fp8Experts):
            return fp8_experts.fused_experts(x, choice, self.weights, tiles=how)[0]
        return fused_experts.fused_experts(x, choice, self.weights, tiles=how)[0]

    def time_s(self, call: Callable[[Tensor, Tensor], object]) -> float:
        return graph_s([partial(call, *pair) for pair in zip(self.rows, self.logits, strict=True)])

    def time_of(self, how: FewTiles | PairTiles | ManyTiles | None) -> float:
        return self.time_s(partial(self.fused_experts, how=how))

    def is_right(self, how: FewTiles | PairTiles | ManyTiles) -> bool:
        out, wanted = (
            self.fused_experts(self.rows[0], self.logits[0], tiles) for tiles in (how, None)
        )
        return bool((out - wanted).norm() < 0.01 * wanted.norm())


def make_weights(format: str, shape: Shape) -> Weights:
    num, hidden_size, size = shape.num_experts, shape.hidden_size, shape.size
    inner, outer = (num, 2 * size, hidden_size), (num, hidden_size, size)
    if format == "int4":
        return Int4Experts(int4_weights(*inner), int4_weights(*outer))
    if format == "mxfp4":
        return Mxfp4Experts(mxfp4_weights(*inner), mxfp4_weights(*outer))
    if format != "bf16":
        blocks = format == "fp8-block"
        return Fp8Experts(
            fp8_weights(*inner, blocks),
            fp8_weights(*outer, blocks),
            activations=Activations.GROUP if blocks else Activations.TOKEN,
        )
    return ExpertWeights(random(*inner) / hidden_size**0.5, random(*outer) / size**0.5)


def fp8_weights(num: int, n: int, k: int, blocks: bool) -> Fp8Weights:
    shape = (-(-n // 128), -(-k // 128)) if blocks else (n,)
    scale = (0.5 + torch.rand(num, *shape, device=DEVICE)) / (64 * k**0.5)
    data = (random(num, n, k) * 64).to(E4M3)
    return Fp8Weights(data, scale, (128, 128) if blocks else None)


def int4_weights(num: int, n: int, k: int) -> Int4Weights:
    data = torch.randint(-(1 << 15), 1 << 15, (num, n, k // 4), device=DEVICE)
    scale = (0.5 + torch.rand(num, k // GROUP, n, device=DEVICE)) / (5 * k**0.5)
    return Int4Weights(data.to(torch.int16), scale.half(), None)


def mxfp4_weights(num: int, n: int, k: int) -> Mxfp4Weights:
    data = torch.randint(-(1 << 15), 1 << 15, (num, n, k // 4), device=DEVICE)
    exponents = torch.randint(-4, 1, (num, n, k // 32), device=DEVICE)
    exponents += EXPONENT_BIAS - k.bit_length() // 2
    return Mxfp4Weights(data.to(torch.int16), packed_scales(exponents))


def choose(num_rows: int, shape: Shape, weights: Weights) -> FewTiles | PairTiles | ManyTiles:
    from minisgl.kernels.moe.expert_tiles import (
        choose_fp8_tiles,
        choose_int4_tiles,
        choose_mxfp4_tiles,
        choose_tiles,
    )
    from minisgl.kernels.tuning import tuning_of

    tuning = tuning_of(DEVICE)
    if isinstance(weights, Fp8Experts):
        return choose_fp8_tiles(num_rows, weights, shape.top_k, tuning)
    if isinstance(weights, Mxfp4Experts):
        return choose_mxfp4_tiles(num_rows, weights, shape.top_k, torch.bfloat16, tuning)
    if isinstance(weights, Int4Experts):
        return choose_int4_tiles(num_rows, weights, shape.top_k, torch.bfloat16, tuning)
    return choose_tiles(num_rows, weights, shape.top_k, tuning)


# -- the tuner -------------------------------------------------------------------------------------


def few_candidates() -> Iterator[FewTiles]:
    from minisgl.kernels.tuning import ExpertTiles, FewTiles

    plain = FewTiles()
    yield plain
    for block_n in (16, 32, 64):
        for block_k, num_stages in ((64, 6), (128, 3), (128, 4), (128, 6), (256, 3), (256, 4)):
            if 2 * block_n * block_k * 2 * num_stages <= 200 << 10:
                yield replace(plain, inner=ExpertTiles(block_n, 16, block_k, 4, num_stages))
    for block_n, num_warps in [(2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8), (16, 16)]:
        yield replace(plain, block_n=block_n, num_warps=num_warps)


def many_candidates(num_rows: int, shape: Shape, format: str) -> list[ExpertTiles]:
    from minisgl.kernels.tuning import ExpertTiles

    pairs = num_rows * shape.top_k / shape.num_experts
    if format == "mxfp4":
        return mxfp4_candidates([8, 16]) if pairs <= 12 else mxfp4_many_candidates(pairs)
    itemsize = 2 if format == "bf16" else 1
    depths = ((64, 3), (64, 4), (64, 6), (128, 3), (128, 4))
    if format != "bf16":
        depths = ((128, 3), (128, 4), (128, 6))

    sizes = [16, 32] if pairs < 8 else [16, 32, 64, 128] if pairs < 96 else [64, 128, 256]
    found = []
    for block_m in sizes:
        for block_n in (64, 128):
            warps = 8 if block_n * block_m >= 1 << 14 else 4
            for block_k, num_stages in depths:
                # The gated product has two tiles of W in flight.
                if (2 * block_n + block_m) * block_k * itemsize * num_stages <= 220 << 10:
                    places = 1 if pairs <= 16 else 2 if pairs <= 96 else 8
                    found.append(ExpertTiles(block_n, block_m, block_k, warps, num_stages, places))
    return found


def many_variants(num_rows: int, shape: Shape, weights: Weights, format: str) -> list[ManyTiles]:
    """The tiles in use with those of one of both products changed."""
    from minisgl.kernels.tuning import ManyTiles

    found = many_candidates(num_rows, shape, format)
    now = choose(num_rows, shape, weights)
    if not isinstance(now, ManyTiles):
        now = ManyTiles(found[0], found[0])
    return [now, *(replace(now, inner=t) for t in found), *(replace(now, outer=t) for t in found)]


def pair_candidates(num_rows: int, shape: Shape, weights: Weights) -> list[PairTiles]:
    """The tiles in use with those of one of both products changed; others are the plain ones."""
    from minisgl.kernels.tuning import PairTiles, tuning_of

    if not isinstance(weights, Mxfp4Experts):
        return []
    now = choose(num_rows, shape, weights)
    if not isinstance(now, PairTiles):
        now = tuning_of(DEVICE).mxfp4_pair_tiles
    found = mxfp4_candidates([8])
    return [now, *(replace(now, inner=t) for t in found), *(replace(now, outer=t) for t in found)]


def mxfp4_candidates(members: list[int]) -> list[ExpertTiles]:
    """Tiles of a few rows of x, in which each warp has other columns."""
    from minisgl.kernels.tuning import ExpertTiles

    return [
        ExpertTiles(block_n, block_m, 64 * num_warps * chunks, num_warps, num_stages)
        for block_n in (16, 32)
        for block_m in members
        for num_warps in (1, 2, 4)
        for chunks in (1, 2, 3)
        for num_stages in (2, 3, 4)
        if num_warps * chunks <= 8
    ]


def mxfp4_many_candidates(pairs: float) -> list[ExpertTiles]:
    """Tiles that a program's warps multiply together. Of many rows of x, as few tiles of W are
    unpacked again as the registers have room for sums."""
    from minisgl.kernels.tuning import ExpertTiles

    found = []
    for block_n, block_m, num_warps in itertools.product((64, 128), (32, 64, 128, 256), (4, 8)):
        # Numbers of a thread, in the sums of both halves of the gated product.
        sums = 2 * block_n * block_m // (32 * num_warps)
        if not 32 <= sums <= 256 or block_m > 4 * pairs:
            continue
        for num_stages in (3, 4, 6):
            for places in {1, 2} if pairs < 96 else {4, 16}:
                found.append(ExpertTiles(block_n, block_m, 64, num_warps, num_stages, places))
    return found


def launch(how: FewTiles | PairTiles | ManyTiles, format: str, shape: Shape) -> None:
    x, logits = random(2, shape.hidden_size), random(2, shape.num_experts)
    problem = ExpertsProblem(shape, make_weights(format, shape), [x], [logits])
    problem.fused_experts(x, logits, how)


def tune(all_rows: list[int], format: str, shape: Shape) -> None:
    weights = make_weights(format, shape)
    choices: dict[int, list[FewTiles | PairTiles | ManyTiles]] = {
        num_rows: [
            *(few_candidates() if format == "bf16" and num_rows <= MAX_FEW_ROWS else []),
            *(pair_candidates(num_rows, shape, weights) if num_rows <= MAX_FEW_ROWS else []),
            *many_variants(num_rows, shape, weights, format),
        ]
        for num_rows in all_rows
    }
    variants = list(dict.fromkeys(how for hows in choices.values() for how in hows))
    compile_all(partial(launch, format=format, shape=shape), variants)
    for num_rows, hows in choices.items():
        problem = ExpertsProblem.of(num_rows, shape, weights)
        in_use_s, limit_s = problem.time_of(None), problem.limit_s
        print(f"rows={num_rows} limit {limit_s * 1e6:.1f} µs, in use {in_use_s * 1e6:.1f}")
        times = []
        for how in hows:
            try:
                if problem.is_right(how):
                    times.append((problem.time_of(how), how))
                else:
                    print("  wrong:", how)
            except Exception as error:
                print("  not:", how, str(error)[:80])
        for kind, changed in kinds_of(times):
            for took_s, how in sorted(changed, key=lambda pair: pair[0])[:3]:
                print(f"  {kind} {took_s * 1e6:7.1f} {spelled(how, kind)}", flush=True)


Timed = list[tuple[float, "FewTiles | PairTiles | ManyTiles"]]


def kinds_of(times: Timed) -> Iterator[tuple[str, Timed]]:
    from minisgl.kernels.tuning import FewTiles, ManyTiles, PairTiles

    few = [(took_s, how) for took_s, how in times if isinstance(how, FewTiles)]
    pairs = [(took_s, how) for took_s, how in times if isinstance(how, PairTiles)]
    many = [(took_s, how) for took_s, how in times if isinstance(how, ManyTiles)]
    if few:
        plain = FewTiles()
        yield "few inner", [(t, how) for t, how in few if replace(plain, inner=how.inner) == how]
        yield "few outer", [(t, how) for t, how in few if how.inner == plain.inner]
    if pairs:
        first = pairs[0][1]
        yield "pair inner", [(t, how) for t, how in pairs if how.outer == first.outer]
        yield "pair outer", [(t, how) for t, how in pairs if how.inner == first.inner]
    if many:
        now = many[0][1]
        yield "inner", [(t, how) for t, how in many if how.outer == now.outer]
        yield "outer", [(t, how) for t, how in many if how.inner == now.inner]


def spelled(how: FewTiles | PairTiles | ManyTiles, kind: str) -> str:
    from minisgl.kernels.tuning import FewTiles

    t = how.inner
    if isinstance(how, FewTiles) and kind == "few outer":
        return f"{how.block_n}x{how.block_k} w{how.num_warps}"
    if not isinstance(how, FewTiles) and kind in ("outer", "pair outer"):
        t = how.outer
    return f"{t.block_n}x{t.block_m}x{t.block_k} w{t.num_warps} st{t.num_stages} p{t.places}"


# -- what is in use --------------------------------------------------------------------------------


def compare(all_rows: list[int], format: str, shape: Shape) -> None:
    weights = make_weights(format, shape)
    for num_rows in all_rows:
        problem = ExpertsProblem.of(num_rows, shape, weights)
        limit_s, took_s = problem.limit_s, problem.time_of(None)
        print(
            f"rows={num_rows:<6} limit {limit_s * 1e6:8.1f} µs, {took_s * 1e6:8.1f} "
            f"({limit_s / took_s:.0%})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-30B-A3B")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    shape = SHAPES[args.model]
    for format in args.weights:
        print(format)
        if args.tune:
            tune(args.rows or [1, 2, 4, 8, 32, 256, 1024, 4096, 16384], format, shape)
        else:
            rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384]
            compare(args.rows or rows, format, shape)


if __name__ == "__main__":
    main()
