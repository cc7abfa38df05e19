"""Which tensors a checkpoint must have, and where each goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from minisgl.config import QuantScheme, Storage
from minisgl.kernels.linear.quantized import Fp8Product, Fp8Weights, Int4Product
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
from minisgl.layers.attention import SelfAttention
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import EXPERT_MAPS
from minisgl.layers.linear import Linear, RowParallelLinear, VocabParallelEmbedding
from minisgl.models import interleaved_experts, packing
from minisgl.models.quantized_matrix import QuantizedMatrix
from minisgl.models.target import Target
from minisgl.shards import Shard, whole


@dataclass(frozen=True, slots=True)
class Names:
    """How tensors of a checkpoint are called in the model."""

    # None for what the model leaves aside.
    of: Callable[[str], str | None]
    is_quantizable: Callable[[str], bool]  # of a linear map in the model


@dataclass(frozen=True, slots=True)
class TiedHead:
    """A head that is the embedding: a checkpoint may have it once more, and then it must be
    equal."""

    name: str  # of the head's weight
    target: Target  # the other, or its rows that are a head here


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the tensors of a checkpoint go, by their names in the model."""

    targets: dict[str, Target]
    stacks: dict[str, Stack]
    scheme: QuantScheme | None
    is_left_out: Callable[[str], bool]  # of a tensor that is none of the others
    tied_head: TiedHead | None = None


def checkpoint_targets(
    model: nn.Module, scheme: QuantScheme | None, prefix: str = ""
) -> dict[str, Target]:
    """Maps the names of the tensors that a checkpoint has of a model to their destinations.

    prefix: left out of the names. A parameter that is on the meta device is no destination.
    """
    targets: dict[str, Target] = {}
    for full_path, module in model.named_modules():
        path = full_path.removeprefix(prefix)
        if isinstance(module, FusedExperts):
            targets |= _expert_targets(path, module, scheme)
        elif isinstance(module, SelfAttention):
            if module.sinks is not None:
                targets[f"{path}.sinks"] = Target(module.sinks, (module.heads,))
        elif isinstance(module, Linear):
            targets |= _linear_targets(path, module, scheme)
        else:
            for kind, weight in _stored(module):
                cut = tuple(map(whole, weight.shape))
                if isinstance(module, VocabParallelEmbedding):
                    cut = (module.vocab, cut[1])
                if not weight.is_meta:
                    targets[f"{path}.{kind}"] = Target(weight, cut)
    return targets


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has of a module itself."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _linear_targets(path: str, module: Linear, scheme: QuantScheme | None) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    parent = path[: path.rfind(".") + 1]
    product, bias, first = module.product, module.product.weights.get("bias"), 0
    for part, outputs in module.parts.items():
        name, rows = parent + part, slice(first, first + outputs.size)
        if scheme is not None and isinstance(product, Fp8Product | Int4Product):
            scale = product.input_scale if isinstance(product, Fp8Product) else None
            matrix = QuantizedMatrix(
                name, product.weight.rows(first, outputs.size), outputs, module.inputs
            )
            targets |= matrix.targets(scheme, scale)
        else:
            weight = product.weights["weight"]
            targets[f"{name}.weight"] = Target(weight[rows], (outputs, module.inputs))
        if bias is not None:
            cut = outputs
            if isinstance(module, RowParallelLinear) and not module.holds_bias:
                cut = Shard(outputs.size, outputs.size, outputs.size)
            targets[f"{name}.bias"] = Target(bias[rows], (cut,))
        first += outputs.size
    return targets


