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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from kernel_timer import (
    COLD_BYTES,
    DEVICE,
    DTYPE,
    MODELS,
    Call,
    Case,
    Config,
    Problem,
    copies,
    in_turn,
    model_cases,
    random,
)
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.fp8_rows import Fp8Rows
from minisgl.kernels.linear.epilogue import Epilogue
from minisgl.kernels.linear.nvfp4 import Nvfp4Weights, pack_scales
from minisgl.kernels.linear.quantized import E4M3, Fp8Weights, Int4Weights
from minisgl.kernels.moe.mxfp4 import EXPONENT_BIAS, Mxfp4Experts, Mxfp4Weights, packed_scales
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.kernels.moe.reference import ByRouter, ExpertWeights, Routing, topk_softmax
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import tuning_of

if TYPE_CHECKING:  # --help works without Triton
    from minisgl.kernels.linear.product import Product
    from minisgl.kernels.linear.tiles import LinearTiles
    from minisgl.kernels.linear.weight_only.weights import WeightWords

GROUP, BLOCK = 128, (128, 128)  # of INT4, and of FP8
# Bytes of a weight, its scales included.
SIZES = {
    "bf16": 2.0,
    "fp8-channel": 1.0,
    "fp8-block": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 4 / GROUP,  # of experts 2 / GROUP
    "int4-zeros": 0.5 + 4 / GROUP,
    "e4m3": 1.0 + 4 / GROUP,  # x is not rounded
    "mxfp4": 0.5 + 2 / 32,
    "nvfp4": 0.5 + 1 / 16,
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
        weights: Sequence[Any],
        ours: Callable[..., Tensor],
        others: Mapping[str, Callable[[], Sequence[Call]]],
        tiles: Callable[..., LinearTiles],
        **more: Any,
    ) -> Problem:
        """Of m rows: W, x and y are read or written once. ours: of a weight; others: what it is
        compared with; tiles: those in use, of m, n and k."""
        from minisgl.kernels.linear.tiles import LinearWorkspace

        workspace = LinearWorkspace.allocate([(WORKSPACE_FLOATS, SEMAPHORES)], DEVICE)

        def tiled(tiles: LinearTiles | None = None) -> list[Call]:
            return in_turn(partial(ours, workspace=workspace, tiles=tiles), weights, NUM_CALLS)

        in_fp8, outputs = format in MAKE_FP8, self.n // 2 if self.gated else self.n
        moved = m * (self.k * (1 if in_fp8 else 2) + outputs * 2)
        return Problem(
            calls={"minisgl": tiled, **others},
            num_bytes=self.size * SIZES[format] + moved,
            operations=2.0 * m * self.size,
            in_fp8=in_fp8,
            tiles=partial(tiles, m, self.n, self.k),
            tiled=tiled,
            **more,
        )


def shapes_of(config: Config) -> list[Shape]:
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


def dense_weights(*shape: int) -> Tensor:
    return random(*shape) / shape[-1] ** 0.5


