"""Cases of bench_kernels.py: the products of a model's layer, one by one and all of a layer, and
the experts of a mixture.

The weights of the calls together do not fit into L2, so that each is read from memory as in a
model. Of FP8 weights x is rounded before, but in a layer. `cuBLAS` has its default algorithm,
`tuned` the one that the engine chooses; `torch` is its scaled product; `dense` writes W in bfloat16
first. The rows of a step choose other experts than those of the step before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from kernel_timer import (
    COLD_BYTES,
    DEVICE,
    DTYPE,
    MODELS,
    Call,
    Case,
    Problem,
    copies,
    in_turn,
    random,
)
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.epilogue import Epilogue
from minisgl.kernels.linear.quantized import E4M3, Fp8Weights, Int4Weights, dequantize
from minisgl.kernels.moe.mxfp4 import EXPONENT_BIAS, Mxfp4Experts, Mxfp4Weights, packed_scales
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
from minisgl.kernels.moe.reference import ByRouter, ExpertWeights, Routing, topk_softmax
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import tuning_of

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.linear.product import Product
    from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace
    from minisgl.kernels.linear.weight_only.weights import WeightWords

Weight = TypeVar("Weight")
GROUP, BLOCK = 128, (128, 128)  # of INT4, and of FP8
# Bytes of a weight, its scales included.
SIZES = {
    "bf16": 2.0,
    "fp8-channel": 1.0,
    "fp8-block": 1.0,
    "int4": 0.5 + 4 / GROUP,  # of experts 2 / GROUP
    "int4-zeros": 0.5 + 4 / GROUP,
    "e4m3": 1.0 + 4 / GROUP,  # x is not rounded
    "mxfp4": 0.5 + 2 / 32,
}
WORKSPACE_FLOATS, SEMAPHORES = 64 << 20, 1 << 20
MOST_OURS = 256  # rows of x, of our kernel with dense weights
NUM_CALLS = 12  # of a graph, or more


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a model. n counts both halves of a gated one."""

    name: str
    n: int
    k: int
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.n}x{self.k}"

    @property
    def size(self) -> int:
        return self.n * self.k

    def problem(
        self,
        format: str,
        m: int,
        weights: Sequence[Weight],
        ours: Callable[[Weight, LinearTiles | None], Tensor],
        others: Mapping[str, Callable[[], Sequence[Call]]],
        **more: Any,
    ) -> Problem:
        """Of m rows: W, x and y are read or written once. ours: with some tiles, or those in use;
        others: what it is compared with."""

        def tiled(tiles: LinearTiles | None = None) -> list[Call]:
            return in_turn(lambda weight: ours(weight, tiles), weights, NUM_CALLS)

        in_fp8, outputs = format.startswith("fp8"), self.n // 2 if self.gated else self.n
        moved = m * (self.k * (1 if in_fp8 else 2) + outputs * 2)
        return Problem(
            calls={"minisgl": tiled, **others},
            num_bytes=self.size * SIZES[format] + moved,
            operations=2.0 * m * self.size,
            in_fp8=in_fp8,
            tiled=tiled,
            **more,
        )


def shapes_of(model: str) -> list[Shape]:
    config = MODELS[model]
    hidden, heads, head_dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    inner, qkv = config["intermediate_size"], heads + 2 * config["num_key_value_heads"]
    return [
        Shape("qkv", qkv * head_dim, hidden),
        Shape("o", hidden, heads * head_dim),
        Shape("gate_up", 2 * inner, hidden),
        Shape("gated", 2 * inner, hidden, gated=True),
        Shape("down", hidden, inner),
        Shape("head", config["vocab_size"], hidden),
    ]


# -- weights ---------------------------------------------------------------------------------------


