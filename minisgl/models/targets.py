"""Which tensors a checkpoint must have, and where each goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minisgl.config import BLOCK, Activations, QuantScheme, Storage
from minisgl.errors import CheckpointError
from minisgl.kernels.linear.quantized import (
    Fp8Product,
    Fp8Weights,
    Int4Product,
    Int4Weights,
    QuantizedWeights,
    pack_int4,
)
from minisgl.kernels.moe.quantized import Fp8Experts, Int4Experts
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear, RowParallelLinear, VocabParallelEmbedding
from minisgl.models import packing
from minisgl.models.packing import PER_INT32, covering
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard, whole

FLOATS = ("F32", "F16", "BF16")  # as safetensors names them
_E4M3, _INT32, _INT64 = ("F8_E4M3",), ("I32",), ("I64",)


def _copy(weight: Tensor, part: Tensor) -> None:
    """part: as far as the checkpoint has it. The rest of the weight is zero padding."""
    weight.zero_()
    weight[tuple(slice(size) for size in part.shape)].copy_(part)


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checkpoint tensor."""

    weight: Tensor | None  # a parameter, or a part of one; None: the tensor is only checked
    cut: tuple[Shard, ...]  # the range of each of the tensor's dimensions that is read
    dtypes: tuple[str, ...] = FLOATS
    # Stores what was read in the weight; raises CheckpointError with the end of a sentence.
    store: Callable[[Tensor, Tensor], None] = _copy
    scalar: bool = False  # one number, as [1] or []
    scale: Tensor | None = None  # a parameter that `store` fills, too
    is_required: bool = True

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes that the tensor may have in the checkpoint."""
        shape = [shard.whole for shard in self.cut]
        return [[1], []] if self.scalar else [shape]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.scale) if tensor is not None)

    def fill(self, part: Tensor) -> None:
        """part: the cut as far as the checkpoint has it."""
        self.store(torch.empty(0) if self.weight is None else self.weight, part)


def checkpoint_targets(model: CausalLM) -> dict[str, Target]:
    """Maps the names of a checkpoint's tensors, without 'model.', to their destinations."""
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedExperts):
            targets |= _expert_targets(path, module, model.quantization)
        elif isinstance(module, Linear):
            targets |= _linear_targets(path, module, model.quantization)
        else:
            for kind, weight in module.named_parameters(recurse=False):
                cut = tuple(map(whole, weight.shape))
                if isinstance(module, VocabParallelEmbedding):
                    cut = (module.vocab, cut[1])
                targets[f"{path}.{kind}"] = Target(weight, cut)
    return targets


