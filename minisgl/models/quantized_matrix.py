"""The tensors of a quantised linear map in a checkpoint, and where a rank's part of them goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

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
from minisgl.layers.linear import Linear
from minisgl.models import packing
from minisgl.models.packing import PER_INT32, covering
from minisgl.models.target import Target
from minisgl.shards import Shard, whole

_E4M3, _INT32, _INT64 = ("F8_E4M3",), ("I32",), ("I64",)


def quantized_weights(module: nn.Module) -> list[tuple[QuantizedWeights, int]]:
    """The quantised matrices of a layer, and the number of inputs of each whole one."""
    product = getattr(module, "product", None)
    if isinstance(module, Linear) and isinstance(product, Fp8Product | Int4Product):
        return [(product.weight, module.inputs.whole)]
    if isinstance(module, FusedExperts) and isinstance(product, Fp8Experts | Int4Experts):
        return [(product.gate_up, module.hidden.whole), (product.down, module.inner.whole)]
    return []


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
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
        groups = covering(inputs, scheme.group_size)
        packed_outputs = covering(outputs, PER_INT32)

        def spread(values: Tensor) -> Tensor:
            return packing.group_values(values, inputs, scheme.group_size, weights.group_size)

        found = {
            "scales": Target(
                weights.scale,
                (groups, outputs),
                store=_storing(lambda scale: spread(packing.checked(scale))),
            )
        }
        if scheme.storage == Storage.AWQ:
            found["qweight"] = Target(
                weights.data,
                (inputs, packed_outputs),
                _INT32,
                _storing(lambda packed: pack_int4(packing.awq_numbers_of(packed, outputs).mT)),
            )
            found["qzeros"] = Target(
                weights.zero,
                (groups, packed_outputs),
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

        def check_no_bias(_: Tensor, bias: Tensor) -> None:
            if bias.any():
                raise CheckpointError("is not zero, and the model has no such bias")

        # AutoGPTQ wrote one for every map; where the model has one, that takes its place.
        cut = (whole(outputs.whole),)
        found["bias"] = Target(None, cut, store=check_no_bias, is_required=False)
        found["qweight"] = Target(
            weights.data,
            (covering(inputs, PER_INT32), outputs),
            _INT32,
            _storing(lambda packed: pack_int4(packing.numbers(packed.mT.contiguous()))),
        )
        found["qzeros"] = Target(None, (groups, packed_outputs), _INT32, check_zeros)
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
