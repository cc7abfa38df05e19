"""INT4: integers from 0 to 15 with a scale, and perhaps a zero point, of each group of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import CHUNK, Int4Weights, pack_int4
from minisgl.kernels.linear.select_product import int4_product
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.quantized_experts import Int4Experts
from minisgl.layers.formats import HeldExperts, num_rows
from minisgl.models import packing
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.formats.quantized_format import Held, MatrixFormat, Reader, Sign
from minisgl.models.packing import PER_INT32, covering, finite
from minisgl.models.target import FLOATS, Store, Target, ignored, storing
from minisgl.shards import Shard, whole

_INT32, _INTEGERS = ("I32",), ("I8", "U8", "I32", "I64")
_SYMMETRIC_ZEROS = -0x77777778  # eight numbers of 8 in an int32
_GROUP_SIZES = (32, 64, 128)
_ALIKE = "use a checkpoint whose layers are all quantised alike"
_AWQ_FIELDS = field_names(
    """bits w_bit group_size q_group_size zero_point version backend
    do_fuse modules_to_fuse fuse_max_seq_len exllama_config
    sym desc_act dynamic lm_head method format checkpoint_format pack_dtype pack_impl meta"""
)
_AUTO_ROUND_FIELDS = field_names(
    """bits group_size sym data_type packing_format extra_config autoround_version
    backend act_bits act_group_size act_sym act_dynamic act_data_type super_bits super_group_size
    iters lr minmax_lr nsamples seqlen batch_size low_gpu_mem_usage enable_quanted_input
    enable_minmax_tuning enable_norm_bias_tuning gradient_accumulate_steps amp scale_dtype dataset
    damp_percent desc_act dynamic lm_head quant_block_list to_quant_block_names
    block_name_to_quantize export_to_format supported_types static_kv_dtype static_attention_dtype
    rotation_config provider"""
)
_GPTQ_FIELDS = field_names(
    """bits group_size sym desc_act dynamic lm_head checkpoint_format format
    method pack_dtype pack_impl damp_percent damp_auto_increment static_groups true_sequential mse
    act_group_aware hyb_act model_name_or_path model_file_base_name model_seqlen meta quantizer
    dataset tokenizer batch_size block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize cache_block_outputs pad_token_id max_input_length use_cuda_fp16
    backend use_exllama disable_exllama exllama_config cache_examples_on_gpu is_marlin_format"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(MatrixFormat[Int4Weights]):
    """A subclass for each layout in which a checkpoint has the integers."""

    matrices: ClassVar[type] = Int4Weights
    bits: ClassVar[int] = 4
    multiple: ClassVar[int] = CHUNK
    layout: ClassVar[str]  # for people

    group_size: int
    symmetric: bool = True  # False: groups have zero points
    scale_dtype: torch.dtype = torch.float32  # of the scales here

    def matrix_bytes(self, n: int, k: int) -> int:
        scales = n * k // self.group_size
        return n * k // 2 + 2 * scales + (0 if self.symmetric else scales)

    def __str__(self) -> str:
        zeros = "" if self.symmetric else " with zero points"
        return f"INT4 in groups of {self.group_size}{zeros} ({self.layout})"

    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        """With scales of a dtype in which they lose nothing."""
        kinds = {"F16": torch.float16, "BF16": torch.bfloat16}
        found = {dtype} if scales is None else {kinds.get(each, torch.float32) for each in scales}
        is_wide = dtype == torch.float32 or len(found) != 1
        return replace(self, scale_dtype=torch.float32 if is_wide else found.pop())

    def allocate(
        self, name: str, parts: Sequence[Shard], inputs: Shard, *leading: int
    ) -> Int4Weights:
        if inputs.size % CHUNK or inputs.whole % self.group_size:
            raise UnsupportedModelError(
                f"{name} has {inputs.whole} inputs, {inputs.size} of them on each rank: those of "
                f"INT4 weights must be a multiple of the group size {self.group_size}, and "
                f"on each rank of {CHUNK}. Choose another --tp, or FP8 weights."
            )
        return Int4Weights.allocate(
            *(*leading, num_rows(parts), inputs.size),
            group_size=math.gcd(self.group_size, inputs.first, inputs.size),
            symmetric=self.symmetric,
            scale_dtype=self.scale_dtype,
        )

    def product(self, weights: Int4Weights, bias: Tensor | None) -> Product:
        return int4_product(weights, bias)

    def experts(self, path: str, held: HeldExperts, dtype: torch.dtype) -> ExpertsProduct:
        return Int4Experts(*self.allocate_experts(path, held), gelu=held.gelu)

    def groups(self, held: Held[Int4Weights]) -> tuple[Shard, Callable[[Tensor], Tensor]]:
        """Which groups of a checkpoint's inputs the rank reads, and what makes of their values
        [groups, n] those of the groups here."""
        weights, inputs = held.weights, held.inputs
        return covering(inputs, self.group_size), lambda values: packing.spread(
            values, 0, inputs, self.group_size, weights.group_size
        )

    def order_of(self, inputs: Shard) -> Store:
        """Refuses groups of inputs that are not neighbours. -1 stands for no order at all."""
        order = torch.arange(inputs.whole) // self.group_size

        def check(_: Tensor, group_of_input: Tensor) -> None:
            if not (group_of_input == -1).all() and not torch.equal(group_of_input.long(), order):
                raise CheckpointError(
                    "holds groups out of order, as desc_act and actorder: group make them, which "
                    "is not supported; use the model quantised without, or as AWQ"
                )

        return check


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedInt4(Int4):
    """[n, k], of which an int32 has eight of a row, or eight zero points of a column."""

    offered: ClassVar[str] = "INT4 (compressed-tensors pack-quantized)"
    sign: ClassVar[Sign | None] = "weight_packed", "I32"
    layout: ClassVar[str] = "compressed-tensors"

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"compressed-tensors pack-quantized": _read_compressed}

    def targets(self, held: Held[Int4Weights]) -> dict[str, Target]:
        weights, outputs, inputs, _ = held
        groups, spread = self.groups(held)

        def check_shape(_: Tensor, shape: Tensor) -> None:
            # Where the parts of a map interleave, it has several times the outputs of this one.
            if shape[0] % outputs.whole or shape[1] != inputs.whole:
                raise CheckpointError(
                    f"says {shape.tolist()}; the config asks for {[outputs.whole, inputs.whole]}"
                )

        def zeros(packed: Tensor) -> Tensor:
            return spread(packing.numbers_of(packed.mT, outputs))

        zero_point = CENTRED
        if weights.zero is not None:
            cut = covering(outputs, PER_INT32), groups
            zero_point = Target(weights.zero, cut, _INT32, storing(zeros))
        return {
            "weight_packed": Target(
                weights.data,
                (outputs, covering(inputs, PER_INT32)),
                _INT32,
                storing(lambda packed: pack_int4(packing.numbers(packed))),
            ),
            "weight_scale": Target(
                weights.scale,
                (outputs, groups),
                store=storing(lambda scale: spread(finite(scale).mT)),
            ),
            "weight_zero_point": zero_point,
            "weight_shape": Target(
                *(None, (whole(2),), ("I64", "I32"), check_shape),
                is_required=False,
                of_outputs=None,
            ),
            "weight_g_idx": ignored(_INTEGERS, self.order_of(inputs)),
        }