def _linear_targets(path: str, module: Linear, scheme: QuantScheme | None) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    parent = path[: path.rfind(".") + 1]
    product, bias, first = module.product, module.product.weights.get("bias"), 0
    for part, outputs in module.parts.items():
        name, rows = parent + part, slice(first, first + outputs.size)
        if scheme is not None and isinstance(product, Fp8Product | Int4Product):
            scale = product.input_scale if isinstance(product, Fp8Product) else None
            matrix = _Matrix(name, product.weight.rows(first, outputs.size), outputs, module.inputs)
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
    """The tensors of each matrix of each expert."""
    targets: dict[str, Target] = {}
    inner, hidden, product = module.inner, module.hidden, module.product
    for expert in range(module.num_experts):
        names = [f"{path}.{expert}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        cuts = [(inner, hidden), (inner, hidden), (hidden, inner)]
        if scheme is not None and isinstance(product, Fp8Experts | Int4Experts):
            gate_up, down = product.gate_up.expert(expert), product.down.expert(expert)
            matrices = gate_up.rows(0, inner.size), gate_up.rows(inner.size, inner.size), down
            scales: list[Tensor | None] = [None] * 3
            if isinstance(product, Fp8Experts) and product.input_scales is not None:
                ins = product.input_scales
                scales = [ins.gate_up[expert], ins.gate_up[expert], ins.down[expert]]
            for name, matrix, cut, scale in zip(names, matrices, cuts, scales, strict=True):
                targets |= _Matrix(name, matrix, *cut).targets(scheme, scale)
        else:
            gate, up = product.weights["gate_up_proj"][expert].chunk(2)
            weights = gate, up, product.weights["down_proj"][expert]
            for name, weight, cut in zip(names, weights, cuts, strict=True):
                targets[f"{name}.weight"] = Target(weight, cut)
    return targets


# -- quantised matrices ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A rank's part of a quantised linear map."""

    name: str
    weights: QuantizedWeights
    outputs: Shard
    inputs: Shard

    def targets(self, scheme: QuantScheme, input_scale: Tensor | None) -> dict[str, Target]:
        """The checkpoint's tensors. input_scale: where their largest of all maps of one input goes,
        if the product needs it."""
        if isinstance(self.weights, Fp8Weights):
            found = self._fp8(self.weights, scheme)
            if scheme.activations == Activations.STATIC:
                found["input_scale"] = Target(
                    input_scale, (whole(1),), store=_store_largest, scalar=True
                )
        elif scheme.storage == Storage.COMPRESSED:
            found = self._compressed_int4(self.weights, scheme)
        else:
            found = self._transposed_int4(self.weights, scheme)
        return {f"{self.name}.{kind}": target for kind, target in found.items()}

    def _fp8(self, weights: Fp8Weights, scheme: QuantScheme) -> dict[str, Target]:
        outputs, inputs = self.outputs, self.inputs
        if scheme.storage == Storage.FLOAT:
            return {
                "weight": Target(
                    weights.data,
                    (outputs, whole(inputs.whole)),
                    store=lambda _, part: packing.quantize_into(weights, part, inputs),
                    scale=weights.scale,
                )
            }
        found = {"weight": Target(weights.data, (outputs, inputs), _E4M3)}
        if weights.block is not None:
            convert = partial(
                packing.block_scales,
                outputs=outputs,
                inputs=inputs,
                stored=BLOCK,
                block=weights.block,
            )
            name = "weight_scale_inv" if scheme.storage == Storage.FP8 else "weight_scale"
            cut = covering(outputs, BLOCK), covering(inputs, BLOCK)
            found[name] = Target(weights.scale, cut, store=_storing(convert))
        elif scheme.strategy == "tensor":
            found["weight_scale"] = Target(
                weights.scale, (whole(1),), store=_store_alike, scalar=True
            )
        else:
            found["weight_scale"] = Target(
                weights.scale, (outputs, whole(1)), store=_storing(_channel_scales)
            )
        return found

    def _compressed_int4(self, weights: Int4Weights, scheme: QuantScheme) -> dict[str, Target]:
        outputs, inputs = self.outputs, self.inputs
        groups = covering(inputs, scheme.group_size)

        def spread(values: Tensor) -> Tensor:
            return packing.group_values(values.mT, inputs, scheme.group_size, weights.group_size)

        def check_shape(_: Tensor, shape: Tensor) -> None:
            if shape.tolist() != [outputs.whole, inputs.whole]:
                raise CheckpointError(
                    f"says {shape.tolist()}; the config asks for {[outputs.whole, inputs.whole]}"
                )

        found = {
            "weight_packed": Target(
                weights.data,
                (outputs, covering(inputs, PER_INT32)),
                _INT32,
                _storing(lambda packed: pack_int4(packing.numbers(packed))),
            ),
            "weight_scale": Target(
                weights.scale,
                (outputs, groups),
                store=_storing(lambda scale: spread(packing.checked(scale))),
            ),
            "weight_shape": Target(None, (whole(2),), _INT64, check_shape, is_required=False),
        }
        if weights.zero is not None:
            found["weight_zero_point"] = Target(
                weights.zero,
                (covering(outputs, PER_INT32), groups),
                _INT32,
                _storing(lambda packed: spread(packing.numbers_of(packed.mT, outputs).mT)),
            )
        return found

    def _transposed_int4(self, weights: Int4Weights, scheme: QuantScheme) -> dict[str, Target]:
        """AWQ and GPTQ, which store [inputs, outputs]."""
        outputs, inputs = self.outputs, self.inputs
        groups, packed_outputs = (
            covering(inputs, scheme.group_size),
            covering(outputs, PER_INT32),
        )

        def spread(values: Tensor) -> Tensor:
            return packing.group_values(values, inputs, scheme.group_size, weights.group_size)

        found = {
            "scales": Target(
                weights.scale,
                (groups, outputs),
                store=_storing(lambda scale: spread(packing.checked(scale))),
            )
        }
        zeros = groups, packed_outputs
        if scheme.storage == Storage.AWQ:
            found["qweight"] = Target(
                weights.data,
                (inputs, packed_outputs),
                _INT32,
                _storing(lambda packed: pack_int4(packing.awq_numbers_of(packed, outputs).mT)),
            )
            found["qzeros"] = Target(
                weights.zero,
                zeros,
                _INT32,
                _storing(lambda packed: spread(packing.awq_numbers_of(packed, outputs))),
            )
            return found
        # GPTQ's first version stored zero points less one.
        zero = 7 if scheme.storage == Storage.GPTQ else 8

        def check_zeros(_: Tensor, packed: Tensor) -> None:
            if not (packing.numbers_of(packed, outputs) == zero).all():
                raise CheckpointError(
                    f"holds zero points other than 8 (stored as {zero} in {scheme.storage}), "
                    "which are not supported; use the model quantised with sym: true, or as AWQ"
                )

        def check_order(_: Tensor, group_of_input: Tensor) -> None:
            order = torch.arange(inputs.whole, dtype=torch.int32) // scheme.group_size
            if not torch.equal(group_of_input, order):
                raise CheckpointError(
                    "holds groups out of order, as desc_act makes them, which is not supported; "
                    "use the model quantised with desc_act: false, or as AWQ"
                )

        found["qweight"] = Target(
            weights.data,
            (covering(inputs, PER_INT32), outputs),
            _INT32,
            _storing(lambda packed: pack_int4(packing.numbers(packed.mT.contiguous()))),
        )
        found["qzeros"] = Target(None, zeros, _INT32, check_zeros)
        found["g_idx"] = Target(
            None, (whole(inputs.whole),), _INT32, check_order, is_required=False
        )
        return found


def _storing(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def store(weight: Tensor, part: Tensor) -> None:
        weight.copy_(convert(part.to(weight.device)))

    return store


def _channel_scales(scale: Tensor) -> Tensor:
    return packing.checked(scale).flatten()


def _store_alike(weight: Tensor, part: Tensor) -> None:
    weight.copy_(packing.checked(part).flatten().expand(weight.shape))


def _store_largest(weight: Tensor, part: Tensor) -> None:
    scale = packing.checked(part).flatten()[0].float().to(weight.device)
    if scale == 0:
        raise CheckpointError("holds the scale 0, by which inputs cannot be divided")
    if weight.numel():
        torch.maximum(weight, scale, out=weight)


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


def checkpoint_stacks(model: CausalLM) -> dict[str, Stack]:
    """Maps names, as in `checkpoint_targets`, to the stacks of a checkpoint that is not
    quantised."""
    stacks: dict[str, Stack] = {}
    scheme = model.quantization
    if scheme is not None and scheme.storage != Storage.FLOAT:
        return stacks
    for path, module in model.named_modules():
        if not isinstance(module, FusedExperts):
            continue
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