def fp8_weights(*shape: int, blocks: bool) -> Fp8Weights:
    """W [..., n, k] as x8 times scales."""
    *first, n, k = shape
    scales = (-(-n // BLOCK[0]), -(-k // BLOCK[1])) if blocks else (n,)
    scale = (0.5 + torch.rand(*first, *scales, device=DEVICE)) / (64 * k**0.5)
    return Fp8Weights((random(*shape) * 64).to(E4M3), scale, BLOCK if blocks else None)


def packed_numbers(*shape: int) -> Tensor:
    """Random numbers of four bits, four in an element."""
    size = (*shape[:-1], shape[-1] // 4)
    return torch.randint(-(1 << 15), 1 << 15, size, device=DEVICE, dtype=torch.int16)


def int4_weights(*shape: int, zeros: bool = False) -> Int4Weights:
    *first, n, k = shape
    groups = (*first, k // GROUP, n)
    scale = (0.5 + torch.rand(groups, device=DEVICE)) / (5 * k**0.5)
    zero = torch.randint(0, 16, groups, device=DEVICE, dtype=torch.uint8) if zeros else None
    return Int4Weights(packed_numbers(*shape), scale.half(), zero)


def mxfp4_weights(*shape: int) -> Mxfp4Weights:
    *first, k = shape
    exponents = torch.randint(-4, 1, (*first, k // 32), device=DEVICE)
    exponents += EXPONENT_BIAS - k.bit_length() // 2
    return Mxfp4Weights(packed_numbers(*shape), packed_scales(exponents))


def make_workspace() -> LinearWorkspace:
    from minisgl.kernels.linear.tiles import LinearWorkspace

    return LinearWorkspace(
        partials=torch.empty(WORKSPACE_FLOATS, device=DEVICE),
        semaphores=torch.zeros(SEMAPHORES, dtype=torch.int32, device=DEVICE),
    )


# -- single products -------------------------------------------------------------------------------


def cublas(gated: bool, x: Tensor, weight: Tensor) -> Tensor:
    from minisgl.kernels.elementwise.activation import gated_mul

    y = F.linear(x, weight)
    return gated_mul(y) if gated else y


def dense_problem(shape: Shape, m: int) -> Problem:
    from minisgl.kernels.linear.cublaslt import MAX_ROWS, load_products
    from minisgl.kernels.linear.dense_gemm import linear
    from minisgl.kernels.linear.dense_tiles import choose_tiles

    weights = copies(lambda: random(shape.n, shape.k) / shape.k**0.5, 2 * shape.size)
    x, workspace, epilogue = random(m, shape.k), make_workspace(), Epilogue(shape.gated)

    def ours(weight: Tensor, tiles: LinearTiles | None) -> Tensor:
        return linear(x, weight, epilogue=epilogue, workspace=workspace, tiles=tiles)

    def tuned() -> list[Call]:
        products = load_products(DTYPE, DEVICE)
        assert products is not None, "cuBLASLt is unavailable"
        products.tune(weights)
        assert products(x, weights[0]) is not None, "is that of cuBLAS: W is small"
        return in_turn(partial(products, x), weights, NUM_CALLS)

    others = {"cuBLAS": lambda: in_turn(partial(cublas, shape.gated, x), weights, NUM_CALLS)}
    others |= {} if shape.gated or m > MAX_ROWS else {"tuned": tuned}
    expected, gated = cublas(shape.gated, x, weights[0]), shape.gated
    tiles = partial(choose_tiles, m, shape.n, shape.k, tuning_of(DEVICE), gated=gated)
    problem = shape.problem("bf16", m, weights, ours, others, expected=expected, tiles=tiles)
    return problem if m <= MOST_OURS else replace(problem, calls=others, tiled=None)


def fp8_problem(shape: Shape, m: int, *, blocks: bool) -> Problem:
    from minisgl.kernels.elementwise.quantize import quantize
    from minisgl.kernels.linear.fp8 import scaled_mm
    from minisgl.kernels.linear.fp8.fp8_gemm import linear
    from minisgl.kernels.linear.fp8.fp8_tiles import choose_tiles

    n, k = shape.n, shape.k
    weights = copies(partial(fp8_weights, n, k, blocks=blocks), n * k)
    group, workspace = weights[0].group, make_workspace()
    x = quantize(random(m, k), group)
    scale = x.scale[:, None] if group is None else x.scale.repeat_interleave(group, 1)[:, :k]

    def ours(weight: Fp8Weights, tiles: LinearTiles | None) -> Tensor:
        return linear(x, weight, None, workspace=workspace, tiles=tiles)

    def by_torch() -> list[Call]:
        assert scaled_mm.takes(x, weights[0], None), "torch does not compute this product"
        return in_turn(lambda weight: scaled_mm.linear(x, weight, None), weights, NUM_CALLS)

    tiles = partial(choose_tiles, m, n, k, tuning_of(DEVICE), group=group)
    expected = (x.data.float() * scale) @ dequantize(weights[0]).float().T
    known = {"expected": expected, "tolerance": 0.004, "tiles": tiles}
    return shape.problem("fp8-block", m, weights, ours, {"torch": by_torch}, **known)


def weight_only_problem(shape: Shape, m: int, format: str) -> Problem:
    from minisgl.kernels.linear.weight_only import weight_only_tiles
    from minisgl.kernels.linear.weight_only.weight_only_gemm import dequantize, linear
    from minisgl.kernels.linear.weight_only.weights import values

    n, k = shape.n, shape.k
    weights = copies(partial(make_words, format, n, k), shape.size * SIZES[format])
    x, workspace, epilogue = random(m, k), make_workspace(), Epilogue(shape.gated)
    first = weights[0]

    def ours(words: WeightWords, tiles: LinearTiles | None) -> Tensor:
        return linear(x, words, epilogue=epilogue, workspace=workspace, tiles=tiles)

    def dense() -> list[Call]:
        room = torch.empty(n * k, device=DEVICE, dtype=DTYPE)
        return in_turn(lambda words: cublas(shape.gated, x, dequantize(words, room)), weights, 4)

    sizes, gated = (m, n, k, first.span, first.bits, tuning_of(DEVICE)), shape.gated
    tiles = partial(weight_only_tiles.choose_tiles, *sizes, gated=gated)
    others, expected = {"dense": dense} if m >= 128 else {}, cublas(gated, x, values(first, DTYPE))
    return shape.problem(format, m, weights, ours, others, expected=expected, tiles=tiles)


def make_words(format: str, n: int, k: int) -> WeightWords:
    from minisgl.kernels.linear.weight_only.weights import e4m3_words, int4_words

    if format == "e4m3":
        words = e4m3_words(*fp8_weights(n, k, blocks=True), DTYPE)
        assert words is not None
        return words
    return int4_words(*int4_weights(n, k, zeros=format == "int4-zeros"), DTYPE)


def linear_problem(shape: Shape, format: str, m: int) -> Problem:
    if format == "bf16":
        return dense_problem(shape, m)
    if format.startswith("fp8"):
        return fp8_problem(shape, m, blocks=format == "fp8-block")
    return weight_only_problem(shape, m, format)


# -- all products of a layer -----------------------------------------------------------------------


def layer_problem(model: str, format: str, m: int) -> Problem:
    """All launches of a layer but those of attention, whose result is always the same; many layers
    one behind the other."""
    from minisgl.kernels.linear import dense_product
    from minisgl.kernels.linear.fp8 import fp8_product

    shapes = [shape for shape in shapes_of(model) if shape.name not in ("gated", "head")]
    kinds = {"fp8-channel": Activations.TOKEN, "fp8-block": Activations.GROUP}

    def product(shape: Shape) -> Product:
        if format == "bf16":
            return dense_product.DenseProduct(random(shape.n, shape.k) / shape.k**0.5)
        weights = fp8_weights(shape.n, shape.k, blocks=format == "fp8-block")
        return fp8_product.TensorCoreProduct(weights, activations=kinds[format])

    num_bytes = sum(shape.size for shape in shapes) * SIZES[format]
    num_layers = max(-int(-COLD_BYTES // num_bytes), 4)
    layers = [{shape.name: product(shape) for shape in shapes} for _ in range(num_layers)]
    products = [product for layer in layers for product in layer.values()]
    for share in (dense_product.share_kernels, fp8_product.share_kernels, dense_product.tune):
        share(products)
    hidden, width = shapes[0].k, shapes[1].k
    norm = SimpleNamespace(weight=torch.randn(hidden, device=DEVICE, dtype=DTYPE), eps=1e-6)
    x, attended = random(m, hidden), random(m, width)

    def run() -> None:
        residual = Residual(x.clone())
        for layer in layers:
            _, stream = layer["qkv"].of_norm(residual, norm)
            residual = layer["o"].add_to(attended, stream)
            rows, stream = layer["gate_up"].gated_mul_of_norm(residual, norm, layer["down"])
            residual = layer["down"].add_to(rows, stream)

    return Problem(
        calls={"minisgl": lambda: [run]},
        num_bytes=num_bytes,
        operations=sum(2.0 * m * shape.size for shape in shapes),
        in_fp8=format != "bf16",
        repeats=len(layers),
    )


# -- experts ---------------------------------------------------------------------------------------

Experts = ExpertWeights | Fp8Experts | Int4Experts | Mxfp4Experts
NUM_STEPS = 12


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    hidden_size: int
    size: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: str) -> ExpertSizes:
        config = MODELS[model]
        size = config.get("moe_intermediate_size", config["intermediate_size"])
        count = config.get("num_experts") or config["num_local_experts"]
        return cls(config["hidden_size"], size, count, config["num_experts_per_tok"])

    def weights(self, format: str) -> Experts:
        inner = (self.num_experts, 2 * self.size, self.hidden_size)
        outer = (self.num_experts, self.hidden_size, self.size)
        if format == "int4":
            return Int4Experts(int4_weights(*inner), int4_weights(*outer))
        if format == "mxfp4":
            return Mxfp4Experts(mxfp4_weights(*inner), mxfp4_weights(*outer))
        if format == "bf16":
            scale = self.hidden_size**0.5, self.size**0.5
            return ExpertWeights(random(*inner) / scale[0], random(*outer) / scale[1])
        blocks = format == "fp8-block"
        both = (fp8_weights(*shape, blocks=blocks) for shape in (inner, outer))
        return Fp8Experts(*both, activations=Activations.GROUP if blocks else Activations.TOKEN)


def experts_problem(sizes: ExpertSizes, format: str, m: int) -> Problem:
    from minisgl.kernels.moe.expert_tiles import choose_tiles
    from minisgl.kernels.moe.fused_experts import fused_experts

    weights, routing = sizes.weights(format), Routing(sizes.top_k, normalize=True)
    rows = [random(m, sizes.hidden_size) for _ in range(NUM_STEPS)]
    logits = [random(m, sizes.num_experts) for _ in rows]
    chosen = sum(topk_softmax(each, routing)[0].unique().numel() for each in logits) / NUM_STEPS
    num_weights = 3 * sizes.hidden_size * sizes.size
    size = SIZES[format] - (2 / GROUP if format == "int4" else 0)
    tuning, top_k = tuning_of(DEVICE), sizes.top_k

    def tiled(tiles: Any = None) -> list[Call]:
        def ours(x: Tensor, logits: Tensor) -> object:
            return fused_experts(x, ByRouter(logits, routing), weights, tiles=tiles)[0]

        return [partial(ours, *step) for step in zip(rows, logits, strict=True)]

    return Problem(
        calls={"minisgl": tiled},
        num_bytes=chosen * num_weights * size + 4 * m * sizes.hidden_size,
        operations=2.0 * m * top_k * num_weights,
        in_fp8=format.startswith("fp8"),
        tiles=lambda: choose_tiles(m, weights, top_k, DTYPE, tuning),
        tiled=tiled,
    )


# -- tables ----------------------------------------------------------------------------------------

LINEAR_MODELS = ("Qwen3-14B", "Qwen3-32B", "Qwen3-0.6B", "Llama-3.1-8B")
LINEAR_FORMATS = ("bf16", "fp8-channel", "fp8-block", "int4", "int4-zeros", "e4m3")
LAYER_FORMATS = ("bf16", "fp8-channel", "fp8-block")
EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
EXPERTS = {
    "Qwen3-30B-A3B": ("bf16", "fp8-channel", "fp8-block", "int4", "mxfp4"),
    "gpt-oss-20b": ("bf16", "mxfp4"),
    "gpt-oss-120b": ("mxfp4",),
}


def linear_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    for model, format in itertools.product(LINEAR_MODELS, LINEAR_FORMATS):
        for shape in shapes_of(model):
            if (format != "bf16" and shape.name == "head") or (format[:3] == "fp8" and shape.gated):
                continue
            for m in rows or (1, 8, 16, 32, 64, 128, 256, 1024, 8192):
                name = f"{model} {shape} {format}, {m} rows"
                yield Case(name, partial(linear_problem, shape, format, m))


def layer_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    rows = rows or (1, 8, 32, 64, 128, 256)
    for model, format, m in itertools.product(LINEAR_MODELS, LAYER_FORMATS, rows):
        yield Case(f"{model} {format}, {m} rows", partial(layer_problem, model, format, m))


def expert_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    for model, formats in EXPERTS.items():
        for format, m in itertools.product(formats, rows or EXPERT_ROWS):
            make = partial(experts_problem, ExpertSizes.of(model), format, m)
            yield Case(f"{model} {format}, {m} rows", make)