class _Transposed(Int4):
    """[k, n]."""

    def common(self, held: Held[Int4Weights]) -> dict[str, Target]:
        groups, spread = self.groups(held)
        cut = groups, held.outputs
        store = storing(lambda scale: spread(finite(scale)))
        return {
            # Some exporters write one for every map; where the model has one, that takes its place.
            "bias": Target(
                *(None, (whole(held.outputs.whole),), FLOATS, _check_no_bias), is_required=False
            ),
            "scales": Target(held.weights.scale, cut, store=store, of_outputs=1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(_Transposed):
    """An int32 has eight of a row of [k, n], in an order of its own."""

    offered: ClassVar[str] = "AWQ"
    sign: ClassVar[Sign | None] = "qweight", "I32"
    layout: ClassVar[str] = "awq"

    symmetric: bool = False

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"awq": _read_awq}

    def targets(self, held: Held[Int4Weights]) -> dict[str, Target]:
        weights, outputs, inputs, _ = held
        groups, spread = self.groups(held)
        packed = covering(outputs, PER_INT32)

        def numbers(packed: Tensor) -> Tensor:
            return packing.numbers_of(packed, outputs, packing.AWQ_ORDER)

        store = storing(lambda packed: pack_int4(numbers(packed).mT))
        store_zeros = storing(lambda packed: spread(numbers(packed)))
        return self.common(held) | {
            "qweight": Target(weights.data, (inputs, packed), _INT32, store, of_outputs=1),
            "qzeros": Target(weights.zero, (groups, packed), _INT32, store_zeros, of_outputs=1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(_Transposed):
    """An int32 has eight of a column of [k, n]."""

    offered: ClassVar[str] = "GPTQ (AutoRound, too)"
    sign: ClassVar[Sign | None] = "qweight", "I32"
    layout: ClassVar[str] = "gptq"
    zero: ClassVar[int] = 7  # how it stores the zero point 8

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"gptq": _read_gptq, "auto-round": _read_auto_round}

    def targets(self, held: Held[Int4Weights]) -> dict[str, Target]:
        weights, outputs, inputs, _ = held
        groups, _ = self.groups(held)

        def check_zeros(_: Tensor, packed: Tensor) -> None:
            if not (packing.numbers_of(packed, outputs) == self.zero).all():
                raise CheckpointError(
                    f"holds zero points other than 8 (stored as {self.zero} in {self.layout}), "
                    "which are not supported; use the model quantised with sym: true, or as AWQ"
                )

        cut = covering(inputs, PER_INT32), outputs
        zeros = groups, covering(outputs, PER_INT32)
        store = storing(lambda packed: pack_int4(packing.numbers(packed.mT.contiguous())))
        return self.common(held) | {
            "qweight": Target(weights.data, cut, _INT32, store, of_outputs=1),
            "qzeros": Target(None, zeros, _INT32, check_zeros, of_outputs=1),
            "g_idx": Target(
                *(None, (whole(inputs.whole),), _INT32, self.order_of(inputs)),
                is_required=False,
                of_outputs=None,
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqV2(Gptq):
    """The same with zero points as they are."""

    layout: ClassVar[str] = "gptq_v2"
    zero: ClassVar[int] = 8


def _check_no_bias(_: Tensor, bias: Tensor) -> None:
    if bias.any():
        raise CheckpointError("is not zero, and the model has no such bias")


def _check_centred(_: Tensor, zero: Tensor) -> None:
    """Refuse zero points of a symmetric map that are neither 0 nor, where packed, 8."""
    packed = zero.dtype == torch.int32 and bool((zero == _SYMMETRIC_ZEROS).all())
    if zero.any() and not packed:
        raise CheckpointError("holds zero points, although the config says symmetric: true")


CENTRED = ignored((*_INTEGERS, *FLOATS), _check_centred)  # the zero points of a symmetric map


# -- configs --------------------------------------------------------------------------------------


def _read_awq(fields: Fields) -> Awq:
    fields.refuse_others(_AWQ_FIELDS)
    _refuse_exceptions(fields)
    fields.require("zero_point", (True,), ", which AutoAWQ's default is")
    version = fields.values.get("version")
    if str(version or "gemm").lower() != "gemm":
        raise fields.refused("version", "use the checkpoint of version gemm")
    # GPTQModel writes AWQ, too, with fields of its own.
    fields.require("desc_act", (None, False))
    fields.require("pack_dtype", (None, "int32"))
    for name in ("checkpoint_format", "format"):
        fields.require(name, (None, "gemm"))
    return Awq(group_size=_group_size(fields, ("bits", "w_bit"), ("group_size", "q_group_size")))


def _read_gptq(fields: Fields) -> Gptq:
    fields.refuse_others(_GPTQ_FIELDS)
    fields.require("desc_act", (None, False), ": use the model quantised without it, or as AWQ")
    _refuse_exceptions(fields)
    if fields.values.get("is_marlin_format"):
        raise fields.refused("is_marlin_format", "use the checkpoint of format gptq")
    fields.require("sym", (True,), ": use a symmetric checkpoint, or one quantised as AWQ")
    fields.require("pack_dtype", (None, "int32"))
    name = "checkpoint_format" if fields.values.get("checkpoint_format") else "format"
    fields.require(name, (None, "gptq", "gptq_v2"))
    version = GptqV2 if fields.values.get(name) == "gptq_v2" else Gptq
    return version(group_size=_group_size(fields))


def _read_auto_round(fields: Fields) -> Int4:
    """AutoRound packs as GPTQ, or as AWQ; packing_format says which."""
    fields.refuse_others(_AUTO_ROUND_FIELDS)
    fields.require("data_type", (None, "int"), ": use an INT4 or FP8 checkpoint")
    fields.require("desc_act", (None, False))
    for name in ("act_bits", "super_bits", "rotation_config"):
        if fields.values.get(name) not in (None, 0, 16, 32, {}):
            raise fields.refused(name, "use a checkpoint of which only the weights are quantised")
    _refuse_exceptions(fields)
    for values in fields.part("extra_config").values.values():
        # Layers that are not quantised show in the tensors.
        if not isinstance(values, dict) or values.get("bits") not in (16, 32):
            raise fields.refused("extra_config", _ALIKE)
    name = "packing_format"
    packing = str(fields.values.get(name) or "auto_round:auto_gptq").removeprefix("auto_round:")
    group_size = _group_size(fields)
    if packing in ("auto_awq", "awq"):
        return Awq(group_size=group_size)  # the zero points are stored if sym says so, too
    if packing not in ("auto_gptq", "gptq"):
        raise fields.refused(name, "allowed: auto_round:auto_gptq or auto_round:auto_awq")
    fields.require("sym", (True,), ": use a symmetric checkpoint, or one packed as AWQ")
    return Gptq(group_size=group_size)


def _read_compressed(group: Fields) -> CompressedInt4:
    weights, inputs = group.part("weights"), group.part("input_activations")
    weights.require("type", ("int",), " in pack-quantized")
    if inputs.values:
        raise inputs.refused("type", "with INT4 weights inputs are not quantised")
    weights.require("actorder", (None, False, "static", "weight"), ": not by group")
    weights.require("strategy", ("group",))
    group_size = _group_size(weights, ("num_bits",))
    return CompressedInt4(group_size=group_size, symmetric=weights.flag("symmetric", True))


def _refuse_exceptions(fields: Fields) -> None:
    """Refuse layers quantised otherwise than the rest."""
    for name, settings in fields.part("dynamic").values.items():
        # Layers behind "-:" are not quantised, which shows in the tensors; {} changes nothing.
        if settings and not name.startswith("-:"):
            raise fields.refused("dynamic", _ALIKE)


def _group_size(
    fields: Fields, bits: tuple[str, ...] = ("bits",), sizes: tuple[str, ...] = ("group_size",)
) -> int:
    """That of 4 bits, by whichever of these names a field has."""
    given = fields.values
    bits_name, name = (
        next((name for name in names if name in given), names[0]) for names in (bits, sizes)
    )
    fields.require(bits_name, (4,), " for integers: use a 4-bit checkpoint, FP8, or W8A8 in INT8")
    fields.require(name, _GROUP_SIZES)
    return fields.count(name)