def _expert_targets(
    path: str, module: FusedExperts, scheme: QuantScheme | None
) -> dict[str, Target]:
    """The tensors of each matrix of each expert, or those of all of them."""
    if module.interleaved:
        return interleaved_experts.expert_targets(path, module)
    targets: dict[str, Target] = {}
    inner, hidden, product = module.inner, module.hidden, module.product
    assert not isinstance(product, Mxfp4Experts), "stacks of others are no MXFP4"
    for expert in range(module.num_experts):
        names = [f"{path}.{expert}.{part}" for part in EXPERT_MAPS]
        cuts = [(inner, hidden), (inner, hidden), (hidden, inner)]
        if scheme is not None and isinstance(product, Fp8Experts | Int4Experts):
            gate_up, down = product.gate_up.expert(expert), product.down.expert(expert)
            matrices = gate_up.rows(0, inner.size), gate_up.rows(inner.size, inner.size), down
            scales: list[Tensor | None] = [None] * 3
            if isinstance(product, Fp8Experts) and product.input_scales is not None:
                ins = product.input_scales
                scales = [ins.gate_up[expert], ins.gate_up[expert], ins.down[expert]]
            for name, matrix, cut, scale in zip(names, matrices, cuts, scales, strict=True):
                targets |= QuantizedMatrix(name, matrix, *cut).targets(scheme, scale)
        else:
            gate, up = product.weights["gate_up_proj"][expert].chunk(2)
            weights = gate, up, product.weights["down_proj"][expert]
            for name, weight, cut in zip(names, weights, cuts, strict=True):
                targets[f"{name}.weight"] = Target(weight, cut)
    return targets


# -- stacks of experts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that holds the matrices of all experts.

    Some exporters store these transposed. The shapes reveal it, because at most one of a layer's
    two can fit by accident: the gates' if hidden_size is twice an expert's size, the other's if
    both are equal.
    """

    targets: tuple[Target, ...]  # the destinations, each with its own cut
    stands_for: tuple[str, ...]  # the names in `checkpoint_targets` that it replaces


def checkpoint_stacks(
    model: nn.Module, scheme: QuantScheme | None, prefix: str = ""
) -> dict[str, Stack]:
    """Maps names, as in `checkpoint_targets`, to the stacks of a checkpoint that is not
    quantised."""
    stacks: dict[str, Stack] = {}
    if scheme is not None and scheme.storage != Storage.FLOAT:
        return stacks
    for full_path, module in model.named_modules():
        if not isinstance(module, FusedExperts) or module.interleaved:
            continue
        path = full_path.removeprefix(prefix)
        names = [f"{path}.{expert}" for expert in range(module.num_experts)]
        experts, hidden, inner = whole(module.num_experts), module.hidden, module.inner
        gates = Shard(inner.first, inner.size, 2 * inner.whole)
        ups = Shard(inner.whole + inner.first, inner.size, 2 * inner.whole)
        gate_up, down = _stacked(module)
        stacks[f"{path}.gate_up_proj"] = Stack(
            (
                _stack_target(gate_up, 0, (experts, gates, hidden)),
                _stack_target(gate_up, inner.size, (experts, ups, hidden)),
            ),
            tuple(f"{name}.{kind}.weight" for name in names for kind in ("gate_proj", "up_proj")),
        )
        stacks[f"{path}.down_proj"] = Stack(
            (_stack_target(down, 0, (experts, hidden, inner)),),
            tuple(f"{name}.down_proj.weight" for name in names),
        )
    return stacks


def _stacked(module: FusedExperts) -> tuple[Tensor | Fp8Weights, Tensor | Fp8Weights]:
    product = module.product
    if isinstance(product, Fp8Experts):
        return product.gate_up, product.down
    return product.weights["gate_up_proj"], product.weights["down_proj"]


def _stack_target(weights: Tensor | Fp8Weights, first: int, cut: tuple[Shard, ...]) -> Target:
    """Of the rows of each expert from `first` on."""
    _, outputs, inputs = cut
    rows = slice(first, first + outputs.size)
    if isinstance(weights, Tensor):
        return Target(weights[:, rows], cut)
    part = Fp8Weights(weights.data[:, rows], weights.scale[:, rows])
    return Target(
        part.data,
        (*cut[:2], whole(inputs.whole)),
        store=lambda _, stored: packing.quantize_into(part, stored, inputs),
        scale=part.scale,
    )
