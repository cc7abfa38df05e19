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
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models import packing
from minisgl.models.packing import PER_INT32, covering
from minisgl.models.target import FLOATS, Target, copy
from minisgl.shards import Shard, whole

_E4M3, _INT32, _INT64 = ("F8_E4M3",), ("I32",), ("I64",)
_INTEGERS = ("I8", "U8", "I32", "I64")
_SYMMETRIC_ZEROS = -0x77777778  # eight numbers of 8 in an int32


def quantized_weights(module: nn.Module) -> list[tuple[QuantizedWeights | Mxfp4Weights, int]]:
    """The quantised matrices of a layer, and the number of inputs of each whole one."""
    product = getattr(module, "product", None)
    if isinstance(module, Linear) and isinstance(product, Fp8Product | Int4Product):
        return [(product.weight, module.inputs.whole)]
    kinds = Fp8Experts | Int4Experts | Mxfp4Experts
    if isinstance(module, FusedExperts) and isinstance(product, kinds):
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
            elif scheme.storage != Storage.FLOAT:  # some exporters write one for dynamic inputs
                found["input_scale"] = _ignored(FLOATS, _take_anything)
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
        found = {"weight": Target(weights.data, (outputs, inputs), _E4M3, _store_e4m3)}
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
            # Where the parts of a map interleave, it has several times the outputs of this one.
            if shape[0] % outputs.whole or shape[1] != inputs.whole:
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
            "weight_shape": Target(
                *(None, (whole(2),), _INT64, check_shape), is_required=False, of_outputs=None
            ),
            "weight_g_idx": _ignored(_INTEGERS, partial(self._check_order, scheme=scheme)),
        }
        if weights.zero is not None:
            found["weight_zero_point"] = Target(
                weights.zero,
                (covering(outputs, PER_INT32), groups),
                _INT32,
                _storing(lambda packed: spread(packing.numbers_of(packed.mT, outputs).mT)),
            )
        else:
            found["weight_zero_point"] = _ignored((*_INTEGERS, *FLOATS), _check_centred)
        return found

    def _check_order(self, _: Tensor, group_of_input: Tensor, *, scheme: QuantScheme) -> None:
        """Refuse groups of inputs that are not neighbours. -1 stands for no order at all."""
        order = torch.arange(self.inputs.whole) // scheme.group_size
        if not (group_of_input == -1).all() and not torch.equal(group_of_input.long(), order):
            raise CheckpointError(
                "holds groups out of order, as desc_act and actorder: group make them, which is "
                "not supported; use the model quantised without, or as AWQ"
            )

    def _transposed_int4(self, weights: Int4Weights, scheme: QuantScheme) -> dict[str, Target]:
        """AWQ and GPTQ, which store [inputs, outputs]."""
        outputs, inputs = self.outputs, self.inputs
        groups = covering(inputs, scheme.group_size)
        packed_outputs = covering(outputs, PER_INT32)

        def spread(values: Tensor) -> Tensor:
            return packing.group_values(values, inputs, scheme.group_size, weights.group_size)

        def check_no_bias(_: Tensor, bias: Tensor) -> None:
            if bias.any():
                raise CheckpointError("is not zero, and the model has no such bias")

        found = {
            # Some exporters write one for every map; where the model has one, that takes its place.
            "bias": Target(None, (whole(outputs.whole),), store=check_no_bias, is_required=False),
            "scales": Target(
                weights.scale,
                (groups, outputs),
                store=_storing(lambda scale: spread(packing.checked(scale))),
                of_outputs=1,
            ),
        }
        if scheme.storage == Storage.AWQ:
            found["qweight"] = Target(
                weights.data,
                (inputs, packed_outputs),
                _INT32,
                _storing(lambda packed: pack_int4(packing.awq_numbers_of(packed, outputs).mT)),
                of_outputs=1,
            )
            found["qzeros"] = Target(
                weights.zero,
                (groups, packed_outputs),
                _INT32,
                _storing(lambda packed: spread(packing.awq_numbers_of(packed, outputs))),
                of_outputs=1,
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

        found["qweight"] = Target(
            weights.data,
            (covering(inputs, PER_INT32), outputs),
            _INT32,
            _storing(lambda packed: pack_int4(packing.numbers(packed.mT.contiguous()))),
            of_outputs=1,
        )
        found["qzeros"] = Target(None, (groups, packed_outputs), _INT32, check_zeros, of_outputs=1)
        found["g_idx"] = Target(
            None,
            (whole(inputs.whole),),
            _INT32,
            partial(self._check_order, scheme=scheme),
            is_required=False,
            of_outputs=None,
        )
        return found


def _storing(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def store(weight: Tensor, part: Tensor) -> None:
        weight.copy_(convert(part.to(weight.device)))

    return store


def _ignored(dtypes: tuple[str, ...], check: Callable[[Tensor, Tensor], None]) -> Target:
    """Of a tensor of any shape that says nothing new, as `check` makes sure."""
    return Target(None, (), dtypes, check, is_required=False, any_shape=True)


def _take_anything(_: Tensor, __: Tensor) -> None:
    pass


def _check_centred(_: Tensor, zero: Tensor) -> None:
    """Refuse zero points of a symmetric map that are neither 0 nor, where packed, 8."""
    packed = zero.dtype == torch.int32 and bool((zero == _SYMMETRIC_ZEROS).all())
    if zero.any() and not packed:
        raise CheckpointError("holds zero points, although the config says symmetric: true")


def _store_e4m3(weight: Tensor, part: Tensor) -> None:
    copy(weight, part)
    # NaN has all bits but the sign; looked for where the weights are, which may be a GPU.
    if weight.numel() and int((weight.view(torch.uint8) & 0x7F).amax()) == 0x7F:
        raise CheckpointError("holds NaN (bytes 7F or FF)")


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