def fp8_weights(*shape: int, blocks: bool) -> Fp8Weights:
    """W [..., n, k] as x8 times scales."""
    *first, n, k = shape
    scales = (-(-n // BLOCK[0]), -(-k // BLOCK[1])) if blocks else (n,)
    scale = (0.5 + torch.rand(*first, *scales, device=DEVICE)) / (64 * k**0.5)
    return Fp8Weights((random(*shape) * 64).to(E4M3), scale, BLOCK if blocks else None)


def int8_weights(*shape: int) -> Fp8Weights:
    data = (random(*shape) * 32).clamp(-127, 127).to(torch.int8)
    return Fp8Weights(data, (0.5 + torch.rand(shape[:-1], device=DEVICE)) / (32 * shape[-1] ** 0.5))


# The weights that are multiplied with rows of 8 bits, by their format.
MAKE_FP8: dict[str, Callable[..., Fp8Weights]] = {
    "fp8-channel": partial(fp8_weights, blocks=False),
    "fp8-block": partial(fp8_weights, blocks=True),
    "int8": int8_weights,
}


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


def nvfp4_weights(*shape: int, is_tiled: bool) -> Nvfp4Weights:
    *first, k = shape
    scales = torch.randint(8, 64, (*first, k // 16), device=DEVICE)
    factor = torch.full(tuple(first), k**-0.5 / 64, device=DEVICE)
    return Nvfp4Weights(packed_numbers(*shape), pack_scales(scales), factor, is_tiled)


# -- single products -------------------------------------------------------------------------------


def cublas(gated: bool, x: Tensor, weight: Tensor) -> Tensor:
    from minisgl.kernels.elementwise.activation import gated_mul

    y = F.linear(x, weight)
    return gated_mul(y) if gated else y


def dense_problem(shape: Shape, m: int) -> Problem:
    from minisgl.kernels.linear.cublaslt import MAX_ROWS, load_products
    from minisgl.kernels.linear.dense_gemm import linear
    from minisgl.kernels.linear.dense_tiles import choose_tiles

    weights = copies(partial(dense_weights, shape.n, shape.k), 2 * shape.size)
    x, gated = random(m, shape.k), shape.gated

    def tuned() -> list[Call]:
        products = load_products(DTYPE, DEVICE)
        assert products is not None, "cuBLASLt is unavailable"
        products.tune(weights)
        assert products(x, weights[0]) is not None, "is that of cuBLAS: W is small"
        return in_turn(partial(products, x), weights, NUM_CALLS)

    others = {"cuBLAS": lambda: in_turn(partial(cublas, gated, x), weights, NUM_CALLS)}
    others |= {} if gated or m > MAX_ROWS else {"tuned": tuned}
    problem = shape.problem(
        "bf16",
        m,
        weights,
        partial(linear, x, epilogue=Epilogue(gated)),
        others,
        partial(choose_tiles, tuning=tuning_of(DEVICE), gated=gated),
        expected=cublas(gated, x, weights[0]),
    )
    return problem if m <= MOST_OURS else replace(problem, calls=others, tiled=None)


def int8_by_torch(x: Fp8Rows, weights: Fp8Weights) -> Tensor:
    """Of more than 16 rows."""
    sums = torch._int_mm(x.data, weights.data.T)
    return (sums * x.scale[:, None] * weights.scale).to(x.dtype)


def fp8_problem(shape: Shape, m: int, format: str) -> Problem:
    from minisgl.kernels.elementwise.quantize import quantize
    from minisgl.kernels.linear.fp8 import scaled_mm
    from minisgl.kernels.linear.fp8.fp8_gemm import linear
    from minisgl.kernels.linear.fp8.fp8_tiles import choose_tiles

    n, k = shape.n, shape.k
    weights = copies(partial(MAKE_FP8[format], n, k), n * k)
    group = weights[0].group
    x = quantize(random(m, k), group, dtype=weights[0].data.dtype)
    scale = x.scale[:, None] if group is None else x.scale.repeat_interleave(group, 1)[:, :k]

    def by_torch() -> list[Call]:
        if format == "int8":
            return in_turn(partial(int8_by_torch, x), weights, NUM_CALLS)
        assert scaled_mm.takes(x, weights[0], None), "torch does not compute this product"
        return in_turn(lambda weight: scaled_mm.linear(x, weight, None), weights, NUM_CALLS)

    return shape.problem(
        format,
        m,
        weights,
        partial(linear, x, bias=None),
        {"torch": by_torch},
        partial(choose_tiles, tuning=tuning_of(DEVICE), group=group),
        expected=(x.data.float() * scale) @ weights[0].dequantized().float().T,
        tolerance=0.004,
    )


def weight_only_problem(shape: Shape, m: int, format: str) -> Problem:
    from minisgl.kernels.linear.weight_only import weight_only_tiles
    from minisgl.kernels.linear.weight_only.weight_only_gemm import dequantize, linear
    from minisgl.kernels.linear.weight_only.weights import values

    n, k, gated = shape.n, shape.k, shape.gated
    weights = copies(partial(make_words, format, n, k), shape.size * SIZES[format])
    x, first = random(m, k), weights[0]

    def dense() -> list[Call]:
        room = torch.empty(n * k, device=DEVICE, dtype=DTYPE)
        return in_turn(lambda words: cublas(gated, x, dequantize(words, room)), weights, 4)

    given = {"span": first.span, "bits": first.bits, "tuning": tuning_of(DEVICE)}
    return shape.problem(
        format,
        m,
        weights,
        partial(linear, x, epilogue=Epilogue(gated)),
        {"dense": dense} if m >= 128 else {},
        partial(weight_only_tiles.choose_tiles, **given, gated=gated),
        expected=cublas(gated, x, values(first, DTYPE)),
    )


def make_words(format: str, n: int, k: int) -> WeightWords:
    from minisgl.kernels.linear.weight_only.weights import (
        e4m3_words,
        int4_words,
        nvfp4_words,
    )

    if format == "e4m3":
        words = e4m3_words(*fp8_weights(n, k, blocks=True), DTYPE)
        assert words is not None
        return words
    if format == "nvfp4":
        return nvfp4_words(nvfp4_weights(n, k, is_tiled=False))
    return int4_words(*int4_weights(n, k, zeros=format == "int4-zeros"), DTYPE)


def linear_problem(shape: Shape, format: str, m: int) -> Problem:
    if format == "bf16":
        return dense_problem(shape, m)
    if format in MAKE_FP8:
        return fp8_problem(shape, m, format)
    return weight_only_problem(shape, m, format)


# -- all products of a layer -----------------------------------------------------------------------


def layer_problem(format: str, config: Config, m: int) -> Problem:
    """All launches of a layer but those of attention, whose result is always the same; many layers
    one behind the other."""
    from minisgl.kernels.linear import dense_product
    from minisgl.kernels.linear.fp8 import fp8_product

    shapes = [shape for shape in shapes_of(config) if shape.name not in ("gated", "head")]
    kinds = {"fp8-channel": Activations.TOKEN, "fp8-block": Activations.GROUP}

    def product(shape: Shape) -> Product:
        if format == "bf16":
            return dense_product.DenseProduct(dense_weights(shape.n, shape.k))
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

NUM_STEPS = 12
# By the format: the experts, and the weights of one product.
EXPERT_KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bf16": (ExpertWeights, dense_weights),
    "int4": (Int4Experts, int4_weights),
    "mxfp4": (Mxfp4Experts, mxfp4_weights),
    "nvfp4": (Nvfp4Experts, partial(nvfp4_weights, is_tiled=True)),
} | {
    f"fp8-{scales}": (
        partial(Fp8Experts, activations=activations),
        partial(fp8_weights, blocks=scales == "block"),
    )
    for scales, activations in (("channel", Activations.TOKEN), ("block", Activations.GROUP))
}


def experts_problem(format: str, config: Config, m: int) -> Problem:
    from minisgl.kernels.moe.expert_tiles import choose_tiles
    from minisgl.kernels.moe.fused_experts import fused_experts

    hidden, top_k = config["hidden_size"], config["num_experts_per_tok"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    num_experts = config.get("num_experts") or config["num_local_experts"]
    pack, make = EXPERT_KINDS[format]
    weights = pack(make(num_experts, 2 * inner, hidden), make(num_experts, hidden, inner))
    routing = Routing(top_k, normalize=True)
    rows = [random(m, hidden) for _ in range(NUM_STEPS)]
    logits = [random(m, num_experts) for _ in rows]
    chosen = sum(topk_softmax(each, routing)[0].unique().numel() for each in logits) / NUM_STEPS
    num_weights = 3 * hidden * inner
    size = SIZES[format] - (2 / GROUP if format == "int4" else 0)

    def tiled(tiles: Any = None) -> list[Call]:
        def ours(x: Tensor, logits: Tensor) -> object:
            return fused_experts(x, ByRouter(logits, routing), weights, tiles=tiles)[0]

        return [partial(ours, *step) for step in zip(rows, logits, strict=True)]

    return Problem(
        calls={"minisgl": tiled},
        num_bytes=chosen * num_weights * size + 4 * m * hidden,
        operations=2.0 * m * top_k * num_weights,
        in_fp8=format.startswith("fp8"),
        tiles=partial(choose_tiles, m, weights, top_k, DTYPE, tuning_of(DEVICE)),
        tiled=tiled,
    )


# -- tables ----------------------------------------------------------------------------------------

LINEAR_MODELS = ("Qwen3-14B", "Qwen3-32B", "Qwen3-0.6B", "Llama-3.1-8B")
LINEAR_FORMATS = ("bf16", "fp8-channel", "fp8-block", "int8", "int4", "int4-zeros", "e4m3", "nvfp4")
LAYER_FORMATS = ("bf16", "fp8-channel", "fp8-block")
EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
EXPERTS = {
    "Qwen3-30B-A3B": ("bf16", "fp8-channel", "fp8-block", "int4", "mxfp4", "nvfp4"),
    "gpt-oss-20b": ("bf16", "mxfp4"),
    "gpt-oss-120b": ("mxfp4",),
}


def linear_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    for model, format in itertools.product(LINEAR_MODELS, LINEAR_FORMATS):
        for shape in shapes_of(MODELS[model]):
            if (format != "bf16" and shape.name == "head") or (format in MAKE_FP8 and shape.gated):
                continue
            for m in rows or (1, 8, 16, 32, 64, 128, 256, 1024, 8192):
                name = f"{model} {shape} {format}, {m} rows"
                yield Case(name, partial(linear_problem, shape, format, m))


layer_cases = partial(
    model_cases,
    LINEAR_MODELS,
    {format: partial(layer_problem, format) for format in LAYER_FORMATS},
    (1, 8, 32, 64, 128, 256),
)


def expert_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    for model, formats in EXPERTS.items():
        kernels = {format: partial(experts_problem, format) for format in formats}
        yield from model_cases([model], kernels, EXPERT_ROWS, rows)
